"""Which calls may take the samples out of the first dimension, by their name and the shapes they change.

source: shape of the first tensor that the call reads. shape: that of its result. n: number of samples.
"""

from __future__ import annotations

Shape = tuple[int, ...]

_PICKING = frozenset("__getitem__ index_select masked_select take_along_dim gather".split())
TURNING = frozenset("transpose permute movedim moveaxis swapaxes swapdims t".split())
_MOVING = TURNING | {"einsum", "stack"}


def by_chance(name: str, source: Shape, shape: Shape, n: int) -> bool:
    """Some of the rows of a tensor that has other rows than samples, as many as there are samples."""
    return name in _PICKING and len(source) == len(shape) and source[0] != n and shape[0] == n


def may_move_samples(name: str, source: Shape, shape: Shape, n: int) -> bool:
    """The samples may have changed places with a dimension of the same size."""
    if name in _MOVING:
        return n in shape[1:]
    return shape[0] != n or bool(source and source[0] != n)
