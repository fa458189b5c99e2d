"""The proportional redistribution rule (PRR): max pooling distributes the gradient among its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectgrad.engine.op import Op, Rule
from rectgrad.kernels.pooling_ops import proportional
from rectgrad.ops.windows import adaptive_taps, pooling_windows, taps


def proportional_pooling() -> Rule:
    """R * x / (sum of the window + count * 1e-10) for each real element x of the window; windows add up.

    An all-zero window passes nothing. Where a window's sum is negative, the plain max-pool gradient.
    """

    def apply(op: Op, R: Tensor) -> Any:
        grad, total = proportional(op.inputs[0], R, _windows(op))
        if total.is_cuda or bool((total < 0).any()):  # reading from a GPU would synchronise
            (plain,) = op.vjp(torch.where(total < 0, R, 0))
            grad = grad + plain
        return grad

    return Rule(apply, "proportional_pooling")


def _windows(op: Op) -> list[tuple[Tensor, Tensor]]:
    """For each dimension, the positions that every window reads and which of them are real."""
    dims = int(next(c for c in op.name if c.isdigit()))
    device, lengths = op.inputs[0].device, (op.inputs[0].shape[-dims:], op.output.shape[-dims:])
    if op.name.startswith("adaptive"):
        return [adaptive_taps(device, *sizes) for sizes in zip(*lengths, strict=True)]
    windows = zip(*lengths, *pooling_windows(op.argument, dims), strict=True)
    return [taps(device, *sizes) for sizes in windows]
