"""Arithmetic of DeepLIFT's Rescale rule: multipliers from the values of two passes, x and x0, y and y0.

Each is exact: the multiplier times the difference of the inputs is the difference of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rectgrad.kernels.reference import precise

FAR = 1e4  # a ratio of denominators from which on they are of another order of magnitude
SMALL = 1e-6  # below this a difference is no divisor: the derivative at the midpoint instead

# (f(x) - f(x0)) / (x - x0) where it has a form without differences: there is nothing to cancel.
SECANTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "square": lambda x, x0, y, y0: x + x0,
    "reciprocal": lambda x, x0, y, y0: -y * y0,
    **dict.fromkeys("rdiv div divide true_divide".split(), lambda x, x0, y, y0: -y / x0),  # of a constant
    "rsqrt": lambda x, x0, y, y0: -((y * y0) ** 2) / (y + y0),
    "sqrt": lambda x, x0, y, y0: torch.where(y + y0 > 0, 1 / (y + y0), 0),
}


def larger_of_two(
    sign: int, R: Tensor, x: Tensor, y: Tensor, x0: Tensor, y0: Tensor
) -> tuple[Tensor, Tensor]:
    """max(x, y) = y + relu(x - y), and min(x, y) = y - relu(y - x) with sign -1."""
    d, d0 = sign * (x - y), sign * (x0 - y0)
    near = (d + d0 > 0).to(d.dtype)
    m = torch.where((d - d0).abs() < SMALL, near, (d.relu() - d0.relu()) / (d - d0))
    return (R * m).sum_to_size(x.shape), (R * (1 - m)).sum_to_size(y.shape)


def quotient(R: Tensor, x: Tensor, y: Tensor, x0: Tensor, y0: Tensor) -> tuple[Tensor, Tensor]:
    """x / y as x * (1 / y): with q = x / y, dq = w (dx - q0 dy) / y + (1 - w) (dx - q dy) / y0 for any w.

    w = 1/2, as for a product; but 1 or 0, whichever divides by the larger, if the denominators differ by
    more than four orders of magnitude (a vector normalised against a zero baseline): half each would cancel.
    """
    larger, smaller = y.abs() > FAR * y0.abs(), y0.abs() > FAR * y.abs()
    w = torch.where(larger, 1.0, torch.where(smaller, 0.0, 0.5)).to(R.dtype)
    grad_x = R * (w / y + (1 - w) / y0)
    grad_y = -R * (w * (x0 / y0) / y + (1 - w) * (x / y) / y0)
    return grad_x.sum_to_size(x.shape), grad_y.sum_to_size(y.shape)


def softmax(R: Tensor, x: Tensor, x0: Tensor, dim: int) -> Tensor:
    """Softmax in steps: e = exp(x - c), r = 1 / sum(e), p = e * r, with one shift c for x and x0."""
    e, e0, secant = _exponentials(x, x0, dim)
    r, r0 = 1 / e.sum(dim, keepdim=True), 1 / e0.sum(dim, keepdim=True)
    to_r = (R * (e + e0) / 2).sum(dim, keepdim=True)
    return ((R * (r + r0) / 2 - to_r * r * r0) * secant).to(R.dtype)


def log_softmax(R: Tensor, x: Tensor, x0: Tensor, dim: int) -> Tensor:
    """log p = x - c - log(sum(e))."""
    e, e0, secant = _exponentials(x, x0, dim)
    s, s0 = e.sum(dim, keepdim=True), e0.sum(dim, keepdim=True)
    slope = torch.where((s - s0).abs() < SMALL, 2 / (s + s0), (s.log() - s0.log()) / (s - s0))
    return (R - R.sum(dim, keepdim=True) * slope * secant).to(R.dtype)


def _exponentials(x: Tensor, x0: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    x, x0 = precise(x), precise(x0)  # differences of nearly equal numbers lose digits
    # A masked score is -inf in both passes: no difference, no multiplier.
    shift = torch.maximum(x, x0).amax(dim, keepdim=True)
    e, e0 = (x - shift).exp(), (x0 - shift).exp()
    dx = x - x0
    secant = torch.where(dx.abs() < SMALL, ((x + x0) / 2 - shift).exp(), (e - e0) / dx)
    return e, e0, torch.where(dx.isnan(), 0, secant)
