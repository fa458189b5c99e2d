"""Class activation maps, from an activation a and the gradient R of the score there, both (N, C, d1..dk).

Sums over channels c and positions p:

    gradcam     relu(sum_c a * mean_p R)                                     Selvaraju et al. 2017
    hirescam    relu(sum_c a * R)                                            Draelos and Carin 2020
    layercam    relu(sum_c a * relu(R))                                      Jiang et al. 2021
    gradcam++   relu(sum_c a * sum_p relu(R) R^2 / (2 R^2 + R^3 sum_p a))    Chattopadhay et al. 2018

Grad-CAM++ explains exp(score). The factor exp(score) of its weights only scales a map and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.kernels.positions import Image
from rectgrad.kernels.reference import wide

_Terms = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
VARIANTS: dict[str, _Terms] = {
    "gradcam": lambda a, R, p: a * R.mean(p, keepdim=True),
    "hirescam": lambda a, R, p: a * R,
    "layercam": lambda a, R, p: a * R.clamp(min=0),
    "gradcam++": lambda a, R, p: a * (R.clamp(min=0) / (2 + R * a.sum(p, True))).sum(p, True),  # over R^2
}
SILENT = "nothing in the input speaks for the class"  # where the class map is 0 everywhere
_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


def class_map(a: Tensor, R: Tensor, variant: str) -> Tensor:
    """(N, 1, d1..dk), in float32 at least."""
    terms = VARIANTS[variant](wide(a), wide(R), tuple(range(2, a.dim())))
    return terms.sum(1, keepdim=True).clamp(min=0)


def resized(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Resizes x, (N, C, d1..dk)."""
    return F.interpolate(x, tuple(sizes), mode=_MODES[x.dim()], align_corners=False)


def placed(cam: Tensor, rows: Tensor, maps: Tensor) -> Tensor:
    """`maps`, (N, C, ...), with the class map of some rows: a position's value is the sum over channels.
    Maps without such positions do not change."""
    if maps.dim() != cam.dim():
        return maps
    values = (resized(cam, maps.shape[2:]) / maps.shape[1]).to(maps)
    return torch.where(rows.to(maps.device).reshape(-1, *(1,) * (maps.dim() - 1)), values, maps)


def largest_one(cam: Tensor) -> Tensor:
    """Each sample's class map divided by its largest value, if that is not 0."""
    largest = cam.amax(tuple(range(1, cam.dim())), keepdim=True)
    return cam / largest.masked_fill(largest == 0, 1)


class Gate:
    """Class maps of some rows each, (rows, cam), scaled to a maximum of 1, for tensors of any size."""

    def __init__(self, cams: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._cams = [(rows, largest_one(cam)) for rows, cam in cams]
        self._known: dict[Any, Tensor | None] = {}

    def at(self, image: Image | None, shape: tuple[int, ...]) -> Tensor | None:
        """One value for each position of a tensor of this shape, in a shape that broadcasts; 1 where it has
        none, as class tokens. None if it has no positions of as many dimensions."""
        if image is None or not self._cams:
            return None
        sizes = (*shape[:-1], 1) if image.channels_last else (shape[0], 1, *shape[2:])
        if (image, sizes) not in self._known:
            self._known[image, sizes] = self._resized(image, self._cams[0][1].new_ones(sizes))
        return self._known[image, sizes]

    def silent(self, row: int) -> bool:
        """Whether a row's class map is 0 everywhere."""
        return not any(bool(rows[row]) and bool(cam[row].any()) for rows, cam in self._cams)

    def _resized(self, image: Image, g: Tensor) -> Tensor | None:
        seen = image(g)
        if any(cam.dim() != seen.dim() for _, cam in self._cams):
            return None
        seen.zero_()
        for rows, cam in self._cams:
            chosen = rows.to(g.device).reshape(-1, *(1,) * (seen.dim() - 1))
            seen.copy_(torch.where(chosen, resized(cam, seen.shape[2:]), seen))
        return g


def unknown_gate(_: object) -> Tensor:
    """A placeholder for the gate in rules that do not belong to a particular pass."""
    raise ValueError("gate='class' differs from pass to pass: use rectgrad.attribute, not its rules alone")
