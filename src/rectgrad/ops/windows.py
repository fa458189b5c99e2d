"""Index arithmetic of sliding windows, one dimension at a time: pure functions on integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Region = tuple[tuple[int, int], ...]  # [first, last) of each dimension of a map


def per_dim(value: Any, dims: int) -> tuple[int, ...]:
    """An int or a sequence, as torch's functions accept it, as one int per dimension."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return tuple(int(v) for v in (values * dims if len(values) == 1 else values))


def pooling_windows(argument: Callable[..., Any], dims: int) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation of a pooling, from its arguments by name and their defaults."""
    kernel = per_dim(argument("kernel_size"), dims)
    stride = per_dim(argument("stride") or kernel, dims)
    return kernel, stride, per_dim(argument("padding", 0), dims), per_dim(argument("dilation", 1), dims)


def clear_of_padding(
    length: int, outputs: int, kernel: int, stride: int, dilation: int, left: int
) -> tuple[int, int]:
    """Output positions [first, last) whose window stays within the unpadded `length`.

    Output o reads positions o * stride - left + t * dilation, t = 0 .. kernel - 1.
    """
    first = -(-left // stride)
    last = (length - 1 + left - (kernel - 1) * dilation) // stride + 1
    return min(max(first, 0), outputs), max(min(last, outputs), 0)


def taps(
    device: torch.device, length: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """Positions (outputs, kernel) that each pooling window reads, and which of them are real."""
    first = torch.arange(outputs, device=device).unsqueeze(1) * stride - padding
    position = first + torch.arange(kernel, device=device) * dilation
    real = (position >= 0) & (position < length)
    return position.clamp(0, max(length - 1, 0)), real


def adaptive_taps(device: torch.device, length: int, outputs: int) -> tuple[Tensor, Tensor]:
    """The same for adaptive pooling: window o is floor(o L / n) .. ceil((o + 1) L / n)."""
    index = torch.arange(outputs, device=device)
    start, end = index * length // outputs, -(-(index + 1) * length // outputs)
    widest = max((-(-(i + 1) * length // outputs) - i * length // outputs for i in range(outputs)), default=0)
    position = start.unsqueeze(1) + torch.arange(widest, device=device)
    return position.clamp(max=max(length - 1, 0)), position < end.unsqueeze(1)
