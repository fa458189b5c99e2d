"""Exact selection with numpy: for a CPU without the native kernels.

A sample of the scores gives a bound slightly below tau; only the scores above it are partitioned. numpy's
partition of a whole row would be many times slower: half of the scores are zero. Operations on whole layers
are torch's, which uses threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectgrad.kernels.reference import Reference

SAMPLE = 2048


_TYPES = (torch.float32, torch.float64)


class Portable(Reference):
    """The backend for a CPU without a C compiler."""

    name = "portable"

    def smallest(self, score: Tensor, k: int) -> Tensor:
        usual = score.dtype in _TYPES and score.numel() > 0
        return smallest(score, k) if usual else super().smallest(score, k)

    def rectify(
        self,
        a: Tensor,
        R: Tensor,
        rows: int,
        k: int | None,
        tau: float | None,
        rule: str,
        sums: list,
    ) -> Any:
        usual = rule == "PR1" and a.is_contiguous() and a.dtype in _TYPES and a.dtype is R.dtype
        if k is None or not usual:
            return super().rectify(a, R, rows, k, tau, rule, sums)
        sums.append(R.sum())
        return rectify(a, R, rows, k)


def rectify(a: Tensor, R: Tensor, rows: int, k: int) -> Tensor:
    """R where a * R exceeds the row's k-th smallest, 0 elsewhere."""
    score, R = torch.mul(a, R).reshape(rows, -1), R.resolve_neg().reshape(rows, -1)
    out = torch.empty_like(score)
    with np.errstate(all="ignore"):  # values that are not finite are reported elsewhere
        for row, gradient, passed in zip(score, R, out, strict=True):
            tau = _largest(row.numpy(), row.numel() - k)
            _pass_above(gradient, row, tau, grad_input=passed)
    return out.reshape(a.shape)


# R where the other tensor exceeds a number: torch calls it the gradient of a threshold.
_pass_above = torch.ops.aten.threshold_backward.grad_input


def smallest(score: Tensor, k: int) -> Tensor:
    """The k-th smallest of each row, counted from 1."""
    rows = score.detach().contiguous().resolve_neg().numpy()
    return torch.from_numpy(np.array([_largest(row, row.size - k) for row in rows], dtype=rows.dtype))


def _largest(row: np.ndarray, rank: int) -> float:
    """The element at index `rank` from the largest."""
    bound = _bound(row, rank)
    above = _at_least(row, bound) if bound > 0 else _where(row, row > 0)
    if bound > 0 and len(above) <= rank:
        above = _where(row, row > 0)
    if len(above) > rank:
        return _at(above, rank)
    zeros = int(np.count_nonzero(row == 0))
    if len(above) + zeros > rank:
        return 0.0
    rest = np.concatenate([_where(row, row < 0), row[np.isnan(row)]])
    return _at(rest, rank - len(above) - zeros)


def _at(values: np.ndarray, rank: int) -> float:
    index = len(values) - 1 - rank
    return float(np.partition(values, index)[index])


def _where(row: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return row[np.flatnonzero(mask)]  # faster than the mask itself if few entries are True


def _at_least(row: np.ndarray, bound: float) -> np.ndarray:
    """The few elements of a row that are at least `bound`: eight at a time, most of which have none."""
    whole = row.size // 8 * 8
    eights = np.flatnonzero((row[:whole] >= bound).view(np.uint64) != 0)
    some = np.concatenate([row[:whole].reshape(-1, 8).take(eights, 0).reshape(-1), row[whole:]])
    return _where(some, some >= bound)


def _bound(row: np.ndarray, rank: int) -> float:
    """A number that tau very probably exceeds; 0 if no positive number is one."""
    if row.size < 8 * SAMPLE:
        return 0.0
    step = row.size / SAMPLE
    sample = row[(np.arange(SAMPLE) * step + _JITTER * step).astype(np.int64)]
    expected = rank / step
    index = int(expected + 4 * math.sqrt(expected) + 8)
    return _at(sample, index) if index < SAMPLE else 0.0


_JITTER = np.random.default_rng(0).random(SAMPLE)  # a fixed step would sample a single column of the image
