"""The proportional redistribution rule (PRR): max pooling shares gradient instead of picking a winner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rectgrad.engine.op import Op, Rule
from rectgrad.ops.windows import adaptive_taps, pooling_windows, taps

TINY = 1e-10


def proportional_pooling() -> Rule:
    """R * x / (sum of the window + count * 1e-10) for each real element x of the window; windows add up.

    An all-zero window passes nothing. Where a window's sum is negative, the plain max-pool gradient.
    """

    def apply(op: Op, R: Tensor) -> Any:
        x = op.inputs[0]
        window_sum = windowed_sum(op)
        wide = torch.float32 if x.element_size() < 4 else x.dtype
        total = window_sum(x.to(wide))
        count = window_sum(torch.ones_like(x, dtype=wide))
        share = torch.where(total < 0, 0, R.to(wide) / (total + count * TINY))
        with torch.enable_grad():
            leaf = torch.zeros_like(x, dtype=wide).requires_grad_()
            spread = torch.autograd.grad(window_sum(leaf), leaf, share)[0]
        grad = (x.to(wide) * spread).to(x.dtype)
        if total.is_cuda or bool((total < 0).any()):  # to ask a GPU is to wait for it
            (plain,) = op.vjp(torch.where(total < 0, R, 0))
            grad = grad + plain
        return grad

    return Rule(apply, "proportional_pooling")


def windowed_sum(op: Op) -> Callable[[Tensor], Tensor]:
    """The sum over each pooling window's real elements, as a function of the pool's input."""
    dims = int(next(c for c in op.name if c.isdigit()))
    device, lengths = op.inputs[0].device, (op.inputs[0].shape[-dims:], op.output.shape[-dims:])
    if op.name.startswith("adaptive"):
        plan = [adaptive_taps(device, *sizes) for sizes in zip(*lengths, strict=True)]
    else:
        windows = zip(*lengths, *pooling_windows(op.argument, dims), strict=True)
        plan = [taps(device, *sizes) for sizes in windows]

    def window_sum(x: Tensor) -> Tensor:
        for d, (position, real) in enumerate(plan):
            picked = x.movedim(d - dims, -1)[..., position]
            x = torch.where(real, picked, 0).sum(-1).movedim(-1, d - dims)
        return x

    return window_sum
