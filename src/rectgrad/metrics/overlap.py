"""Specificity: how much a map depends on its class rather than on the photo alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rectgrad.metrics.checks import images, of_known, same_shape

SHARE = 0.05  # of the positions


def specificity(maps: Tensor, others: Tensor, share: float = SHARE) -> Tensor:
    """1 - |top_k(map) and top_k(other)| / k, (N,), for maps of a class and maps of another class.

    Positions are ranked by m = |sum over channels|, ties by position. k is `share` of the positions, or the
    number of non-zero ones in either map if that is smaller. `others` are the maps for the class with the
    smallest output: 0 if both mark the same positions, so that the map does not depend on the class. NaN for
    a zero map; 1 where only the other map is zero.
    """
    same_shape("specificity", maps, others)
    if not 0 < share <= 1:
        raise ValueError(f"specificity(share={share}): needs a share of the positions, above 0 and at most 1")
    m, n = (images("specificity", each).sum(1).abs().flatten(1) for each in (maps, others))
    marked, marked_other = m.count_nonzero(1), n.count_nonzero(1)
    k = torch.minimum(marked, marked_other).clamp(1, max(round(share * m.shape[1]), 1))
    shared = (_top(m, k) & _top(n, k)).sum(1).to(m.dtype)
    value = torch.where(marked_other == 0, 1, 1 - shared / k)
    return of_known(others, of_known(maps, torch.where(marked == 0, torch.nan, value)))


def unrelated(measure: Callable[[Tensor, Tensor], Tensor], maps: Tensor, pairs: int = 5) -> Tensor:
    """The mean of `measure`, (N,), between each map and the maps of `pairs` other photos of the batch.

    For similarities this is the floor, the value for maps that share only the method; for `specificity`, it
    is the value to expect of maps that share no evidence at all. Undefined values (NaN) are left out.
    """
    if len(maps) < 2:
        raise ValueError(f"unrelated(maps of {len(maps)} photos): needs 2 or more")
    shifts = range(1, min(pairs, len(maps) - 1) + 1)
    return torch.stack([measure(maps, maps.roll(shift, 0)) for shift in shifts]).nanmean(0)


def _top(m: Tensor, k: Tensor) -> Tensor:
    """A mask of the k largest positions of each row; ties are broken by position."""
    least = m.topk(int(k.max()) if len(k) else 1, dim=1).values.gather(1, k[:, None] - 1)
    above, equal = m > least, m == least
    return above | (equal & (equal.cumsum(1) <= k[:, None] - above.sum(1, keepdim=True)))
