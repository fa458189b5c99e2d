"""Occlusion and RISE: one sample, one window or mask, one position after the other."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

Maps = tuple[Tensor, ...]
Score = Callable[[Maps], float]  # of a batch of one sample


def sides_of(x: Tensor) -> tuple[int, ...]:
    """Of one sample, (1, C, d1, ..., dk) or (1, d1)."""
    return tuple(x.shape[2:] if x.dim() > 2 else x.shape[1:])


def with_one(sample: Maps, k: int, value: Tensor) -> Maps:
    return (*sample[:k], value, *sample[k + 1 :])


def spread(values: dict[tuple[int, ...], float], x: Tensor) -> Tensor:
    """One value for each position, divided by the number of channels in each channel."""
    found = torch.zeros_like(x)
    for at, value in values.items():
        found[(..., *at)] = value / (x.shape[1] if x.dim() > 2 else 1)
    return found


def occlusion(
    score: Score,
    sample: Maps,
    window: int | None = None,
    stride: int | None = None,
    baseline: float | Tensor = 0.0,
) -> Maps:
    """The mean, over the windows that cover a position, of score(x) - score(x with the window replaced)."""
    maps = []
    for k, x in enumerate(sample):
        falls: dict[tuple[int, ...], list[float]] = {at: [] for at in product(*map(range, sides_of(x)))}
        for positions in windows_over(sides_of(x), window, stride):
            hidden = x.clone()
            for at in positions:
                hidden[(..., *at)] = (torch.zeros_like(x) + baseline)[(..., *at)]
            fall = score(sample) - score(with_one(sample, k, hidden))
            for at in positions:
                falls[at].append(fall)
        maps.append(spread({at: sum(own) / len(own) for at, own in falls.items()}, x))
    return tuple(maps)


def windows_over(sides: tuple[int, ...], window: int | None, stride: int | None) -> Iterator[list]:
    """The positions in each window: it starts at multiples of the stride until it reaches the far end."""
    along = []
    for side in sides:
        length = min(max(1, side // 8) if window is None else window, side)
        step = max(1, length // 2) if stride is None else stride
        starts = [0]
        while starts[-1] + length < side:
            starts.append(starts[-1] + step)
        along.append([range(start, min(start + length, side)) for start in starts])
    return (list(product(*each)) for each in product(*along))


def rise(score: Score, x: Tensor, masks: list[Tensor], keep: float) -> Tensor:
    """sum over i of (s_i - mean of s) * m_i / (keep * masks), s_i = score(x * m_i)."""
    scores = [score((x * mask,)) for mask in masks]
    mean = sum(scores) / len(scores)
    values = {}
    for at in product(*map(range, sides_of(x))):
        total = sum((s - mean) * float(mask[at]) for s, mask in zip(scores, masks, strict=True))
        values[at] = total / (keep * len(masks))
    return spread(values, x)


def rise_mask(cells: Tensor, shift: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
    """A grid of cells, stretched linearly to one cell more than the input has, and cut out from `shift` on.

    The centre of pixel i of a side stretched from n cells to m pixels lies at (i + 1/2) n / m - 1/2.
    """
    mask = torch.zeros(sides, dtype=torch.float64)
    for at in product(*map(range, sides)):
        near = []
        for i, first, side, n in zip(at, shift, sides, cells.shape, strict=True):
            m = (n + 1) * math.ceil(side / n)
            centre = min(max((i + first + 0.5) * n / m - 0.5, 0), n - 1)
            low = math.floor(centre)
            near.append([(low, low + 1 - centre), (min(low + 1, n - 1), centre - low)])
        for corner in product(*near):
            cell = tuple(index for index, _ in corner)
            mask[at] += float(cells[cell]) * math.prod(weight for _, weight in corner)
    return mask
