"""The specification in plain torch: the percentile, the scores, and the rectified rule.

Every other backend is tested against this one, bit for bit where units are selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rectgrad import kernels

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PR1": lambda a, R: a * R,
    "PR2": lambda a, R: (a * R).abs(),
    "PR3": lambda a, R: a,
    "PR4": lambda a, R: R,
}


def wide(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.float() if x.element_size() < 4 else x


def precise(x: Tensor) -> Tensor:
    """x in float64, if the device supports it."""
    return x if x.device.type == "mps" else x.double()


def per_sample(x: Tensor) -> Tensor:
    """x with one row for each sample."""
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def rank(d: int, q: float) -> int:
    """The rank of the q-th percentile among d units, from the smallest, counted from 1."""
    return d - round((d - 1) * (1 - q / 100))


def percentile(score: Tensor, q: float, interpolation: str = "nearest") -> Tensor:
    """tau, the q-th percentile of each row of `score` (samples, units).

    nearest: with d units sorted from largest to smallest, the one at index round((d - 1) * (1 - q / 100));
    so tau is an element of the row. linear: numpy's linear percentile.
    """
    if interpolation == "linear":
        return _linear(score, q)
    return smallest(score, rank(score.shape[1], q))


def smallest(score: Tensor, k: int) -> Tensor:
    """The k-th smallest of each row, counted from 1. Exact for any number of units."""
    return kernels.backend_of(score).smallest(score, k)


def _linear(score: Tensor, q: float) -> Tensor:
    position = (score.shape[1] - 1) * (q / 100)
    below = math.floor(position)
    low = smallest(score, below + 1)
    if below == position:
        return low
    return torch.lerp(low, smallest(score, below + 2), position - below)


class Reference:
    """The backend for every device and type."""

    name = "reference"

    def smallest(self, score: Tensor, k: int) -> Tensor:
        return score.kthvalue(k, dim=1).values

    def rectify(
        self,
        a: Tensor,
        R: Tensor,
        rows: int,
        k: int | None,
        tau: float | None,
        rule: str,
        sums: list,
    ) -> Tensor:
        """R where its score exceeds tau, strictly, else 0.

        tau is the k-th smallest score of each of `rows` rows, or the constant given if k is None. `sums` gets
        a number that is not finite if R is not.
        """
        sums.append(R.sum(dtype=torch.float32 if R.element_size() < 4 else None))
        score = SCORES[rule](wide(a), wide(R))
        if k is None:
            assert tau is not None
            return torch.where(score > tau, R, 0)
        each = score.reshape(rows, -1)
        passes = each > self.smallest(each, k).unsqueeze(1)
        return torch.where(passes.reshape(score.shape), R, 0)


def passes(s: Tensor, q: float, interpolation: str) -> bool:
    """Whether one of the scores exceeds their q-th percentile."""
    return bool(percentile(s.unsqueeze(0), q, interpolation) < s.max())


def largest_q(s: Tensor, interpolation: str) -> float:
    """The largest q, to two decimals, at which tau lies below the largest score."""
    d, ties = len(s), int((s == s.max()).sum())
    above = ties - 0.5 if interpolation == "nearest" else ties - 1
    hundredths = min(math.floor(10_000 * (1 - above / (d - 1))) + 1, 10_000)
    while not passes(s, hundredths / 100, interpolation):
        hundredths -= 1
    return hundredths / 100


def advice(s: Tensor, q: float, tau: float | None, interpolation: str) -> str | None:
    """Why no unit with these scores passes, and what to change; None if one does."""
    if tau is not None:
        stopped = bool(0 < s.max() <= tau)
        return f"above tau={tau:g}; its largest score is {float(s.max()):.4g}" if stopped else None
    if passes(s, q, interpolation) or not bool(s.max() > 0):
        return None
    if bool((s < s.max()).any()):
        return f"at q={q:g}; the largest q that passes one unit is {largest_q(s, interpolation):.2f}"
    return f"at q={q:g}; all its scores are equal, so no percentile passes one; a constant tau can"
