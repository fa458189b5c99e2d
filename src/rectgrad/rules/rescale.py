"""DeepLIFT's Rescale rule: multiplier = difference of outputs / difference of inputs, against a baseline.

Linear steps keep their plain gradient. op.reference is the same op in the baseline's pass. Each rule is
exact: the multipliers times the differences of the inputs sum to the difference of the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule
from rectgrad.kernels import rescale_ops as kernel
from rectgrad.kernels.rescale_ops import SECANTS, SMALL
from rectgrad.ops.arguments import Slot, fill


def deeplift_rules() -> dict[str, Rule]:
    functions: dict[str, Any] = dict.fromkeys((*ops.RECTIFIERS, "squash", "unary"), rescale)
    functions |= dict.fromkeys(("mul", "matmul", "linear", "conv", "conv_transpose"), product)
    functions |= {"max_pool": winner, "max": largest, "min": largest, "div": division}
    functions |= {"softmax": softmax, "log_softmax": log_softmax}
    return {family: Rule(function, function.__name__) for family, function in functions.items()}


def _reference(op: Op) -> Op:
    assert op.reference is not None
    return op.reference


def _midpoints(op: Op) -> list[Tensor]:
    return [(x + x0) / 2 for x, x0 in zip(op.inputs, _reference(op).inputs, strict=True)]


def rescale(op: Op, R: Tensor) -> Any:
    """(f(x) - f(x0)) / (x - x0), unit by unit."""
    if op.data_count > 1 or op.output.shape != op.inputs[0].shape:
        return op.vjp(R)
    x, x0, y, y0 = op.inputs[0], _reference(op).inputs[0], op.output, _reference(op).output
    if op.name in SECANTS:
        return R * SECANTS[op.name](x, x0, y, y0)
    (derivative,) = op.vjp_at(_midpoints(op), R)
    return torch.where((x - x0).abs() < SMALL, derivative, R * (y - y0) / (x - x0))


def product(op: Op, R: Tensor) -> Any:
    """x y - x0 y0 = (y + y0)/2 dx + (x + x0)/2 dy: the gradient of the product at the midpoint."""
    return op.vjp(R) if op.data_count == 1 else op.vjp_at(_midpoints(op), R)


def winner(op: Op, R: Tensor) -> Any:
    """The output's difference goes to the position that explains it: the arg-max of the input where the
    output rose, of the baseline where it fell; for a minimum the other way round."""
    x, x0 = op.inputs[0], _reference(op).inputs[0]
    dx, dy = x - x0, op.output - _reference(op).output
    up, down = (x0, x) if op.family == "min" else (x, x0)
    (rise,), (fall,) = op.vjp_at([up], R * dy.clamp(min=0)), op.vjp_at([down], R * dy.clamp(max=0))
    (plain,) = op.vjp(R)
    return torch.where(dx.abs() < SMALL, plain, (rise + fall) / dx)


def largest(op: Op, R: Tensor) -> Any:
    """The maximum of two tensors, or along a dimension as in max pooling."""
    if op.data_count == 1:
        same = op.output.shape == op.inputs[0].shape and len(op.args) > 1 and torch.is_tensor(op.args[1])
        return rescale(op, R) if same or op.name in ("maximum", "minimum") else winner(op, R)
    sign = 1 if op.family == "max" else -1
    return kernel.larger_of_two(sign, R, *op.inputs, *_reference(op).inputs)


def division(op: Op, R: Tensor) -> Any:
    order = (1, 0) if op.name == "rdiv" else (0, 1)
    operands = (_operand(each, i, R) for each in (op, _reference(op)) for i in order)
    grads = dict(zip(order, kernel.quotient(R, *operands), strict=True))
    return tuple(grads[i] for i in (0, 1) if type(_given(op, i)) is Slot)


def _given(op: Op, i: int) -> Any:
    """The i-th operand as it was passed: a slot if it is data."""
    return op.args[i] if i < len(op.args) else op.kwargs[("input", "other")[i]]


def _operand(op: Op, i: int, like: Tensor) -> Tensor:
    value = fill(_given(op, i), op.inputs)
    return value if torch.is_tensor(value) else torch.as_tensor(value, dtype=like.dtype, device=like.device)


def softmax(op: Op, R: Tensor) -> Tensor:
    return kernel.softmax(R, op.inputs[0], _reference(op).inputs[0], op.argument("dim", -1))


def log_softmax(op: Op, R: Tensor) -> Tensor:
    return kernel.log_softmax(R, op.inputs[0], _reference(op).inputs[0], op.argument("dim", -1))
