"""Arithmetic of relevance: values that may be divided by, and shares of a sum with a stabiliser."""

from __future__ import annotations

import torch
from torch import Tensor


def safe(x: Tensor) -> Tensor:
    """x, or a very small number of its sign where x is nearly 0. Relevance / safe(x) is finite, and times
    safe(x) it is the relevance again, also where x is 0."""
    smallest = torch.finfo(x.dtype).tiny ** 0.5
    return torch.where(x.abs() < smallest, torch.full_like(x, smallest).copysign(x), x)


def per_unit(R: Tensor, z: Tensor, epsilon: float) -> Tensor:
    """R / (z + epsilon * sign(z)): what each unit of a sum z gets of R. 0 where z is 0 and has no units."""
    return torch.where(z == 0, 0, R / z.sign().mul_(epsilon).add_(z))


def withheld(R: Tensor, z: Tensor, epsilon: float) -> Tensor:
    """What the stabiliser keeps of R: R * epsilon / (|z| + epsilon); all of it where z is 0."""
    return torch.where(z == 0, R, R * epsilon / (z.abs() + epsilon))


def stabilised(z: Tensor, epsilon: float) -> Tensor:
    """z / (z + epsilon * sign(z)); 0 where z is 0, whose relevance is 0 too, and 1 where it is infinite, as
    masked scores are."""
    size = z.abs().clamp_(max=torch.finfo(z.dtype).max)
    return torch.where(size > 0, size / (size + epsilon), 0)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x * y; 0 where x is 0, although y may be infinite there."""
    return torch.where(x == 0, 0, x * y)
