"""The padding trick: a zero-padded convolution does not pass gradient at outputs that saw its padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rectgrad.op import Op, Rule
from rectgrad.steps import Region
from rectgrad.windows import clear_of_padding, per_dim


def masked_padding() -> Rule:
    """R zeroed where the window reaches into the zero padding, then the plain gradient.

    Padding is the convolution's own and that of a zero `F.pad` just before it, together. Where the mask
    would leave nothing of a map, it is not applied.
    """

    def masked_padding(op: Op, R: Tensor) -> Any:
        if "region" not in op.facts:
            op.facts["region"] = passing_region(op)
        return op.vjp(R, within=op.facts["region"])

    masked_padding.shapes_only = True  # type: ignore[attr-defined]
    return masked_padding


def passing_region(op: Op) -> Region | None:
    """The output positions that keep their gradient; None where all do."""
    weight = op.argument("weight")
    dims = weight.dim() - 2
    size, outputs = op.input_shapes[0][-dims:], op.shape[-dims:]
    kernel = tuple(weight.shape[-dims:])
    stride, dilation = (per_dim(op.argument(name, 1), dims) for name in ("stride", "dilation"))
    own = _own_padding(op, kernel, dilation)
    before, after = _pad_before(op, dims)
    region = tuple(
        clear_of_padding(
            size[d] - before[d] - after[d], outputs[d], kernel[d], stride[d], dilation[d], own[d] + before[d]
        )
        for d in range(dims)
    )
    nothing_left = any(first >= last for first, last in region)
    everything = all(ends == (0, n) for ends, n in zip(region, outputs, strict=True))
    return None if nothing_left or everything else region


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
