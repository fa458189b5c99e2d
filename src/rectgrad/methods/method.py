"""The base class of methods: a frozen dataclass whose fields are its options.

A method names the rules of its backward pass and what happens to the gradient that arrives at the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rectgrad.engine.backward import Plan
from rectgrad.engine.points import Ask, Points, PointsBetween
from rectgrad.engine.request import Request
from rectgrad.methods.options import check

Maps = tuple[Tensor, ...]

# A callback with the progress of a method with many passes: inputs done, and their number.
progress: ContextVar[Callable[[int, int], None]] = ContextVar("progress", default=lambda done, count: None)


@dataclass(frozen=True)
class Method(Plan):
    """The plain gradient, unless a subclass says otherwise."""

    one_backward: ClassVar[bool] = True  # a single backward pass makes the map
    runs_model: ClassVar[bool] = True
    ready: ClassVar[bool] = True  # it needs no further option
    title: ClassVar[str] = ""  # what figures and tables call the method; the class name if it is empty

    def __post_init__(self) -> None:
        check(self)

    def raw(self, request: Request) -> Maps:
        """The gradient that arrives at the input."""
        return request.backward(self)

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        """The map, from the gradient that arrived."""
        return raw

    def maps(self, request: Request) -> Maps:
        return self.finish(self.raw(request), request.inputs)

    @property
    def uses_rules(self) -> bool:
        return bool(self.rules())

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        """The method for some of the samples, if a field has one value for each."""
        return self

    def repeated(self, k: int, inputs: Maps) -> Method | None:
        """The method for k copies of the samples, one after the other; None if it cannot tell them apart."""
        return self if type(self).rows is Method.rows else None

    def at_points(self, ask: Ask, request: Request, points: PointsBetween, count: int) -> Iterator[Maps]:
        """`ask(self, ...)` about a request at each of `count` points."""
        tell = progress.get()
        for done, maps in enumerate(Points(ask, self, request, points).each(count), 1):
            tell(done, count)
            yield maps


def times(raw: Maps, inputs: Maps) -> Maps:
    return tuple(r * x.detach() for r, x in zip(raw, inputs, strict=True))
