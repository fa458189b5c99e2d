"""How specific a map is to its class: does the map of a class that the network rules out look the same?"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LOW = 0.3  # below this, pictures include a caution
SHARE = 0.05  # of the positions

_RECOMMENDED = {"where": "rectgrad", "why this class": "integrated_gradients"}


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

    Positions are ranked by m = |sum over channels|, ties by position. k is 5 % of the positions, or the
    number of non-zero ones in either map if that is smaller. `other` is the map for the class with the
    smallest output: where both mark the same positions, the map does not depend on the class.
    """
    m, n = _positions(map), _positions(other)
    if not bool(m.any()):
        return Specificity(None, "the map is zero")
    if not bool(n.any()):
        return Specificity(1.0, "the map of the least likely class is zero: no evidence for that class")
    k = min(max(round(SHARE * m.numel()), 1), int(m.count_nonzero()), int(n.count_nonzero()))
    shared = int((_top(m, k) & _top(n, k)).sum())
    return Specificity(1 - shared / k, "")


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
    """|sum over channels|, flattened."""
    wide = map.float() if map.element_size() < 4 else map
    return (wide.sum(0) if wide.dim() > 1 else wide).abs().flatten()


def _top(m: Tensor, k: int) -> Tensor:
    """A mask of the k largest positions; ties are broken by position."""
    least = m.topk(k).values[-1]
    above, equal = m > least, m == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))
