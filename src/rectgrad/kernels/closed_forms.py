"""Ordinary gradients of common calls in closed form. They equal those of autograd, whose engine takes longer
to start than most of them take to compute.

Each function takes `run`, which computes the call on data tensors, those data tensors, and the arguments that
matter. It returns the result, the gradient function, and the tensors that the gradient reads, to be passed
after R: the function itself holds none. It returns None if the arguments are unusual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.ops.arguments import Slot, fill
from rectgrad.ops.windows import per_dim

Run = Callable[..., Any]
Vjp = Callable[..., tuple[Any, ...]]  # (R, *the tensors it reads)
Found = tuple[Tensor, Vjp, tuple[Tensor, ...]] | None
Form = Callable[..., Found]  # (run, data, *arguments)
_aten = torch.ops.aten
_max_pool_back = _aten.max_pool2d_with_indices_backward.default
_avg_pool_back = _aten.avg_pool2d_backward.default
_layer_norm_back = _aten.native_layer_norm_backward.default
_adaptive_pool_back = _aten._adaptive_avg_pool2d_backward.default


def to_both(R: Any) -> tuple[Any, Any]:
    return R, R  # of x + y


def relu_gradient(R: Tensor, y: Tensor) -> tuple[Tensor]:
    return (_aten.threshold_backward.default(R, y, 0),)


def reshaped(run: Run, data: list[Tensor], *given: Any) -> Found:
    """A new shape for the same values in the same order. `x.view(dtype)` has no gradient, not even for the
    dtype of x."""
    x, y = data[0], run(*data)
    shape = x.shape
    same = y.dtype is x.dtype and not any(isinstance(value, torch.dtype) for value in given)
    return (y, lambda R: (R.reshape(shape),), ()) if same else None


def concatenated(run: Run, data: list[Tensor], tensors: Any, dim: Any) -> Found:
    dim = 0 if dim is None else dim
    alike = len(tensors) == len(data) and all(x.dtype is data[0].dtype and x.dim() > 1 for x in data)
    if not alike or type(dim) is not int:
        return None
    sizes = [x.shape[dim] for x in data]
    return run(*data), lambda R: R.split(sizes, dim), ()


def max_pooled(
    run: Run, data: list[Tensor], kernel: Any, stride: Any, padding: Any, dilation: Any, *more: Any
) -> Found:
    """more: ceil_mode, return_indices."""
    x = data[0]
    if more[1] or x.dim() != 4:
        return None
    windows: Any = (*_windows(kernel, stride, padding), per_dim(dilation or 1, 2), bool(more[0]))
    y, indices = F.max_pool2d_with_indices(x, *windows)
    shape, strides = x.shape, x.stride()

    def back(R: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        like = R.new_empty_strided(shape, strides)  # the layout of x: its values are not read
        return (_max_pool_back(R, like, *windows, indices),)

    return y, back, (indices,)


def _windows(kernel: Any, stride: Any, padding: Any) -> tuple[tuple[int, ...], ...]:
    return per_dim(kernel, 2), per_dim(stride or kernel, 2), per_dim(padding or 0, 2)


def adaptively_pooled(run: Run, data: list[Tensor], size: Any) -> Found:
    """Average pooling to a size."""
    x = data[0]
    if x.dim() != 4:
        return None
    shape, strides, number = x.shape, x.stride(), x.shape[2] * x.shape[3]
    if size in (1, (1, 1), [1, 1]):
        return run(x), lambda R: ((R / number).expand(shape),), ()
    return run(x), lambda R: (_adaptive_pool_back(R, R.new_empty_strided(shape, strides)),), ()


def average_pooled(
    run: Run, data: list[Tensor], kernel: Any, stride: Any, padding: Any, ceil: Any, padded: Any, divisor: Any
) -> Found:
    x = data[0]
    if x.dim() != 4:
        return None
    windows = (*_windows(kernel, stride, padding), bool(ceil), padded is not False, divisor)
    shape, strides = x.shape, x.stride()
    return run(x), lambda R: (_avg_pool_back(R, R.new_empty_strided(shape, strides), *windows),), ()


def padded(run: Run, data: list[Tensor], pads: Any, mode: Any, value: Any) -> Found:
    """Padding with a constant, which gets no gradient."""
    x = data[0]
    numbers = isinstance(pads, (tuple, list)) and all(type(p) is int and p >= 0 for p in pads)
    if not numbers or mode not in (None, "constant"):
        return None
    before = (0,) * (x.dim() - len(pads) // 2) + tuple(pads[-2::-2])
    inner = tuple(slice(first, first + size) for first, size in zip(before, x.shape, strict=True))
    return run(x), lambda R: (R[inner],), ()


def permuted(run: Run, data: list[Tensor], _: Any, *order: Any) -> Found:
    x = data[0]
    order = order[0] if len(order) == 1 else order
    if not isinstance(order, tuple) or len(order) != x.dim() or not all(type(d) is int for d in order):
        return None
    back = sorted(range(x.dim()), key=lambda d: order[d] % x.dim())
    return run(x), lambda R: (R.permute(back),), ()


def transposed(run: Run, data: list[Tensor], _: Any, *dims: Any) -> Found:
    return (run(*data), lambda R: (R.transpose(*dims),), ()) if len(dims) == 2 else None


def of_two(left: Any, right: Any, reads: bool = True, rank: int = 0) -> Form:
    """A function of two operands: data tensors, or one and a constant.

    left: the gradient of the first operand from R and the second; right: that of the second from R and the
    first, None if it has no closed form. reads: whether these read the other operand. rank: the least number
    of dimensions of both.
    """

    def form(run: Run, data: list[Tensor], *given: Any) -> Found:
        if len(given) != 2:
            return None
        operands, kind = fill(given, data), data[0].dtype
        tensors = [t for t in operands if isinstance(t, Tensor)]
        usual = all(t.dtype is kind and not t.is_sparse and t.dim() >= rank for t in tensors)
        slots = [i for i in (0, 1) if type(given[i]) is Slot]
        y = run(*data)
        if not usual or y.dtype is not kind or kind.is_complex or (right is None and 1 in slots):
            return None
        grads, shapes = [(left, right)[i] for i in slots], [operands[i].shape for i in slots]
        others: tuple[Any, ...] = tuple([operands[1 - i] if reads else None for i in slots])
        needed = others if reads and len(tensors) == 2 else ()
        numbers = () if needed else others

        def back(R: Tensor, *needed: Tensor) -> tuple[Tensor, ...]:
            parts = zip(grads, needed or numbers, shapes, strict=True)
            return tuple([_fitting(grad(R, other), shape) for grad, other, shape in parts])

        return y, back, needed

    return form


def _fitting(R: Tensor, shape: torch.Size) -> Tensor:
    """R summed over the dimensions in which a tensor of this shape was broadcast."""
    return R if R.shape == shape else R.sum_to_size(shape)


def reduced(run: Run, data: list[Tensor], dims: Any, keeps: Any, mean: bool = False) -> Found:
    """The gradient of a sum or a mean over some dimensions."""
    x, y = data[0], run(*data)
    dims = (dims,) if type(dims) is int else dims
    if not isinstance(dims, (tuple, list)) or not dims or not y.numel() or y.dtype is not x.dtype:
        return None
    shape, number = x.shape, x.numel() // y.numel() if mean else 1
    kept = [1 if d in {i % x.dim() for i in dims} else size for d, size in enumerate(shape)]
    return y, lambda R: (((R if keeps else R.reshape(kept)) / number).expand(shape),), ()


def of_input(backward: Callable[..., Tensor]) -> Form:
    """An elementwise function whose derivative is a function of its input alone."""
    return lambda run, data: (run(*data), lambda R, x: (backward(R, x),), (data[0],))


def of_output(backward: Callable[..., Tensor]) -> Form:
    """An elementwise function whose derivative is a function of its output alone."""

    def form(run: Run, data: list[Tensor]) -> Found:
        y = run(*data)
        return y, lambda R, y: (backward(R, y),), (y.detach(),)  # y itself refers to the op

    return form


def gelu(run: Run, data: list[Tensor], approximate: Any) -> Found:
    back = partial(_aten.gelu_backward.default, approximate=approximate or "none")
    return run(*data), lambda R, x: (back(R, x),), (data[0],)


def softmax(run: Run, data: list[Tensor], dim: Any, *_: Any) -> Found:
    x, y = data[0], run(*data)
    if type(dim) is not int or y.dtype is not x.dtype:
        return None
    kind = x.dtype
    return y, lambda R, y: (_aten._softmax_backward_data.default(R, y, dim, kind),), (y.detach(),)


def layer_norm(run: Run, data: list[Tensor], shape: Any, weight: Any, bias: Any, eps: Any) -> Found:
    """Uses torch's backward kernel, which needs the mean and inverse deviation of each row."""
    if len(data) > 1 or not data[0].numel():
        return None
    x = data[0]
    given = [t for t in (weight, bias) if t is not None]
    if any(t.dtype is not x.dtype for t in given):
        return None
    y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)
    scaled, mask = weight is not None, [True, False, False]

    def back(R: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        weight = given[0] if scaled else None
        return (_layer_norm_back(R.contiguous(), x, shape, mean, rstd, weight, None, mask)[0],)

    return y, back, (x, mean, rstd, *given)


def picked(run: Run, data: list[Tensor], _: Any, index: Any) -> Found:
    """The gradient of x[index] with numbers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(type(part) in _BASIC for part in parts):
        return None
    shape = data[0].shape

    def back(R: Tensor) -> tuple[Tensor]:
        grad = R.new_zeros(shape)
        grad[index] = R
        return (grad,)

    return run(*data), back, ()


_BASIC = frozenset({int, slice, type(None), type(...)})


_POOL = "kernel_size stride padding"
# For each name of a call, the arguments that its closed form takes, and the form. None: all positional
# arguments; calls with keyword arguments have no closed form.
CLOSED_FORMS: dict[str, tuple[tuple[str, ...] | None, Form]] = {
    name: (None if arguments is None else tuple(arguments.split()), form)
    for names, arguments, form in (
        ("relu6", "", of_input(lambda R, x: _aten.hardtanh_backward.default(R, x, 0.0, 6.0))),
        ("gelu", "approximate", gelu),
        ("silu", "", of_input(_aten.silu_backward.default)),
        ("hardswish", "", of_input(_aten.hardswish_backward.default)),
        ("mish", "", of_input(_aten.mish_backward.default)),
        ("hardsigmoid", "", of_input(_aten.hardsigmoid_backward.default)),
        ("tanh", "", of_output(_aten.tanh_backward.default)),
        ("sigmoid expit", "", of_output(_aten.sigmoid_backward.default)),
        ("softmax _softmax", "dim dtype _stacklevel", softmax),
        ("layer_norm", "normalized_shape weight bias eps", layer_norm),
        ("matmul bmm mm", None, of_two(lambda R, y: R @ y.mT, lambda R, x: x.mT @ R, rank=2)),
        ("mul multiply", None, of_two(torch.mul, torch.mul)),
        ("div divide true_divide", None, of_two(lambda R, y: R / y, None)),
        ("add", None, of_two(lambda R, _: R, lambda R, _: R, reads=False)),
        ("sub subtract", None, of_two(lambda R, _: R, lambda R, _: -R, reads=False)),
        ("rsub", None, of_two(lambda R, _: -R, lambda R, _: R, reads=False)),
        ("sum", "dim keepdim", reduced),
        ("mean", "dim keepdim", partial(reduced, mean=True)),
        ("reshape flatten unflatten squeeze unsqueeze clone", "", reshaped),
        ("view", None, reshaped),
        ("cat concat concatenate", "tensors dim", concatenated),
        ("pad constant_pad_nd", "pad mode value", padded),
        ("permute", None, permuted),
        ("transpose swapaxes swapdims", None, transposed),
        ("__getitem__", None, picked),
        ("max_pool2d", f"{_POOL} dilation ceil_mode return_indices", max_pooled),
        ("avg_pool2d", f"{_POOL} ceil_mode count_include_pad divisor_override", average_pooled),
        ("adaptive_avg_pool2d", "output_size", adaptively_pooled),
    )
    for name in names.split()
}


def positive_gradient(R: Tensor, z: Tensor) -> Tensor:
    """R where R > 0 and z > 0, in two passes over memory instead of four. The gradient of torch's threshold
    is R where z > 0."""
    return torch.ops.aten.threshold_backward.default(R, z, 0).clamp_(min=0)
