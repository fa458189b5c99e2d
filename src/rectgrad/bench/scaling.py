"""Cost against the size of the problem: pictures in the batch, and pixels in the picture."""

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

Sizes = list[tuple[int, int]]  # (pictures, pixels of a side)


def slope(sizes: Sequence[float], times: Sequence[float]) -> float | None:
    """p of the fit time ~ size**p, by least squares of the logarithms: 1 is linear cost."""
    if len(sizes) < 2:
        return None
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, times)]).slope


def scaling(
    plan: Plan,
    model: str,
    watch: measure.Watch = measure.unwatched,
    batches: Sequence[int] = BATCHES,
    sides: Sequence[int] = SIDES,
) -> dict[str, Any]:
    """Times of the plain gradient and of the methods asked for, RectGrad if none is."""
    plan = replace(plan, methods=plan.methods or ("rectgrad",), captum=False, naive=False)
    own = side(plan, model)
    steps = measure.steps(1 + len(plan.methods), plan.rounds) * (len(batches) + len(sides))
    with watch(steps, f"{model}, scaling") as advance:
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
    """A contender's slope over the sizes at which it ran."""
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
