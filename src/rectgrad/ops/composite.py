"""Composite functions of torch, whose bodies run under the recorder, and decompositions of a few fused ops.

A composite function of torch.nn.functional reaches the mode as one call. Running its body under the mode
records the calls inside, for example the projections and the softmax of multi-head attention.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Op = Any  # a recorded op: its name, its arguments by name, its inputs
_MODULES = ("torch.nn.functional", "torch.functional", "torch.autograd")
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def composite(func: Any) -> Callable[..., Any] | None:
    """The body of a composite function of torch, without its own dispatch; None for other functions."""
    if not isinstance(func, types.FunctionType) or func.__closure__ or func is torch.meshgrid:
        return None  # the body of meshgrid calls a function that dispatches meshgrid
    if func.__module__ not in _MODULES and func not in (Tensor.norm, Tensor.backward):
        return None
    scope = {**func.__globals__, **dict.fromkeys(_QUESTIONS, lambda *_: False)}
    if func.__name__.startswith("lp_pool"):
        scope["relu"] = lambda x: x  # of an absolute value: not an activation
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, None)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


_ONE = torch.ones(1, 1, 1, device="cpu")
# The result of a query whose keys are all masked: zero, or NaN before torch 2.5.
_BLIND = F.scaled_dot_product_attention(_ONE, _ONE, _ONE, attn_mask=_ONE < 0).item()


def attention(op: Op) -> Tensor:
    """softmax(scale * query key^T + mask) value."""
    query, key, value = (op.argument(name) for name in ("query", "key", "value"))
    if op.argument("enable_gqa", False):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = op.argument("scale", 1 / math.sqrt(query.shape[-1]))
    scores = (query * scale) @ key.transpose(-2, -1)
    if op.argument("is_causal", False):
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    mask = op.argument("attn_mask")
    if mask is None:  # no query is fully masked, which saves four passes over the scores
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, _BLIND)
    dropout = op.argument("dropout_p", 0.0)
    return (F.dropout(weights, dropout) if dropout else weights) @ value


def glu(op: Op) -> Tensor:
    value, gate = op.inputs[0].chunk(2, op.argument("dim", -1))
    return value * gate.sigmoid()


def norm(op: Op) -> Any:
    """Normalisation in elementary steps: centre, square, mean, reciprocal root, product, scale."""
    rows, scale = _normalised(op, op.argument("input"))
    y = _affine(op, (rows * scale).reshape(op.argument("input").shape))
    return (y, None, None) if op.name == "native_layer_norm" else y


def norm_gradient(op: Op, R: Tensor) -> Tensor:
    """The gradient of a normalisation whose denominator is treated as a constant."""
    rows, centred = _groups(op, _affine(op, R, shift=False))
    rows = rows * _normalised(op, op.argument("input"))[1]
    return (rows - rows.mean(-1, keepdim=True) if centred else rows).reshape(R.shape)


def _normalised(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    """The elements, centred if the norm centres them, and the factor that normalises them."""
    rows, centred = _groups(op, x)
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    eps = op.argument("eps", torch.finfo(x.dtype).eps if op.name == "rms_norm" else 1e-5)
    return rows, ((rows * rows).mean(-1, keepdim=True) + eps).rsqrt()


def _groups(op: Op, x: Tensor) -> tuple[Tensor, bool]:
    """x with the elements that are normalised together along the last dimension."""
    if op.name == "group_norm":
        return x.reshape(x.shape[0], op.argument("num_groups"), -1), True
    if op.name == "instance_norm":
        return x.flatten(2), True
    return x.flatten(-len(op.argument("normalized_shape"))), op.name != "rms_norm"


def _affine(op: Op, y: Tensor, shift: bool = True) -> Tensor:
    channels = op.name in ("group_norm", "instance_norm")
    shape = (1, -1, *(1,) * (y.dim() - 2)) if channels else op.argument("normalized_shape")
    weight, bias = op.argument("weight"), op.argument("bias")
    y = y if weight is None else y * weight.reshape(shape)
    return y + bias.reshape(shape) if shift and bias is not None else y


def vector_norm(op: Op) -> Tensor:
    """The p-norm in elementary steps: absolute values, powers, a sum, a root."""
    x, p = op.inputs[0], op.argument("ord", 2)
    p = 2 if p == "fro" else p
    dim, keepdim = op.argument("dim"), op.argument("keepdim", False)
    dim = tuple(range(x.dim())) if dim is None else dim
    if p in (math.inf, -math.inf):
        return x.abs().amax(dim, keepdim) if p > 0 else x.abs().amin(dim, keepdim)
    if p == 2:
        return (x * x).sum(dim, keepdim).sqrt()
    return x.abs().pow(p).sum(dim, keepdim).pow(1 / p)


decompositions: dict[str, Callable[[Op], Any]] = {
    each.__name__: each for each in (attention, glu, norm, vector_norm)
}
