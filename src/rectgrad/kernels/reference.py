"""Percentile selection: tau for each sample, the specification of it in a few lines, and dispatch to kernels
that give the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rectgrad import kernels


def percentile(score: Tensor, q: float, interpolation: str = "nearest") -> Tensor:
    """tau, the q-th percentile of each row of `score` (samples, units).

    nearest: with d units sorted from largest to smallest, the one at index round((d - 1) * (1 - q / 100));
    so tau is an element of the row. linear: numpy's linear percentile.
    """
    if interpolation == "linear":
        return _linear(score, q)
    return smallest(score, rank(score.shape[1], q))


def rank(d: int, q: float) -> int:
    """Which of d units, from the smallest and counted from 1, is the q-th percentile."""
    return d - round((d - 1) * (1 - q / 100))


def smallest(score: Tensor, k: int) -> Tensor:
    """The k-th smallest of each row, counted from 1. Exact for any number of units."""
    fast = kernels.smallest(score, k)
    return score.kthvalue(k, dim=1).values if fast is None else fast


def _linear(score: Tensor, q: float) -> Tensor:
    position = (score.shape[1] - 1) * (q / 100)
    below = math.floor(position)
    low = smallest(score, below + 1)
    if below == position:
        return low
    return torch.lerp(low, smallest(score, below + 2), position - below)
