"""The grid pointing game (Böhle et al. 2021; Rao et al. 2022): photos in a grid, one class asked for.

The evidence for a class is in the cell with its photo, so the truth is known without masks. Cells are
numbered in reading order.

Protocol A: each cell has the network's full input size, and the composite is n times larger, for fully
convolutional networks; with photos that the network classifies correctly with a probability above 0.9.
Protocol B (`fit=True`), for any network: cells are resized to fit the ordinary input, and only composites in
which every class asked for has a probability above 0.02 are kept (`recognised`).

Controls: a map without information scores 1 / cells by chance; `controls.centre` shows what a bias towards
the centre scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.metrics.checks import images, ratio

Shape = tuple[int, int]  # rows and columns of cells
LEAST = 0.02  # probability of a class that is recognised
TOGETHER = 20  # composites that are tried at a time, at least


class Usable(NamedTuple):
    """The photos of composites, (count, cells), and how many composites were tried to find them."""

    photos: Tensor
    tried: int


def grid_photos(classes: Tensor | Sequence[int], shape: Shape, count: int, seed: int = 0) -> Tensor:
    """The photos of `count` random composites, (count, cells): indices of photos with distinct classes."""
    known, cells = _enough("grid_photos", classes, shape), shape[0] * shape[1]
    return _drawn(known, cells, count, torch.Generator("cpu").manual_seed(seed))


def usable_photos(
    classes: Tensor | Sequence[int],
    shape: Shape,
    count: int,
    tries: int,
    usable: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> Usable:
    """The first `count` usable composites of random photos with distinct classes; fewer after `tries`.

    Composite i asks for the class in cell i % cells. Each photo is asked for once: to ask for it again is no
    further evidence.

    usable: a function from photos, (n, cells), to booleans, (n, cells): whether the class in each cell may be
    asked for. Default: every one.
    """
    known, cells = _enough("usable_photos", classes, shape), shape[0] * shape[1]
    count, random = min(count, len(known)), torch.Generator("cpu").manual_seed(seed)
    kept: dict[int, list[int]] = {}  # by the photo that is asked for
    tried = 0
    while len(kept) < count and tried < tries:
        part = _drawn(known, cells, min(max(count, TOGETHER), tries - tried), random)
        able = torch.ones_like(part, dtype=torch.bool) if usable is None else usable(part)
        for photos, may in zip(part.tolist(), able.tolist(), strict=True):
            if len(kept) == count:
                break
            cell, tried = len(kept) % cells, tried + 1
            if may[cell]:
                kept.setdefault(photos[cell], photos)
    return Usable(torch.tensor([*kept.values()], dtype=torch.long).reshape(-1, cells), tried)


def composites(photos: Tensor, index: Tensor, shape: Shape, fit: bool = False) -> Tensor:
    """Composites, (count, C, n H, m W), of photos (N, C, H, W) and the result of `grid_photos`.

    fit: shrink the cells so that the composite has the size of a photo, (count, C, H, W), with antialiasing.
    """
    (rows, columns), (height, width) = shape, photos.shape[-2:]
    tall, wide = _edges(height, rows), _edges(width, columns)
    lines = []
    for i in range(rows):
        cells = [photos[index[:, i * columns + j].to(photos.device)] for j in range(columns)]
        if fit:
            sizes = [(tall[i + 1] - tall[i], wide[j + 1] - wide[j]) for j in range(columns)]
            cells = [_resized(cell, size) for cell, size in zip(cells, sizes, strict=True)]
        lines.append(torch.cat(cells, -1))
    return torch.cat(lines, -2)


def recognised(outputs: Tensor, classes: Tensor, least: float = LEAST) -> Tensor:
    """(count,), True where every class of a composite, (count, cells), has a probability above `least`.

    outputs: (count, classes) of the network for the composites, before the softmax.
    """
    return recognised_cells(outputs, classes, least).all(1)


def recognised_cells(outputs: Tensor, classes: Tensor, least: float = LEAST) -> Tensor:
    """(count, cells), True where the class of a cell has a probability above `least`."""
    return outputs.softmax(1).gather(1, classes.to(outputs.device)) > least


def grid_pointing(maps: Tensor, shape: Shape, cell: int | Sequence[int] | Tensor) -> Tensor:
    """Share, (count,), of the positive part of the channel-summed map that is in the cell of its class.

    cell: the cell that is asked for, one for all composites or one each. A map that is zero or negative
    everywhere scores 0.
    """
    positive = images("grid_pointing", maps).sum(1).clamp(min=0)
    rows, columns = shape
    tall, wide = _edges(positive.shape[-2], rows), _edges(positive.shape[-1], columns)
    sums = [
        positive[:, tall[i] : tall[i + 1], wide[j] : wide[j + 1]].sum((1, 2))
        for i in range(rows)
        for j in range(columns)
    ]
    shares = ratio(torch.stack(sums, 1), positive.sum((1, 2))[:, None])
    asked = torch.as_tensor(cell, device=maps.device).long().expand(len(maps))
    if bool((asked < 0).any()) or bool((asked >= rows * columns).any()):
        raise ValueError(
            f"grid_pointing(shape={shape}, cell={cell}): needs cells from 0 to {rows * columns - 1}"
        )
    return shares.gather(1, asked[:, None])[:, 0]


def _enough(call: str, classes: Tensor | Sequence[int], shape: Shape) -> list[int]:
    """The class of each photo."""
    known, cells = torch.as_tensor(classes).tolist(), shape[0] * shape[1]
    if len(set(known)) < cells:
        given = f"{call}(photos of {len(set(known))} classes, shape={shape})"
        raise ValueError(f"{given}: needs photos of at least {cells} classes")
    return known


def _drawn(classes: list[int], cells: int, count: int, random: torch.Generator) -> Tensor:
    """(count, cells): random photos with distinct classes."""
    orders = (torch.randperm(len(classes), generator=random).tolist() for _ in range(count))
    rows = [_distinct(classes, order, cells) for order in orders]
    return torch.tensor(rows, dtype=torch.long).reshape(count, cells)


def _distinct(classes: Sequence[int], order: Sequence[int], cells: int) -> list[int]:
    """The first photos in the given order that have different classes."""
    found: dict[int, int] = {}
    for i in order:
        found.setdefault(classes[i], i)
        if len(found) == cells:
            break
    return list(found.values())


def _edges(size: int, parts: int) -> list[int]:
    """Where each part begins, and the end: parts differ by one pixel where the size is no multiple."""
    if not 1 <= parts <= size:
        raise ValueError(f"{parts} cells in {size} pixels: needs at least one pixel for each cell")
    return [round(i * size / parts) for i in range(parts + 1)]


def _resized(cell: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(cell, size, mode="bilinear", align_corners=False, antialias=True)
