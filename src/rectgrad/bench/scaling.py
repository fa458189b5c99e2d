"""Measures how the cost grows with the batch size and the image size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rectgrad.bench import measure
from rectgrad.bench.case import case_of, side
from rectgrad.bench.contenders import contenders
from rectgrad.bench.plan import Plan

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SIDES = (128, 192, 256, 320, 384, 448, 512)

Sizes = list[tuple[int, int]]  # (batch size, height and width)


def slope(sizes: Sequence[float], times: Sequence[float]) -> float | None:
    """p of the least-squares fit time ~ size**p in log-log space; 1 is linear cost."""
    if len(sizes) < 2:
        return None
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, times)]).slope


def scaling(
    plan: Plan,
    model: str,
    progress: measure.Progress = measure.no_progress,
    batches: Sequence[int] = BATCHES,
    sides: Sequence[int] = SIDES,
) -> dict[str, Any]:
    """Times of the plain gradient and of the chosen methods (default: RectGrad)."""
    plan = replace(plan, methods=plan.methods or ("rectgrad",), captum=False, naive=False)
    own = side(plan, model)
    steps = measure.steps(1 + len(plan.methods), plan.rounds) * (len(batches) + len(sides))
    with progress(steps, f"{model}, scaling") as advance:
        return {
            "model": model,
            "batch": curve(plan, model, [(n, own) for n in batches], advance),
            "pixels": curve(plan, model, [(plan.batch, pixels) for pixels in sides], advance),
        }


def curve(plan: Plan, model: str, sizes: Sizes, advance: measure.Advance) -> dict[str, Any]:
    """One row for each size, and the slope of each contender against batch * pixels**2."""
    rows = [_point(plan, model, batch, pixels, advance) for batch, pixels in sizes]
    names = {name: None for row in rows for name in row["ms"]}
    return {"rows": rows, "slopes": {name: power(name, rows) for name in names}}


def power(name: str, rows: list[dict[str, Any]]) -> float | None:
    """The slope of a contender over the sizes that it completed."""
    ran = [row for row in rows if name in row["ms"]]
    return slope([row["batch"] * row["pixels"] ** 2 for row in ran], [row["ms"][name] for row in ran])


def _point(plan: Plan, model: str, batch: int, pixels: int, advance: measure.Advance) -> dict[str, Any]:
    runs = {each.name: each.run for each in contenders(case_of(plan, model, pixels, batch), plan)}
    times = measure.race(runs, plan.rounds, plan.device, advance)
    rows = measure.rows(times)
    return {
        "batch": batch,
        "pixels": pixels,
        "ms": {row["name"]: row["ms"] for row in rows},
        "ratio": {row["name"]: row["ratio"] for row in rows},
        "failed": measure.failures(times),
    }
