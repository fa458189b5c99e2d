"""Training of many networks: from first weights to test accuracy."""

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

THREADS = 2  # of a network on a CPU: the same everywhere, for sums round as they are split


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """So many threads as always, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def at_once(device: str) -> int:
    """How many networks are best trained together. On a GPU, enough that launches cost nothing."""
    return 45 if _by_kernels(device) else 1


def _by_kernels(device: str) -> bool:
    """Whether our kernels can train there: a GPU, and Triton."""
    return torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None


def train(
    seen: Occluded,
    asked: Occluded,
    seeds: Sequence[int],
    plan: Plan,
    dtype: torch.dtype = torch.bfloat16,
) -> list[float]:
    """Test accuracy of a network for each seed: trained on its pictures of `seen`, asked those of `asked`.
    dtype: what our kernels multiply in, on a GPU."""
    plans = [replace(plan, seed=seed) for seed in seeds]
    if _by_kernels(plan.device):
        with torch.cuda.device(plan.device):
            return _together(seen, asked, plans, dtype)
    with steady():
        return [_alone(seen, asked, i, each) for i, each in enumerate(plans)]


def _alone(seen: Occluded, asked: Occluded, network: int, plan: Plan) -> float:
    run = training.fresh(plan)
    x = seen.inputs(network, 0, len(seen)).contiguous()
    for _ in range(plan.epochs):
        run.losses.append(training.one_epoch(run, x, seen.labels, plan))
    run.module.eval()
    answers = training.logits(run.module, asked.inputs(network, 0, len(asked)).contiguous()).argmax(1)
    return float((answers == asked.labels.cpu()).float().mean())


def _together(seen: Occluded, asked: Occluded, plans: Sequence[Plan], dtype: torch.dtype) -> list[float]:
    from rectgrad.many.networks import Networks  # needs Triton

    modules: list[Any] = [training.fresh(replace(p, device="cpu")).module for p in plans]
    networks = Networks(modules, plans[0].device, dtype)
    batch = plans[0].batch
    for _ in range(plans[0].epochs):
        for first in range(0, len(seen), batch):
            networks.learn(seen, first, min(batch, len(seen) - first), plans[0].rate)
    right = torch.zeros(len(plans), device=plans[0].device)
    for first in range(0, len(asked), batch):
        count = min(batch, len(asked) - first)
        answers = networks.logits(asked, first, count).argmax(2)
        right += (answers == asked.labels[first : first + count]).sum(1)
    return (right / len(asked)).tolist()
