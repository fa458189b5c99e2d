"""Several copies of the samples in one pass: an average's noisy inputs, or inputs that are partly hidden.

What is meant is one copy at a time. A pass of several gives the same for nearly every network in evaluation
mode, but not where samples see each other (statistics of the batch, random numbers), and a program exported
for one batch size takes no other. So the first copy runs alone, and again at the end of the first pass of
several: outputs and maps must agree, or every copy runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from rectgrad.engine.backward import Maps, Pass
from rectgrad.engine.diagnose import check_inputs
from rectgrad.engine.op import wide
from rectgrad.engine.request import Request
from rectgrad.engine.target import Picked, contrast
from rectgrad.kernels.device import limits, out_of_memory, rounding

Ask = Callable[[Any, Request], Maps]

FEWEST = 4  # copies that are worth it, since the first one runs twice


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = wide(a), wide(b)
    scale = a.abs().max()
    if not bool(scale > 0):
        return bool((b == a).all())
    a, b = a / scale, b / scale  # squares of very small or large numbers are none
    return bool((a - b).norm() <= tolerance * a.norm())


def agree(alone: Maps, together: Maps) -> bool:
    """Whether the outputs and the maps of one copy agree. Outputs are continuous: to rounding. Maps are not,
    where rounding moves a unit across a threshold: in the mean. Neither alone would do: saturated outputs
    hardly change."""
    eps = max(map(rounding, alone))
    (outputs, other), *maps = zip(alone, together, strict=True)
    return _near(outputs, other, eps**0.5) and all(_near(a, b, eps**0.25) for a, b in maps)


class Points:
    """Asks a method about a request at many points."""

    def __init__(self, ask: Ask, method: Any, request: Request) -> None:
        self.ask, self.method, self.request = ask, method, request
        self.size = 1  # copies in one pass
        self.first: Maps = ()  # copy, which runs alone
        self.witness: Maps = ()  # its outputs and maps, which a pass of several must give too
        self.confirmed = False

    def each(self, points: Iterator[Maps], count: int) -> Iterator[Maps]:
        """`ask(method, request.at(point))` for each of `count` points, in their order."""
        check_inputs(self.request.inputs)
        if count >= FEWEST and separable(self.method, self.request):
            yield self._first(next(points))
        yield from self._grouped(points)

    def _first(self, point: Maps) -> Maps:
        """One copy alone; what it takes says how many of them fit into a pass."""
        alone = self.request.at(point)
        maps = self.ask(self.method, alone)
        # Another average gives neither. A rule that looks at a whole sample must find it in one row.
        if alone.last and alone.answer is not None and not (self.method.per_sample and alone.last.folds):
            self.first, self.witness = point, (alone.answer, *maps)
            self.size = fitting(alone.last, alone.inputs, alone.answer.device)
        return maps

    def _grouped(self, points: Iterator[Maps]) -> Iterator[Maps]:
        """As many in one pass as fit, with the witness until it has confirmed one."""
        while group := list(islice(points, max(1, self.size - (not self.confirmed)))):
            yield from self._group(group)

    def _group(self, group: list[Maps]) -> Iterable[Maps]:
        """In one pass; where that fails, in smaller ones; at last one by one."""
        if self.size == 1:
            return [self.ask(self.method, self.request.at(point)) for point in group]
        try:
            return self._together(group)
        except Exception as error:  # where it was not for the batch, a copy alone meets it again
            self.size = self.size // 2 if out_of_memory(error) else 1
        if self.request.region is not None:
            self.request.region.restore()
        return self._grouped(iter(group))

    def _together(self, group: list[Maps]) -> list[Maps]:
        points = group if self.confirmed else [*group, self.first]
        joined, k = self.request.at_once(points), len(points)
        maps = self.ask(self.method.repeated(k, self.request.inputs), joined)
        found = () if joined.answer is None else (joined.answer, *maps)
        parts = list(zip(*(x.chunk(k) for x in found), strict=True))
        apart = [part[0].shape for part in parts] == [self.witness[0].shape] * k
        if not apart or not (self.confirmed or agree(self.witness, parts[-1])):
            raise ValueError("a pass of several copies is not what they are alone")
        self.confirmed = True
        return [part[1:] for part in parts[: len(group)]]


def separable(method: Any, request: Request) -> bool:
    """Whether copies may be told apart again: not in training mode, nor by a target that takes the whole
    output, nor by a method that may have values for each sample in a way unknown here."""
    trains = request.region is not None and request.region.trains
    whole = callable(request.target) and type(request.target) not in (contrast, Picked)
    if request.n == 0 or request.replay is not None or trains or whole:  # a graph is of one batch size
        return False
    return method.repeated(1, request.inputs) is not None


def fitting(passed: Pass, inputs: Maps, device: torch.device) -> int:
    """How many copies make a pass within the limits."""
    shapes = [row.shape for row in passed.trace.rows] + [x.shape for x in inputs]
    numbers = (sum if passed.differentiable else max)(map(prod, shapes))
    most, rows = limits(device, kept=passed.differentiable)
    return max(1, min(most // max(1, numbers * inputs[0].element_size()), rows // len(inputs[0])))
