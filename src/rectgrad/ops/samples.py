"""Which calls may move the samples out of the first dimension, by their names and shapes.

source: shape of the first tensor that the call reads. shape: that of its result. n: number of samples.
"""

from __future__ import annotations

from rectgrad.ops.table import RECTIFIERS

Shape = tuple[int, ...]

_PICKING = frozenset("__getitem__ index_select masked_select take_along_dim gather".split())
TURNING = frozenset("transpose permute movedim moveaxis swapaxes swapdims t".split())
# Families that keep the samples in place if the number of dimensions stays the same.
_KEEPING = RECTIFIERS.union("conv conv_transpose batch_norm norm max_pool avg_pool add mul div".split())


def by_chance(name: str, source: Shape, shape: Shape, n: int) -> bool:
    """Whether a call picks n rows of a tensor whose rows are not the samples."""
    return name in _PICKING and len(source) == len(shape) and source[0] != n and shape[0] == n


def may_move_samples(family: str | None, source: Shape, shape: Shape, n: int) -> bool:
    """Whether, judging by the sizes, the first dimension may no longer be the samples alone."""
    keeps = family in _KEEPING and len(source) == len(shape)
    return not keeps and (shape[0] != n or source[:1] != (n,) or n in (*source[1:], *shape[1:]))
