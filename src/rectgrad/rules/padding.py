"""The padding trick: a convolution passes no gradient at outputs whose window reaches into zero padding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rectgrad.engine.op import Op, Rule
from rectgrad.kernels.linear_ops import Conv
from rectgrad.ops.arguments import Slot
from rectgrad.ops.windows import Region, clear_of_padding, per_dim


def masked_padding() -> Rule:
    """R zeroed where the window reaches into the zero padding, then the ordinary gradient.

    The padding is that of the convolution plus that of a zero `F.pad` just before it. If the mask would zero
    a whole map, it is not applied.
    """
    apply = lambda op, R: op.vjp(R, within=passing_region(op))  # noqa: E731
    return Rule(apply, "masked_padding", reads="shapes", concerns=padded, takes_sparse=True, checks=True)


def padded(op: Op) -> bool:
    """Whether a convolution may have zero padding."""
    padding = op.linear.geometry.padding if isinstance(op.linear, Conv) else op.argument("padding", 0)
    own = any(padding) if isinstance(padding, (tuple, list)) else padding not in (0, "valid")
    return own or _source(op).family == "pad"


def passing_region(op: Op) -> Region | None:
    """The output positions that keep their gradient; None if all do."""
    geometry = _geometry(op)
    dims = len(geometry[0])
    size = (op.linear if isinstance(op.linear, Conv) else op.argument("input")).shape[-dims:]
    return _region(size, op.shape[-dims:], geometry, _pad_before(op, dims))


@lru_cache(maxsize=4096)
def _region(sizes: Any, outputs: Any, geometry: tuple[tuple[int, ...], ...], pads: Region) -> Region | None:
    dims = zip(sizes, outputs, *geometry, pads, strict=True)
    region = tuple(
        clear_of_padding(size - before - after, n, kernel, stride, dilation, own + before)
        for size, n, kernel, stride, dilation, own, (before, after) in dims
    )
    nothing_left = any(first >= last for first, last in region)
    everything = all(ends == (0, n) for ends, n in zip(region, outputs, strict=True))
    return None if nothing_left or everything else region


def _geometry(op: Op) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, dilation, and the convolution's padding before the first element."""
    if isinstance(op.linear, Conv):
        windows = op.linear.geometry
        return windows.kernel, windows.stride, windows.dilation, windows.padding
    kernel = tuple(op.argument("weight").shape[2:])
    stride, dilation = (per_dim(op.argument(name, 1), len(kernel)) for name in ("stride", "dilation"))
    padding = op.argument("padding", 0)
    if padding == "same":  # torch pads less on this side
        own = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    else:
        own = per_dim(0 if padding == "valid" else padding, len(kernel))
    return kernel, stride, dilation, own


def _source(op: Op) -> Op:
    """The op that made the convolution's input; itself if none did, or unknown."""
    at = op.spec.argument("input", op.args, op.kwargs)
    return op.sources[at] if op.sources and type(at) is Slot else op


def _pad_before(op: Op, dims: int) -> Region:
    """Zero padding that an op just before added to the convolved dimensions, without cropping."""
    named = (source := _source(op)).argument
    if source.family != "pad" or (named("mode", "constant"), named("value", 0)) != ("constant", 0):
        return ((0, 0),) * dims
    pads = [*named("pad"), *[0] * (2 * dims)]
    return tuple((max(pads[2 * d], 0), max(pads[2 * d + 1], 0)) for d in reversed(range(dims)))
