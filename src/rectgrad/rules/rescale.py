"""DeepLIFT's Rescale rule: multiplier = difference of outputs / difference of inputs, against a baseline.

Linear steps keep their plain gradient. op.reference is the same op in the baseline's pass. Each rule is
exact: the multipliers times the differences of the inputs sum to the difference of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule
from rectgrad.ops.arguments import Slot, fill

FAR = 1e4  # a ratio of denominators from which on they are of another order of magnitude
SMALL = 1e-6  # below this a difference is no divisor: the derivative at the midpoint instead


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


# Where the quotient has a form without differences, there is nothing to cancel.
SECANTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "square": lambda x, x0, y, y0: x + x0,
    "reciprocal": lambda x, x0, y, y0: -y * y0,
    "rsqrt": lambda x, x0, y, y0: -((y * y0) ** 2) / (y + y0),
    "sqrt": lambda x, x0, y, y0: torch.where(y + y0 > 0, 1 / (y + y0), 0),
}


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
    """max(x, y) = y + relu(x - y), min(x, y) = y - relu(y - x); along a dimension as max pooling."""
    if op.data_count == 1:
        same = op.output.shape == op.inputs[0].shape and len(op.args) > 1 and torch.is_tensor(op.args[1])
        return rescale(op, R) if same or op.name in ("maximum", "minimum") else winner(op, R)
    (x, y), (x0, y0) = op.inputs, _reference(op).inputs
    sign = 1 if op.family == "max" else -1
    d, d0 = sign * (x - y), sign * (x0 - y0)
    near = (d + d0 > 0).to(d.dtype)
    m = torch.where((d - d0).abs() < SMALL, near, (d.relu() - d0.relu()) / (d - d0))
    return (R * m).sum_to_size(x.shape), (R * (1 - m)).sum_to_size(y.shape)


def division(op: Op, R: Tensor) -> Any:
    """x / y as x * (1 / y): with q = x / y, dq = w (dx - q0 dy) / y + (1 - w) (dx - q dy) / y0 for any w.

    w = 1/2, as for a product; but 1 or 0, whichever divides by the larger, if the denominators differ by
    more than four orders of magnitude (a vector normalised against a zero baseline): half each would cancel.
    """
    order = (1, 0) if op.name == "rdiv" else (0, 1)
    (x, y), (x0, y0) = ([_operand(o, i, R) for i in order] for o in (op, _reference(op)))
    larger, smaller = y.abs() > FAR * y0.abs(), y0.abs() > FAR * y.abs()
    w = torch.where(larger, 1.0, torch.where(smaller, 0.0, 0.5)).to(R.dtype)
    grad_x = R * (w / y + (1 - w) / y0)
    grad_y = -R * (w * (x0 / y0) / y + (1 - w) * (x / y) / y0)
    grads = dict(zip(order, (grad_x.sum_to_size(x.shape), grad_y.sum_to_size(y.shape)), strict=True))
    return tuple(grads[i] for i in (0, 1) if type(_given(op, i)) is Slot)


def precise(x: Tensor) -> Tensor:
    """In float64, where there is: differences of nearly equal numbers lose digits."""
    return x if x.device.type == "mps" else x.double()


def _given(op: Op, i: int) -> Any:
    """The i-th operand as it was passed, a slot where it is data."""
    return op.args[i] if i < len(op.args) else op.kwargs[("input", "other")[i]]


def _operand(op: Op, i: int, like: Tensor) -> Tensor:
    value = fill(_given(op, i), op.inputs)
    return value if torch.is_tensor(value) else torch.as_tensor(value, dtype=like.dtype, device=like.device)


def softmax(op: Op, R: Tensor) -> Tensor:
    """By its steps: e = exp(x - c), r = 1 / sum(e), p = e * r, with one shift c for x and x0."""
    dim, e, e0, secant = _exponentials(op)
    r, r0 = 1 / e.sum(dim, keepdim=True), 1 / e0.sum(dim, keepdim=True)
    to_r = (R * (e + e0) / 2).sum(dim, keepdim=True)
    return ((R * (r + r0) / 2 - to_r * r * r0) * secant).to(R.dtype)


def log_softmax(op: Op, R: Tensor) -> Tensor:
    """log p = x - c - log(sum(e))."""
    dim, e, e0, secant = _exponentials(op)
    s, s0 = e.sum(dim, keepdim=True), e0.sum(dim, keepdim=True)
    slope = torch.where((s - s0).abs() < SMALL, 2 / (s + s0), (s.log() - s0.log()) / (s - s0))
    return (R - R.sum(dim, keepdim=True) * slope * secant).to(R.dtype)


def _exponentials(op: Op) -> tuple[int, Tensor, Tensor, Tensor]:
    x, x0 = precise(op.inputs[0]), precise(_reference(op).inputs[0])
    dim = op.argument("dim", -1)
    # A masked score is -inf in both passes: no difference, no multiplier.
    shift = torch.maximum(x, x0).amax(dim, keepdim=True)
    e, e0 = (x - shift).exp(), (x0 - shift).exp()
    dx = x - x0
    secant = torch.where(dx.abs() < SMALL, ((x + x0) / 2 - shift).exp(), (e - e0) / dx)
    return dim, e, e0, torch.where(dx.isnan(), 0, secant)
