"""The composites of the grid pointing game: grids of photos in which the network recognises every class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rectgrad.metrics import grid

if TYPE_CHECKING:
    from rectgrad.verdict.case import Case

SHAPES = ((2, 2), (1, 2))  # the first for which there are enough composites
TRIES = 50  # composites that are tried for each one that is wanted
FEW = 50  # with fewer composites, only large differences are significant: other kinds are tried
SURE = 0.9  # probability of the photos in composites of full size


class Grid(NamedTuple):
    """Composites, and how many were tried to find them.

    fit: cells are resized to fit the ordinary input (protocol B); else each has its full size (protocol A).
    """

    photos: Tensor  # (count, cells), by number
    shape: grid.Shape
    tried: int
    fit: bool = True


def grid_of(case: Case) -> Grid | None:
    """The first kind of composites of which there are enough; else the one with the most."""
    found: list[Grid] = []
    for each in _kinds(case):
        found.append(each)
        if len(each.photos) >= min(FEW, case.preset.composites):
            break
    return max(found, key=lambda each: len(each.photos), default=None)


def no_grid(case: Case) -> str:
    """The reason why there are fewer than two composites; empty if there are more."""
    if case.inputs.ndim != 4:
        return f"grids need photos (C, H, W), not {tuple(case.inputs.shape[1:])}"
    if len(case.outputs.argmax(1).unique()) < 2:
        return "the network's top class is the same for all photos"
    if case.grid is None:
        return "photos of {} x {} pixels are too small for grids".format(*case.inputs.shape[-2:])
    if (kept := len(case.grid.photos)) > 1:
        return ""
    return f"the network recognises every class in {kept} of {case.grid.tried} grids that were tried"


def _kinds(case: Case) -> Iterator[Grid]:
    if case.preset.full_size and (full := _full_size(case)) is not None:
        yield full
    for shape in SHAPES:
        fits = shape[0] <= case.inputs.shape[-2] and shape[1] <= case.inputs.shape[-1]
        if fits and len(case.outputs.argmax(1).unique()) >= shape[0] * shape[1]:
            yield _recognised(case, shape)


def _full_size(case: Case) -> Grid | None:
    """Composites of photos with a probability above 0.9; None if the network takes no larger inputs."""
    sure = torch.nonzero(case.outputs.softmax(1).amax(1) > SURE)[:, 0]
    classes, shape = case.outputs.argmax(1)[sure], SHAPES[0]
    if len(classes.unique()) < 4:
        return None
    index, tried = grid.usable_photos(classes, shape, *_wanted(case), seed=case.seed)
    photos = sure[index]
    try:
        outputs = case.evaluated(grid.composites(case.inputs, photos[:1], shape).to(case.device))
    except Exception:  # any error of a network that does not accept the size
        return None
    return Grid(photos, shape, tried, fit=False) if outputs.shape == case.outputs[:1].shape else None


def _recognised(case: Case, shape: grid.Shape) -> Grid:
    classes = case.outputs.argmax(1)

    def usable(photos: Tensor) -> Tensor:
        images = grid.composites(case.inputs, photos, shape, fit=True)
        found = grid.recognised(case.evaluated(images.to(case.device)), classes[photos])
        return found[:, None].expand(photos.shape)

    photos, tried = grid.usable_photos(classes, shape, *_wanted(case), usable, case.seed)
    return Grid(photos, shape, tried)


def _wanted(case: Case) -> tuple[int, int]:
    """How many composites are wanted, and how many are tried at most."""
    return case.preset.composites, TRIES * case.preset.composites
