"""What passed a rectified activation, as lists: how it travels to the step that takes it.

The lists are an attribute of the gradient tensor that is handed on. That tensor is either the whole
gradient, mostly zeros, or, where the only step to come takes the lists, a mere carrier: one NaN, expanded. So
nothing is ever computed from a carrier by mistake without being noticed. A linked pass, which autograd has no
part in, hands the lists on as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Survivors:
    """The units of one layer that passed. `scale`: a factor for each channel, put off until it is used."""

    def __init__(self, lists: Any, shape: torch.Size, scale: Tensor | None = None) -> None:
        self.lists, self.shape, self.scale = lists, shape, scale

    def scaled(self, scale: Tensor) -> Survivors:
        return Survivors(self.lists, self.shape, scale if self.scale is None else self.scale * scale)

    def dense(self) -> Tensor:
        """The whole gradient; only where every sample has a list."""
        whole: Tensor = self.lists.dense(self.shape)
        return whole if self.scale is None else whole * channelwise(self.scale, whole)


Carry = Callable[[Survivors], Any]  # how lists travel alone


def channelwise(scale: Tensor, like: Tensor) -> Tensor:
    return scale.reshape(1, -1, *(1,) * (like.dim() - 2))


def with_survivors(R: Tensor, passed: Survivors, alone: bool = False) -> Tensor:
    """R, whose non-zero units these are; alone: R is a mere carrier of them."""
    R._survivors = passed, R._version, alone  # type: ignore[attr-defined]
    return R


def carrier(passed: Survivors) -> Tensor:
    return with_survivors(_NAN.expand(passed.shape), passed, alone=True)


def as_they_are(passed: Survivors) -> Any:
    return passed


_NAN = torch.full((), torch.nan, dtype=torch.float32, device="cpu")


def carried(R: Tensor) -> bool:
    """Whether R is a mere carrier."""
    return bool(getattr(R, "_survivors", _NONE)[2])


def survivors_of(R: Tensor | Survivors) -> Survivors | None:
    """The lists that came with R, unless it was written in the meantime."""
    if isinstance(R, Survivors):
        return R
    passed, version, _ = getattr(R, "_survivors", _NONE)
    return passed if passed is not None and version == R._version else None


_NONE: tuple[Survivors | None, int, bool] = (None, 0, False)


def dense(R: Tensor | Survivors) -> Tensor:
    """R itself, or what it stands for."""
    if isinstance(R, Survivors):
        return R.dense()
    if carried(R):
        passed = survivors_of(R)
        assert passed is not None
        return passed.dense()
    return R
