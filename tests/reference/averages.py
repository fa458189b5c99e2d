"""Integrated and Expected Gradients: means over inputs between a baseline and the sample."""

import math
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


def expected(
    graph: fx.GraphModule,
    sample: tuple[Tensor, ...],
    start: Tensor,
    draws: list[tuple[tuple[Tensor, ...], float]],
) -> tuple[Tensor, ...]:
    """The mean of (x - b) * gradient at b + t * (x - b) over draws of a baseline b and a number t."""
    total = [torch.zeros_like(x) for x in sample]
    for baseline, t in draws:
        point = tuple(b + t * (x - b) for x, b in zip(sample, baseline, strict=True))
        found = backward(run(graph, point), start, RAW["saliency"]())
        for sum_, x, b, m in zip(total, sample, baseline, found, strict=True):
            sum_ += (x - b) * m / len(draws)
    return tuple(total)


def blurred(x: Tensor, share: float) -> Tensor:
    """One sample, (1, C, d1, ..., dk), blurred along each side. Beyond an edge its value is repeated."""
    sides = x.shape[2:] if x.dim() > 2 else x.shape[1:]
    sigma = share * min(sides)
    radius = max(round(3 * sigma), 1)
    for dim in range(x.dim() - len(sides), x.dim()):
        total, weights = torch.zeros_like(x), 0.0
        for offset in range(-radius, radius + 1):
            weight = math.exp(-0.5 * (offset / sigma) ** 2)
            near = [min(max(i + offset, 0), x.shape[dim] - 1) for i in range(x.shape[dim])]
            total += weight * x.index_select(dim, torch.tensor(near))
            weights += weight
        x = total / weights
    return x


def quadrature_points(steps: int, quadrature: str) -> list[tuple[float, float]]:
    """(alpha, weight): right is k / n for k = 1..n; trapezoid has both ends, at half the weight."""
    if quadrature == "right":
        return [(k / steps, 1 / steps) for k in range(1, steps + 1)]
    ends = (0, steps - 1)
    return [(k / (steps - 1), (0.5 if k in ends else 1.0) / (steps - 1)) for k in range(steps)]
