"""Several copies of the samples in one pass: an average's noisy inputs, or inputs that are partly hidden.

The result is defined by one copy at a time. A pass of several gives the same for nearly every network in
evaluation mode, but not if samples influence each other (batch statistics, random numbers), and a program
exported for one batch size accepts no other. So the first copy runs alone, and again at the end of the first
pass of several. If outputs or maps differ, every copy runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from rectgrad.engine.backward import Maps, Pass
from rectgrad.engine.diagnose import check_inputs
from rectgrad.engine.request import Request
from rectgrad.engine.target import Picked, contrast
from rectgrad.kernels.device import agree, limits, out_of_memory

Ask = Callable[[Any, Request], Maps]
PointsBetween = Callable[[int, int], Maps]

FEWEST = 4  # copies for which this pays off, since the first one runs twice


class Points:
    """Evaluates a method at many points. points(start, stop): the samples at the points from start to stop,
    concatenated; the first point is always requested alone."""

    def __init__(self, ask: Ask, method: Any, request: Request, points: PointsBetween) -> None:
        self.ask, self.method, self.request, self.points = ask, method, request, points
        self.size = 1  # copies in one pass
        self.first: Maps = ()  # copy, which has run alone
        self.witness: Maps = ()  # its outputs and maps, which a pass of several must reproduce
        self.confirmed = False

    def each(self, count: int) -> Iterator[Maps]:
        """`ask(method, request.at(point))` for each of `count` points, in their order."""
        check_inputs(self.request.inputs)
        start = int(count >= FEWEST and separable(self.method, self.request))
        if start:
            yield self._first(self.points(0, 1))
        while start < count:  # as many as fit, with the witness until a pass has reproduced it
            done = self._group(start, min(start + max(1, self.size - (not self.confirmed)), count))
            yield from done
            start += len(done)

    def _alone(self, point: Maps) -> tuple[Maps, Request]:
        alone = self.request.at(point)
        maps = self.ask(self.method, alone)
        self.request.target = alone.target  # resolved, if the point is the request's own
        return maps, alone

    def _first(self, point: Maps) -> Maps:
        """Run one copy alone. Its memory determines how many fit into a pass."""
        maps, alone = self._alone(point)
        # Another average has neither. A rule that compares the units of a sample needs them in one row.
        if alone.last and alone.answer is not None and not (self.method.per_sample and alone.last.folds):
            self.first, self.witness = point, (alone.answer, *maps)
            self.size = fitting(alone.last, alone.inputs, alone.answer.device)
        return maps

    def _group(self, start: int, stop: int) -> list[Maps]:
        """Run copies in one pass. If that fails, return nothing and try fewer next, in the end one by one."""
        if self.size == 1:
            return [self._alone(self.points(start, stop))[0]]
        try:
            return self._together(self.points(start, stop), stop - start)
        except Exception as error:  # an error that is not due to the batch occurs again for one copy
            self.size = self.size // 2 if out_of_memory(error) else 1
        if self.request.region is not None:
            self.request.region.restore()
        return []

    def _together(self, points: Maps, count: int) -> list[Maps]:
        if not self.confirmed:
            points = tuple(map(torch.cat, zip(points, self.first, strict=True)))
        k = count + (not self.confirmed)
        joined = self.request.at_once(points, k)
        maps = self.ask(self.method.repeated(k, self.request.inputs), joined)
        found = () if joined.answer is None else (joined.answer, *maps)
        parts = list(zip(*(x.chunk(k) for x in found), strict=True))
        apart = [part[0].shape for part in parts] == [self.witness[0].shape] * k
        if not apart or not (self.confirmed or agree(self.witness, parts[-1])):
            raise ValueError("several copies in one pass give other results than one by one")
        self.confirmed = True
        return [part[1:] for part in parts[:count]]


def separable(method: Any, request: Request) -> bool:
    """Whether copies can share a pass: not in training mode, nor with a target that takes the whole output,
    nor with a method that may have values for each sample that cannot be repeated."""
    trains = request.region is not None and request.region.trains
    whole = callable(request.target) and type(request.target) not in (contrast, Picked)
    if request.n == 0 or request.replay is not None or trains or whole:  # a graph has one batch size
        return False
    return method.repeated(1, request.inputs) is not None


def fitting(passed: Pass, inputs: Maps, device: torch.device) -> int:
    """How many copies fit into a pass."""
    shapes = [row.shape for row in passed.trace.rows] + [x.shape for x in inputs]
    numbers = (sum if passed.differentiable else max)(map(prod, shapes))
    most, rows = limits(device, kept=passed.differentiable)
    return max(1, min(most // max(1, numbers * inputs[0].element_size()), rows // len(inputs[0])))
