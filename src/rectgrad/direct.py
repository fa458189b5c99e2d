"""Plain gradients of common calls in closed form: what autograd would compute, without its engine, which
takes longer to ask than these take to run.

Each function gives the result of a call and the way back; None where the call is not one of the usual kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.op import Op
from rectgrad.windows import per_dim

Vjp = Callable[[Tensor], tuple[Tensor, ...]]
Direct = Callable[[Op, list[Tensor]], tuple[Tensor, Vjp] | None]
_aten = torch.ops.aten


def reshaped(op: Op, data: list[Tensor]) -> tuple[Tensor, Vjp] | None:
    """The same values in the same order."""
    x, y = data[0], op.call(*data)
    shape = x.shape
    return (y, lambda R: (R.reshape(shape),)) if y.dtype is x.dtype else None


def concatenated(op: Op, data: list[Tensor]) -> tuple[Tensor, Vjp] | None:
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
    alike = len(op.args[0]) == len(data) and all(x.dtype is data[0].dtype and x.dim() > 1 for x in data)
    if not alike or type(dim) is not int or not op.kwargs.keys() <= {"dim"}:
        return None
    sizes = [x.shape[dim] for x in data]
    return op.call(*data), lambda R: R.split(sizes, dim)


def max_pooled(op: Op, data: list[Tensor]) -> tuple[Tensor, Vjp] | None:
    x = data[0]
    if op.argument("return_indices", False) or x.dim() != 4:
        return None
    kernel, padding, dilation = (
        per_dim(op.argument(name, default), 2)
        for name, default in (("kernel_size", 0), ("padding", 0), ("dilation", 1))
    )
    stride, ceil = per_dim(op.argument("stride") or kernel, 2), op.argument("ceil_mode", False)
    y, indices = F.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
    back = _aten.max_pool2d_with_indices_backward.default
    return y, lambda R: (back(R, x, kernel, stride, padding, dilation, ceil, indices),)


def mean_pooled(op: Op, data: list[Tensor]) -> tuple[Tensor, Vjp] | None:
    """Average pooling to one number a channel."""
    x = data[0]
    if x.dim() != 4 or op.argument("output_size") not in (1, (1, 1), [1, 1]):
        return None
    shape, share = x.shape, 1 / (x.shape[2] * x.shape[3])
    return op.call(x), lambda R: ((R * share).expand(shape),)


def average_pooled(op: Op, data: list[Tensor]) -> tuple[Tensor, Vjp] | None:
    x = data[0]
    if x.dim() != 4:
        return None
    kernel, padding = (per_dim(op.argument(name, 0), 2) for name in ("kernel_size", "padding"))
    stride, ceil = per_dim(op.argument("stride") or kernel, 2), op.argument("ceil_mode", False)
    whole, divisor = op.argument("count_include_pad", True), op.argument("divisor_override")
    back = _aten.avg_pool2d_backward.default
    return op.call(x), lambda R: (back(R, x, kernel, stride, padding, ceil, whole, divisor),)


def padded(op: Op, data: list[Tensor]) -> tuple[Tensor, Vjp] | None:
    """Constants around x, which get no gradient."""
    x, pads = data[0], op.argument("pad")
    numbers = isinstance(pads, (tuple, list)) and all(type(p) is int and p >= 0 for p in pads)
    if not numbers or op.argument("mode", "constant") != "constant":
        return None
    before = (0,) * (x.dim() - len(pads) // 2) + tuple(pads[-2::-2])
    inner = tuple(slice(first, first + size) for first, size in zip(before, x.shape, strict=True))
    return op.call(x), lambda R: (R[inner],)


DIRECT: dict[str, Direct] = {
    **dict.fromkeys("view reshape flatten unflatten squeeze unsqueeze".split(), reshaped),
    **dict.fromkeys("cat concat concatenate".split(), concatenated),
    **dict.fromkeys("pad constant_pad_nd".split(), padded),
    "max_pool2d": max_pooled,
    "adaptive_avg_pool2d": mean_pooled,
    "avg_pool2d": average_pooled,
}


def direct(op: Op, data: list[Tensor]) -> tuple[Tensor, Any] | None:
    """The result of an op about to run, and its way back. Gradients are off."""
    kind = DIRECT.get(op.name)
    return kind(op, data) if kind is not None else None
