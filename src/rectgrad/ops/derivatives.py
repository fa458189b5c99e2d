"""Ordinary gradients of common calls in closed form: what autograd would compute, without starting its
engine, which takes longer than most of these gradients.

Each function returns the result of a call, its gradient function, and the tensors that the gradient reads,
which it is given after R: it holds no others. None if the call is not of the usual kind.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.ops.arguments import Slot, fill
from rectgrad.ops.windows import pooling_windows

Op = Any  # a call about to run: its name, arguments and `call`

Vjp = Callable[..., tuple[Any, ...]]  # (R, *the tensors it reads)
Found = tuple[Tensor, Vjp, tuple[Tensor, ...]] | None
Direct = Callable[[Op, list[Tensor]], Found]
_aten = torch.ops.aten
_max_pool_back = _aten.max_pool2d_with_indices_backward.default
_avg_pool_back = _aten.avg_pool2d_backward.default
_layer_norm_back = _aten.native_layer_norm_backward.default
_adaptive_pool_back = _aten._adaptive_avg_pool2d_backward.default


def to_both(R: Any) -> tuple[Any, Any]:
    """Of x + y, both of one shape."""
    return R, R


def relu_gradient(R: Tensor, y: Tensor) -> tuple[Tensor]:
    return (_aten.threshold_backward.default(R, y, 0),)


def reshaped(op: Op, data: list[Tensor]) -> Found:
    """The same values in the same order."""
    x, y = data[0], op.call(*data)
    shape = x.shape
    return (y, lambda R: (R.reshape(shape),), ()) if y.dtype is x.dtype else None


def concatenated(op: Op, data: list[Tensor]) -> Found:
    if not op.args:
        return None
    dim = op.argument("dim", 0)
    alike = len(op.args[0]) == len(data) and all(x.dtype is data[0].dtype and x.dim() > 1 for x in data)
    if not alike or type(dim) is not int or not op.kwargs.keys() <= {"dim"}:
        return None
    sizes = [x.shape[dim] for x in data]
    return op.call(*data), lambda R: R.split(sizes, dim), ()


def max_pooled(op: Op, data: list[Tensor]) -> Found:
    x = data[0]
    if op.argument("return_indices", False) or x.dim() != 4:
        return None
    windows = (*pooling_windows(op.argument, 2), op.argument("ceil_mode", False))
    y, indices = F.max_pool2d_with_indices(x, *windows)
    shape, strides = x.shape, x.stride()

    def back(R: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        like = R.new_empty_strided(shape, strides)  # the layout of x: its values are not read
        return (_max_pool_back(R, like, *windows, indices),)

    return y, back, (indices,)


def adaptively_pooled(op: Op, data: list[Tensor]) -> Found:
    """Average pooling to a size."""
    x = data[0]
    if x.dim() != 4:
        return None
    shape, strides, number = x.shape, x.stride(), x.shape[2] * x.shape[3]
    if op.argument("output_size") in (1, (1, 1), [1, 1]):
        return op.call(x), lambda R: ((R / number).expand(shape),), ()
    return op.call(x), lambda R: (_adaptive_pool_back(R, R.new_empty_strided(shape, strides)),), ()


def average_pooled(op: Op, data: list[Tensor]) -> Found:
    x = data[0]
    if x.dim() != 4:
        return None
    options = (("ceil_mode", False), ("count_include_pad", True), ("divisor_override", None))
    windows = (*pooling_windows(op.argument, 2)[:3], *starmap(op.argument, options))
    shape, strides = x.shape, x.stride()

    return op.call(x), lambda R: (_avg_pool_back(R, R.new_empty_strided(shape, strides), *windows),), ()


def padded(op: Op, data: list[Tensor]) -> Found:
    """Constants around x, which get no gradient."""
    x, pads = data[0], op.argument("pad")
    numbers = isinstance(pads, (tuple, list)) and all(type(p) is int and p >= 0 for p in pads)
    if not numbers or op.argument("mode", "constant") != "constant":
        return None
    before = (0,) * (x.dim() - len(pads) // 2) + tuple(pads[-2::-2])
    inner = tuple(slice(first, first + size) for first, size in zip(before, x.shape, strict=True))
    return op.call(x), lambda R: (R[inner],), ()


def permuted(op: Op, data: list[Tensor]) -> Found:
    x = data[0]
    order = op.args[1:] if len(op.args) != 2 else op.args[1]
    whole = not op.kwargs and isinstance(order, tuple) and all(type(d) is int for d in order)
    if not whole or len(order) != x.dim():
        return None
    back = sorted(range(x.dim()), key=lambda d: order[d] % x.dim())
    return op.call(x), lambda R: (R.permute(back),), ()


def transposed(op: Op, data: list[Tensor]) -> Found:
    dims = op.args[1:]
    if op.kwargs or len(dims) != 2:
        return None
    return op.call(*data), lambda R: (R.transpose(*dims),), ()


def of_two(left: Any, right: Any, reads: bool = True, rank: int = 0) -> Direct:
    """A function of two operands: data tensors, or one and a constant.

    left: the gradient of the first operand from R and the second; right: that of the second from R and the
    first, None if it has no closed form. reads: whether these read the other operand. rank: the least number
    of dimensions of both.
    """

    def derivative(op: Op, data: list[Tensor]) -> Found:
        if op.kwargs or len(op.args) != 2:
            return None
        operands, kind = fill(op.args, data), data[0].dtype
        tensors = [t for t in operands if isinstance(t, Tensor)]
        usual = all(t.dtype is kind and not t.is_sparse and t.dim() >= rank for t in tensors)
        slots = [i for i in (0, 1) if type(op.args[i]) is Slot]
        if not usual or kind.is_complex or (right is None and 1 in slots):
            return None
        grads, shapes = [(left, right)[i] for i in slots], [operands[i].shape for i in slots]
        others: tuple[Any, ...] = tuple([operands[1 - i] if reads else None for i in slots])
        needed = others if reads and len(tensors) == 2 else ()
        numbers = () if needed else others

        def back(R: Tensor, *needed: Tensor) -> tuple[Tensor, ...]:
            parts = zip(grads, needed or numbers, shapes, strict=True)
            return tuple([_fitting(grad(R, other), shape) for grad, other, shape in parts])

        return op.call(*data), back, needed

    return derivative


def _fitting(R: Tensor, shape: torch.Size) -> Tensor:
    """Summed where a tensor of this shape was broadcast."""
    return R if R.shape == shape else R.sum_to_size(shape)


def reduced(op: Op, data: list[Tensor]) -> Found:
    """A sum or a mean over some dimensions."""
    x, y = data[0], op.call(*data)
    dims, keeps = op.argument("dim"), op.argument("keepdim", False)
    dims = (dims,) if type(dims) is int else dims
    named = op.kwargs.keys() <= {"dim", "keepdim"} and y.dtype is x.dtype
    if not named or not isinstance(dims, (tuple, list)) or not dims or not y.numel():
        return None
    shape, number = x.shape, x.numel() // y.numel() if op.name == "mean" else 1
    kept = [1 if d in {i % x.dim() for i in dims} else size for d, size in enumerate(shape)]
    return y, lambda R: (((R if keeps else R.reshape(kept)) / number).expand(shape),), ()


def of_input(backward: Callable[..., Tensor]) -> Direct:
    """An elementwise function whose derivative is a function of its input alone."""

    def derivative(op: Op, data: list[Tensor]) -> Found:
        return op.call(*data), lambda R, x: (backward(R, x),), (data[0],)

    return derivative


def of_output(backward: Callable[..., Tensor]) -> Direct:
    """The same, a function of its output alone."""

    def derivative(op: Op, data: list[Tensor]) -> Found:
        y = op.call(*data)
        return y, lambda R, y: (backward(R, y),), (y.detach(),)  # y itself refers to the op

    return derivative


def gelu(op: Op, data: list[Tensor]) -> Found:
    form = op.kwargs.get("approximate", "none")
    return op.call(*data), lambda R, x: (_aten.gelu_backward.default(R, x, approximate=form),), (data[0],)


def relu6(op: Op, data: list[Tensor]) -> Found:
    if op.name != "relu6":  # a clamp has another derivative at its bounds
        return None
    return op.call(*data), lambda R, x: (_aten.hardtanh_backward.default(R, x, 0.0, 6.0),), (data[0],)


def softmax(op: Op, data: list[Tensor]) -> Found:
    x, y, dim = data[0], op.call(*data), op.argument("dim")
    if type(dim) is not int or y.dtype is not x.dtype or op.name not in ("softmax", "_softmax"):
        return None
    kind = x.dtype
    return y, lambda R, y: (_aten._softmax_backward_data.default(R, y, dim, kind),), (y.detach(),)


def layer_norm(op: Op, data: list[Tensor]) -> Found:
    """By torch's own backward kernel, which needs the mean and the inverse deviation of each row."""
    if len(data) > 1 or not data[0].numel():
        return None
    x, shape = data[0], op.argument("normalized_shape")
    weight, bias, eps = (op.argument(name) for name in ("weight", "bias", "eps"))
    given = [t for t in (weight, bias) if t is not None]
    if any(t.dtype is not x.dtype for t in given):
        return None
    y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)
    scaled, mask = weight is not None, [True, False, False]

    def back(R: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        weight = given[0] if scaled else None
        return (_layer_norm_back(R.contiguous(), x, shape, mean, rstd, weight, None, mask)[0],)

    return y, back, (x, mean, rstd, *given)


def picked(op: Op, data: list[Tensor]) -> Found:
    """x[index] of numbers and slices."""
    x, index = data[0], op.args[1] if len(op.args) == 2 else None
    parts = index if isinstance(index, tuple) else (index,)
    if op.kwargs or not all(type(part) in _BASIC for part in parts):
        return None
    shape = x.shape

    def back(R: Tensor) -> tuple[Tensor]:
        grad = R.new_zeros(shape)
        grad[index] = R
        return (grad,)

    return op.call(x), back, ()


_BASIC = frozenset({int, slice, type(None), type(...)})


DIRECT: dict[str, Direct] = {
    "relu6": relu6,
    "gelu": gelu,
    "silu": of_input(_aten.silu_backward.default),
    "hardswish": of_input(_aten.hardswish_backward.default),
    "mish": of_input(_aten.mish_backward.default),
    "softmax": softmax,
    "_softmax": softmax,
    "layer_norm": layer_norm,
    **dict.fromkeys("matmul bmm mm".split(), of_two(lambda R, y: R @ y.mT, lambda R, x: x.mT @ R, rank=2)),
    "__getitem__": picked,
    **dict.fromkeys("sum mean".split(), reduced),
    **dict.fromkeys("view reshape flatten unflatten squeeze unsqueeze clone".split(), reshaped),
    "add": of_two(lambda R, _: R, lambda R, _: R, reads=False),
    **dict.fromkeys("sub subtract".split(), of_two(lambda R, _: R, lambda R, _: -R, reads=False)),
    "rsub": of_two(lambda R, _: -R, lambda R, _: R, reads=False),
    **dict.fromkeys("div divide true_divide".split(), of_two(lambda R, y: R / y, None)),
    "tanh": of_output(_aten.tanh_backward.default),
    "hardsigmoid": of_input(_aten.hardsigmoid_backward.default),
    **dict.fromkeys("cat concat concatenate".split(), concatenated),
    **dict.fromkeys("pad constant_pad_nd".split(), padded),
    **dict.fromkeys("transpose swapaxes swapdims".split(), transposed),
    **dict.fromkeys("mul multiply".split(), of_two(torch.mul, torch.mul)),
    **dict.fromkeys("sigmoid expit".split(), of_output(_aten.sigmoid_backward.default)),
    "permute": permuted,
    "max_pool2d": max_pooled,
    "adaptive_avg_pool2d": adaptively_pooled,
    "avg_pool2d": average_pooled,
}
