"""Specificity: how much a map differs from that of the least likely class."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from rectgrad.metrics import overlap

LOW = 0.3  # below this, pictures include a caution

_RECOMMENDED = {"where": "rectgrad", "why this class": "rectgrad_gated"}


def recommended(question: str) -> str:
    """The name of the method to use for a question: "where" or "why this class".

    Everything that suggests a method uses this function.
    """
    if question not in _RECOMMENDED:
        raise ValueError(f"unknown question {question!r}; questions are {', '.join(map(repr, _RECOMMENDED))}")
    return _RECOMMENDED[question]


class Specificity(NamedTuple):
    """A share from 0 to 1, or None; and a note for the reader (may be empty)."""

    value: float | None
    note: str


def specificity(map: Tensor, other: Tensor) -> Specificity:
    """1 - |top_k(map) and top_k(other)| / k, for one sample's map (C, ...) and that of another class.

    `other` is the map for the class with the smallest output; see `rectgrad.metrics.specificity`.
    """
    m, n = _positions(map), _positions(other)
    value = float(overlap.specificity(m, n))
    if math.isnan(value):
        return Specificity(None, "the map is zero")
    if not bool(n.any()):
        return Specificity(value, "the map of the least likely class is zero: no evidence for that class")
    return Specificity(value, "")


def caution(value: float, method: str) -> str:
    """A caution for readers of a map with a low specificity; empty if it is high enough."""
    if value >= LOW:
        return ""
    better = recommended("why this class")
    advice = f"; for that, use {better}" if better != method else ""
    return (
        "this map looks nearly the same for any class. It shows where the network looked, not why it chose "
        f"this class{advice}"
    )


def _positions(map: Tensor) -> Tensor:
    """The sum over channels as (1, 1, positions), in float64 on the CPU so that the share is exact."""
    wide = map.float() if map.element_size() < 4 else map
    return (wide.sum(0) if wide.dim() > 1 else wide).reshape(1, 1, -1).cpu().double()
