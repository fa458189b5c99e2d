"""Trains many networks and returns their test accuracies."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rectgrad import training
from rectgrad.many.occlusion import Occluded
from rectgrad.training import Plan

THREADS = 2  # on a CPU: fixed, because the rounding of sums depends on the number of threads


@contextlib.contextmanager
def fixed_threads() -> Iterator[None]:
    """Uses a fixed number of threads on every machine and restores the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def at_once(device: str) -> int:
    """How many networks to train together. On a GPU, enough to hide the cost of kernel launches."""
    return 45 if _by_kernels(device) else 1


def _by_kernels(device: str) -> bool:
    """Whether our kernels can be used: they need a GPU and Triton."""
    return torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None


def train(
    train_set: Occluded,
    test_set: Occluded,
    seeds: Sequence[int],
    plan: Plan,
    dtype: torch.dtype = torch.bfloat16,
) -> list[float]:
    """Trains one network per seed on its images of `train_set` and returns the accuracies on `test_set`.

    `dtype` is the dtype in which our GPU kernels multiply.
    """
    plans = [replace(plan, seed=seed) for seed in seeds]
    if _by_kernels(plan.device):
        with torch.cuda.device(plan.device):
            return _together(train_set, test_set, plans, dtype)
    with fixed_threads():
        return [_alone(train_set, test_set, i, each) for i, each in enumerate(plans)]


def _alone(train_set: Occluded, test_set: Occluded, network: int, plan: Plan) -> float:
    run = training.fresh(plan)
    x = train_set.inputs(network, 0, len(train_set)).contiguous()
    for _ in range(plan.epochs):
        run.losses.append(training.one_epoch(run, x, train_set.labels, plan))
    run.module.eval()
    predicted = training.logits(run.module, test_set.inputs(network, 0, len(test_set)).contiguous()).argmax(1)
    return float((predicted == test_set.labels.cpu()).float().mean())


def _together(
    train_set: Occluded, test_set: Occluded, plans: Sequence[Plan], dtype: torch.dtype
) -> list[float]:
    from rectgrad.many.networks import Networks  # needs Triton

    modules: list[Any] = [training.fresh(replace(p, device="cpu")).module for p in plans]
    networks = Networks(modules, plans[0].device, dtype)
    batch = plans[0].batch
    for _ in range(plans[0].epochs):
        for first in range(0, len(train_set), batch):
            networks.learn(train_set, first, min(batch, len(train_set) - first), plans[0].rate)
    correct = torch.zeros(len(plans), device=plans[0].device)
    for first in range(0, len(test_set), batch):
        count = min(batch, len(test_set) - first)
        predicted = networks.logits(test_set, first, count).argmax(2)
        correct += (predicted == test_set.labels[first : first + count]).sum(1)
    return (correct / len(test_set)).tolist()
