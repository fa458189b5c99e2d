"""Integrated Gradients: a mean over inputs between the baseline and the sample."""

from typing import Any

import torch
from torch import Tensor, fx

from reference.gradients import PRESETS, RAW, baseline_of
from reference.graph import backward, run


def integrated(
    graph: fx.GraphModule,
    sample: tuple[Tensor, ...],
    start: Tensor,
    over: str = "saliency",
    steps: int = 50,
    baseline: Any = 0.0,
    quadrature: str = "trapezoid",
    inner: dict | None = None,
) -> tuple[Tensor, ...]:
    """(x - x0) * sum of weight * raw backward result at x0 + alpha * (x - x0)."""
    zero, total = baseline_of(sample, baseline), [torch.zeros_like(x) for x in sample]
    method, preset = PRESETS.get(over, (over, {}))
    rule = RAW[method](**{**preset, **(inner or {})})
    for alpha, weight in quadrature_points(steps, quadrature):
        point = tuple(x0 + alpha * (x - x0) for x, x0 in zip(sample, zero, strict=True))
        for sum_, m in zip(total, backward(run(graph, point), start, rule), strict=True):
            sum_ += weight * m
    return tuple(m * (x - x0) for m, x, x0 in zip(total, sample, zero, strict=True))


def quadrature_points(steps: int, quadrature: str) -> list[tuple[float, float]]:
    """(alpha, weight): right is k / n for k = 1..n; trapezoid has both ends, at half the weight."""
    if quadrature == "right":
        return [(k / steps, 1 / steps) for k in range(1, steps + 1)]
    ends = (0, steps - 1)
    return [(k / (steps - 1), (0.5 if k in ends else 1.0) / (steps - 1)) for k in range(steps)]
