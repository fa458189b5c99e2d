"""Arithmetic of pooling windows: sums over each, and gradient that is shared inside each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Windows = Sequence[tuple[Tensor, Tensor]]  # for each dimension, the positions read and which of them are real
TINY = 1e-10


def proportional(x: Tensor, R: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """R shared in proportion to x inside each window, 0 where a window's sum is negative; and those sums."""
    wide = torch.float32 if x.element_size() < 4 else x.dtype
    total = window_sum(x.to(wide), windows)
    count = window_sum(torch.ones_like(x, dtype=wide), windows)
    share = torch.where(total < 0, 0, R.to(wide) / (total + count * TINY))
    with torch.enable_grad():
        leaf = torch.zeros_like(x, dtype=wide).requires_grad_()
        spread = torch.autograd.grad(window_sum(leaf, windows), leaf, share)[0]
    return (x.to(wide) * spread).to(x.dtype), total


def window_sum(x: Tensor, windows: Windows) -> Tensor:
    """The sum over each window's real elements."""
    dims = len(windows)
    for d, (position, real) in enumerate(windows):
        picked = x.movedim(d - dims, -1)[..., position]
        x = torch.where(real, picked, 0).sum(-1).movedim(-1, d - dims)
    return x
