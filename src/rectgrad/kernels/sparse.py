"""The one sparse type: the units of a gradient that passed a rectified activation.

In the backward pass it replaces a gradient tensor. Linear ops with a kernel for it read the lists. All other
ops use the `dense` tensor, which is computed once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sparse:
    """A gradient of this shape that is zero except for the units in `lists` (positions and values, one list
    for each sample). `scale` is a factor for each channel, applied when the values are used."""

    __slots__ = ("_dense", "lists", "scale", "shape")

    def __init__(self, lists: Any, shape: torch.Size, scale: Tensor | None = None) -> None:
        self.lists, self.shape, self.scale = lists, shape, scale
        self._dense: Tensor | None = None

    def scaled(self, scale: Tensor) -> Sparse:
        return Sparse(self.lists, self.shape, scale if self.scale is None else self.scale * scale)

    def dense(self) -> Tensor:
        if self._dense is None:
            whole: Tensor = self.lists.dense(self.shape)
            self._dense = whole if self.scale is None else whole * channelwise(self.scale, whole)
        return self._dense


def dense(R: Tensor | Sparse) -> Tensor:
    """The gradient as a tensor."""
    return R.dense() if type(R) is Sparse else R  # type: ignore[return-value]


def channelwise(scale: Tensor, like: Tensor) -> Tensor:
    return scale.reshape(1, -1, *(1,) * (like.dim() - 2))
