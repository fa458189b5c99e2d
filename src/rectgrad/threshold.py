"""Percentile selection: tau for each sample, and the specification of it in a few lines."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def percentile(score: Tensor, q: float, interpolation: str = "nearest") -> Tensor:
    """tau, the q-th percentile of each row of `score` (samples, units).

    nearest: with d units sorted from largest to smallest, the one at index round((d - 1) * (1 - q / 100));
    so tau is an element of the row. linear: numpy's linear percentile.
    """
    if interpolation == "linear":
        return _linear(score, q)
    d = score.shape[1]
    return smallest(score, d - round((d - 1) * (1 - q / 100)))


def smallest(score: Tensor, k: int) -> Tensor:
    """The k-th smallest of each row, counted from 1. Exact for any number of units."""
    return score.kthvalue(k, dim=1).values


def _linear(score: Tensor, q: float) -> Tensor:
    position = (score.shape[1] - 1) * (q / 100)
    below = math.floor(position)
    low = smallest(score, below + 1)
    if below == position:
        return low
    return torch.lerp(low, smallest(score, below + 2), position - below)
