"""The padding trick: a zero-padded convolution does not pass gradient at outputs that saw its padding."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from rectgrad.op import Op, Rule
from rectgrad.windows import per_dim, reaches_padding


def masked_padding() -> Rule:
    """R zeroed where the window reaches into the zero padding, then the plain gradient.

    Padding is the convolution's own and that of a zero `F.pad` just before it, together. Where the mask
    would leave nothing of a map, it is not applied.
    """

    def masked_padding(op: Op, R: Tensor) -> Any:
        mask = padding_mask(op)
        if mask is not None:
            R = R.masked_fill(mask.to(R.device), 0)
        return op.vjp(R)

    return masked_padding


def padding_mask(op: Op) -> Tensor | None:
    """True at output positions to zero, over the convolved dimensions; None where there are none."""
    weight = op.argument("weight")
    dims = weight.dim() - 2
    size = op.inputs[0].shape[-dims:]
    kernel = tuple(weight.shape[-dims:])
    stride, dilation = (per_dim(op.argument(name, 1), dims) for name in ("stride", "dilation"))
    own = _own_padding(op, kernel, dilation)
    before, after = _pad_before(op, dims)
    mask = torch.zeros(op.output.shape[-dims:], dtype=torch.bool)
    for d in range(dims):
        length = size[d] - before[d] - after[d]
        reaches = reaches_padding(
            length, mask.shape[d], kernel[d], stride[d], dilation[d], own[d] + before[d]
        )
        mask |= reaches.reshape([-1 if i == d else 1 for i in range(dims)])
    count = int(mask.sum())
    return mask if 0 < count < prod(mask.shape) else None


def _own_padding(op: Op, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """The convolution's own padding before the first element. torch pads "same" less on this side."""
    padding = op.argument("padding", 0)
    if padding == "same":
        return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    return per_dim(0 if padding == "valid" else padding, len(kernel))


def _pad_before(op: Op, dims: int) -> tuple[list[int], list[int]]:
    """Zero padding that a pad op just before added to the convolved dimensions; cropping does not count."""
    source = op.sources[0]
    if source is None or source.family != "pad" or not _zero(source):
        return [0] * dims, [0] * dims
    pads = [*source.argument("pad"), *[0] * (2 * dims)]
    pairs = [(max(pads[2 * d], 0), max(pads[2 * d + 1], 0)) for d in reversed(range(dims))]
    return [before for before, _ in pairs], [after for _, after in pairs]


def _zero(pad: Op) -> bool:
    return pad.argument("mode", "constant") == "constant" and pad.argument("value", 0) == 0
