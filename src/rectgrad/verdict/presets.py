"""The presets of `judge`: how many photos, steps, draws and stages.

An expensive measure runs on the first few photos only, so that `quick` takes minutes on two cores. Its table
prints the number of photos in every cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from rectgrad.methods import RISE, Method
from rectgrad.methods.averages import Average

ALPHA = 0.05  # level of significance


@dataclass(frozen=True)
class Preset:
    """Counts of photos come first."""

    name: str
    photos: int  # maps, sparsity, location and specificity
    evaluated: int  # of them, those that are shown to the network with pixels changed
    repeated: int  # of them, those whose maps are computed again: stability and randomisation
    costly: int  # photos for methods that need many passes
    costly_repeated: int  # of them, those whose maps are computed again, also for specificity
    matched: int  # photos for matched comparisons
    leaders: int | None  # methods in matched comparisons; None: all
    composites: int  # grids of photos
    full_size: bool  # grids of photos at their full size, where the network takes larger inputs
    chunk: int  # photos that are computed together
    steps: int  # of insertion and deletion curves
    draws: int  # of max-sensitivity
    stages: int  # groups of layers that are randomised
    alone: bool  # also randomise each group of layers alone
    samples: int | None  # evaluations of the averages; None: as listed
    fractions: tuple[float, ...]  # of the pixels, for sensitivity-n
    subsets: int  # for each fraction
    squares: int  # of infidelity

    def configured(self, method: Method) -> Method:
        """The method with the number of evaluations of the preset."""
        if isinstance(method, RISE):
            return replace(method, masks=min(method.masks, 1000))
        names = [each.name for each in fields(method)] if is_dataclass(method) else []
        counts = [name for name in ("samples", "steps") if name in names and isinstance(method, Average)]
        changed: dict[str, Any] = {} if self.samples is None else dict.fromkeys(counts, self.samples)
        return replace(method, **changed)

    def enough(self, rows: int, measures: int) -> Preset:
        """The preset with enough evaluated photos and composites for this many rows and measures."""
        least = least_photos(measures * rows * (rows - 1) // 2, ALPHA - 0.015)  # some maps may be zero
        names = ("evaluated", "costly", "composites")
        return replace(self, **{name: max(getattr(self, name), least) for name in names})

    def of_photos(self, count: int) -> Preset:
        """The preset with this many photos in every measure. Methods that need many passes, grids and matched
        comparisons keep their numbers."""
        if count < 2:
            raise ValueError(f"a verdict needs 2 photos or more, not {count}")
        return replace(self, photos=count, evaluated=count, repeated=count)

    def photos_for(self, method: Method, repeated: bool = False) -> int:
        """How many photos a method is judged on."""
        if repeated:
            return self.repeated if is_cheap(method) else self.costly_repeated
        return self.photos if is_cheap(method) else self.costly


def least_photos(tests: int, alpha: float = ALPHA) -> int:
    """The smallest number of photos with which one of this many tests can be significant.

    If all of n photos agree, the sign-flip test has p = 2^(1 - n). Holm's correction multiplies it by the
    number of tests.
    """
    return math.ceil(1 + math.log2(max(tests, 1) / alpha))


def is_cheap(method: Method) -> bool:
    """Whether a map needs at most one pass."""
    return method.one_backward or not method.runs_model


PRESETS = {
    each.name: each
    for each in (
        Preset(
            "quick",
            photos=50,
            evaluated=12,
            repeated=6,
            costly=12,
            costly_repeated=3,
            matched=8,
            leaders=3,
            composites=40,
            full_size=False,
            chunk=10,
            steps=10,
            draws=4,
            stages=5,
            alone=False,
            samples=10,
            fractions=(0.05, 0.2, 0.5),
            subsets=15,
            squares=20,
        ),
        Preset(
            "full",
            photos=500,
            evaluated=500,
            repeated=500,
            costly=100,
            costly_repeated=50,
            matched=100,
            leaders=None,
            composites=200,
            full_size=True,
            chunk=50,
            steps=20,
            draws=10,
            stages=10,
            alone=True,
            samples=None,
            fractions=(0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8),
            subsets=50,
            squares=50,
        ),
    )
}


def preset_of(given: str | Preset) -> Preset:
    if isinstance(given, Preset):
        return given
    if given not in PRESETS:
        raise ValueError(f"unknown preset {given!r}; presets are {', '.join(PRESETS)}")
    return PRESETS[given]
