"""Times the selection of tau on its own, by our kernel and by torch: 8 samples with 802,816 units each, half
of them zero."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rectgrad.bench import measure
from rectgrad.bench.naive import TAUS, Q
from rectgrad.bench.plan import Plan
from rectgrad.kernels.reference import percentile

SHAPE = (8, 802_816)
OURS = "threshold.percentile"


def scores(shape: tuple[int, int], device: str) -> Tensor:
    """Random scores a * R of a layer with half of its units inactive."""
    generator = torch.Generator().manual_seed(0)
    a, R = (torch.randn(shape, generator=generator) for _ in range(2))
    return (a.relu_() * R).to(device)


def selection(
    plan: Plan, progress: measure.Progress = measure.no_progress, shape: tuple[int, int] = SHAPE
) -> dict[str, Any]:
    """Returns times, and ratios to our kernel."""
    s = scores(shape, plan.device)
    runs: dict[str, measure.Run] = {OURS: partial(percentile, s, Q)}
    runs |= {f"torch.{name}": partial(tau, s) for name, tau in TAUS.items()}
    with progress(measure.steps(len(runs), plan.rounds), "selection") as advance:
        times = measure.race(runs, plan.rounds, plan.device, advance)
    return {"shape": list(shape), "q": Q, "rows": measure.rows(times), "failed": measure.failures(times)}
