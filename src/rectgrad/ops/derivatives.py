"""Ordinary gradients of common calls in closed form: what autograd would compute, without starting its
engine, which takes longer than most of these gradients.

Each function returns the result of a call, its gradient function, and the tensors that the gradient reads,
which it is given after R: it holds no others. None if the call is not of the usual kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.ops.arguments import Slot, fill
from rectgrad.ops.windows import per_dim

Op = Any  # a call about to run: its name, arguments and `call`

Vjp = Callable[..., tuple[Any, ...]]  # (R, *the tensors it reads)
Found = tuple[Tensor, Vjp, tuple[Tensor, ...]] | None
Direct = Callable[[Op, list[Tensor]], Found]
_aten = torch.ops.aten
_max_pool_back = _aten.max_pool2d_with_indices_backward.default
_avg_pool_back = _aten.avg_pool2d_backward.default
_adaptive_pool_back = _aten._adaptive_avg_pool2d_backward.default


def to_both(R: Any) -> tuple[Any, Any]:
    return R, R  # of x + y


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
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
    alike = len(op.args[0]) == len(data) and all(x.dtype is data[0].dtype and x.dim() > 1 for x in data)
    if not alike or type(dim) is not int or not op.kwargs.keys() <= {"dim"}:
        return None
    sizes = [x.shape[dim] for x in data]
    return op.call(*data), lambda R: R.split(sizes, dim), ()


def max_pooled(op: Op, data: list[Tensor]) -> Found:
    x = data[0]
    if op.argument("return_indices", False) or x.dim() != 4:
        return None
    kernel, padding, dilation = (
        per_dim(op.argument(name, default), 2)
        for name, default in (("kernel_size", 0), ("padding", 0), ("dilation", 1))
    )
    stride, ceil = per_dim(op.argument("stride") or kernel, 2), op.argument("ceil_mode", False)
    y, indices = F.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
    shape, strides = x.shape, x.stride()

    def back(R: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        like = R.new_empty_strided(shape, strides)  # the layout of x: its values are not read
        return (_max_pool_back(R, like, kernel, stride, padding, dilation, ceil, indices),)

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
    kernel, padding = (per_dim(op.argument(name, 0), 2) for name in ("kernel_size", "padding"))
    stride, ceil = per_dim(op.argument("stride") or kernel, 2), op.argument("ceil_mode", False)
    whole, divisor = op.argument("count_include_pad", True), op.argument("divisor_override")
    shape, strides = x.shape, x.stride()

    def back(R: Tensor) -> tuple[Tensor, ...]:
        like = R.new_empty_strided(shape, strides)
        return (_avg_pool_back(R, like, kernel, stride, padding, ceil, whole, divisor),)

    return op.call(x), back, ()


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


def product(op: Op, data: list[Tensor]) -> Found:
    """x * y: of two data tensors, or of one and a constant."""
    if op.kwargs or len(op.args) != 2:
        return None
    x, y = fill(op.args, data)
    tensors = [t for t in (x, y) if isinstance(t, Tensor)]
    if any(t.dtype is not data[0].dtype or t.is_sparse for t in tensors):
        return None
    first, second = (type(a) is Slot for a in op.args)
    numbers = [t for t in (x, y) if not isinstance(t, Tensor)]

    def back(R: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, y = (*tensors, *numbers) if first else (*numbers, *tensors)
        left = (_fitting(R * y, x.shape),) if first else ()
        return (*left, _fitting(R * x, y.shape)) if second else left

    return op.call(*data), back, tuple(tensors)


def added(op: Op, data: list[Tensor]) -> Found:
    """x + y, x - y, y - x: of two data tensors, or of one and a constant."""
    if op.kwargs or len(op.args) != 2:
        return None
    values, signs = fill(op.args, data), _SIGNS[op.name]
    if any(isinstance(t, Tensor) and (t.dtype is not data[0].dtype or t.is_sparse) for t in values):
        return None
    parts = [(t.shape, s) for t, a, s in zip(values, op.args, signs, strict=True) if type(a) is Slot]

    def back(R: Tensor) -> tuple[Tensor, ...]:
        return tuple([_fitting(R if sign > 0 else -R, shape) for shape, sign in parts])

    return op.call(*data), back, ()


_SIGNS = {"add": (1, 1), "sub": (1, -1), "subtract": (1, -1), "rsub": (-1, 1)}


def quotient(op: Op, data: list[Tensor]) -> Found:
    """x / y, of a constant y."""
    if op.kwargs or len(op.args) != 2 or type(op.args[0]) is not Slot or type(op.args[1]) is Slot:
        return None
    x, y = data[0], op.args[1]
    if not isinstance(y, Tensor):
        return op.call(x), lambda R: (R / y,), ()
    shape = x.shape
    if y.dtype is not x.dtype or y.is_sparse:
        return None
    return op.call(x), lambda R, y: (_fitting(R / y, shape),), (y,)


def _fitting(R: Tensor, shape: torch.Size) -> Tensor:
    """Summed where a tensor of this shape was broadcast."""
    return R if R.shape == shape else R.sum_to_size(shape)


def reduced(op: Op, data: list[Tensor]) -> Found:
    """A sum or a mean over some dimensions."""
    x, y = data[0], op.call(*data)
    dims = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
    keeps = op.kwargs.get("keepdim", op.args[2] if len(op.args) > 2 else False)
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


_layer_norm_back = _aten.native_layer_norm_backward.default


def matrix_product(op: Op, data: list[Tensor]) -> Found:
    """x @ y, at least two dimensions each: of two data tensors, or of one and a constant."""
    if op.kwargs or len(op.args) != 2:
        return None
    x, y = fill(op.args, data)
    if any(not isinstance(t, Tensor) or t.dim() < 2 or t.dtype is not data[0].dtype for t in (x, y)):
        return None
    first, second = (type(a) is Slot for a in op.args)

    def back(R: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        left = (_fitting(R @ y.transpose(-2, -1), x.shape),) if first else ()
        return (*left, _fitting(x.transpose(-2, -1) @ R, y.shape)) if second else left

    return op.call(*data), back, (x, y)


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
    **dict.fromkeys("matmul bmm mm".split(), matrix_product),
    "__getitem__": picked,
    **dict.fromkeys("sum mean".split(), reduced),
    **dict.fromkeys("view reshape flatten unflatten squeeze unsqueeze clone".split(), reshaped),
    **dict.fromkeys(_SIGNS, added),
    **dict.fromkeys("div divide true_divide".split(), quotient),
    "tanh": of_output(_aten.tanh_backward.default),
    "hardsigmoid": of_input(_aten.hardsigmoid_backward.default),
    **dict.fromkeys("cat concat concatenate".split(), concatenated),
    **dict.fromkeys("pad constant_pad_nd".split(), padded),
    **dict.fromkeys("transpose swapaxes swapdims".split(), transposed),
    **dict.fromkeys("mul multiply".split(), product),
    **dict.fromkeys("sigmoid expit".split(), of_output(_aten.sigmoid_backward.default)),
    "permute": permuted,
    "max_pool2d": max_pooled,
    "adaptive_avg_pool2d": adaptively_pooled,
    "avg_pool2d": average_pooled,
}
