"""Trains many networks at once, where our kernels can be used, or one by one."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectgrad import training
from rectgrad.data import Images
from rectgrad.many.occlusion import Occluded, unmodified
from rectgrad.training import Plan, Run

if TYPE_CHECKING:
    from rectgrad.many.networks import Networks

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
            return _accuracies(_together(train_set, plans, dtype)[0], test_set, plan.batch)
    with fixed_threads():
        return [_alone(train_set, test_set, i, each) for i, each in enumerate(plans)]


def train_runs(
    images: Images, seeds: Sequence[int], plan: Plan, dtype: torch.dtype = torch.bfloat16
) -> list[Run]:
    """Trains one network per seed on the same images, all at once with our kernels: see `at_once`."""
    plans = [replace(plan, seed=seed) for seed in seeds]
    on_cuda = torch.device(plan.device).type == "cuda"
    with torch.cuda.device(plan.device) if on_cuda else contextlib.nullcontext():
        networks, losses = _together(unmodified(images, len(seeds), plan.device), plans, dtype)
    return [
        _run(each, state, networks.steps, found)
        for each, state, found in zip(plans, networks.states(), losses, strict=True)
    ]


def _run(plan: Plan, state: tuple[dict[str, Tensor], ...], steps: int, losses: list[float]) -> Run:
    """What the training loop would have at this point."""
    run = training.fresh(replace(plan, device="cpu"))
    run.losses, (weights, first, second) = losses, state
    run.module.load_state_dict(weights)
    for name, value in run.module.named_parameters():
        moments = {"exp_avg": first[name].to(value), "exp_avg_sq": second[name].to(value)}
        run.optimiser.state[value] = {"step": torch.tensor(float(steps)), **moments}
    return run


def _alone(train_set: Occluded, test_set: Occluded, network: int, plan: Plan) -> float:
    run = training.fresh(plan)
    x = train_set.inputs(network, 0, len(train_set)).contiguous()
    for _ in range(plan.epochs):
        run.losses.append(training.one_epoch(run, x, train_set.labels, plan))
    run.module.eval()
    predicted = training.logits(run.module, test_set.inputs(network, 0, len(test_set)).contiguous()).argmax(1)
    return float((predicted == test_set.labels.cpu()).float().mean())


def _together(
    train_set: Occluded, plans: Sequence[Plan], dtype: torch.dtype
) -> tuple[Networks, list[list[float]]]:
    """The trained networks, and the mean loss of each of their epochs."""
    from rectgrad.many.networks import Networks  # needs Triton

    modules: list[Any] = [training.fresh(replace(p, device="cpu")).module for p in plans]
    networks, (plan, *_) = Networks(modules, plans[0].device, dtype), plans
    epochs = []
    for _ in range(plan.epochs):
        total = torch.zeros(len(plans), device=plan.device)
        for first in range(0, len(train_set), plan.batch):
            count = min(plan.batch, len(train_set) - first)
            total += count * networks.learn(train_set, first, count, plan.rate)
        epochs.append((total / len(train_set)).tolist())
    return networks, [list(each) for each in zip(*epochs, strict=True)]


def _accuracies(networks: Networks, test_set: Occluded, batch: int) -> list[float]:
    correct = torch.zeros(networks.n, device=test_set.device)
    for first in range(0, len(test_set), batch):
        count = min(batch, len(test_set) - first)
        predicted = networks.logits(test_set, first, count).argmax(2)
        correct += (predicted == test_set.labels[first : first + count]).sum(1)
    return (correct / len(test_set)).tolist()
