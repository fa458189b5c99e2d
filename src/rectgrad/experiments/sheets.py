"""Sheets of images and their maps, for the figures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from rectgrad import image
from rectgrad.api import attribute
from rectgrad.experiments.maps import COMPARED, shown
from rectgrad.methods import Method
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import gini

CELL, LARGE = 112, 168  # height in pixels of images of the dataset and of photos


def methods(names: Sequence[str] = COMPARED) -> dict[str, Method]:
    """Methods by title, as in the paper's figures."""
    return {title_of(name): shown(name) for name in names}


def picture(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels)


def planes(module: nn.Module, x: Tensor, chosen: Mapping[str, Method]) -> dict[str, list[np.ndarray]]:
    """Maps of all images by method, summed over channels, for the top class."""
    x = x.to(next(module.parameters()).device)
    return {
        name: [image.plane(m) for m in attribute(module, x, method, batch_size=8)]
        for name, method in chosen.items()
    }


def rows(
    pictures: Sequence[Image.Image],
    maps: Mapping[str, Sequence[np.ndarray]],
    names: Sequence[str] = (),
    cut: bool = False,
) -> list[list[image.Panel]]:
    """One row per image: the image, then its maps with their Gini index. Only the first row has titles.

    `cut` applies the final threshold, which RectGrad does not use.
    """
    found = []
    for i, picture in enumerate(pictures):
        first = image.Panel(picture, names[i] if names else "", " ", smooth=picture.width > 64)
        found.append(
            [first, *(_panel(name if i == 0 else "", _cut(name, m[i], cut)) for name, m in maps.items())]
        )
    return found


def _cut(name: str, plane: np.ndarray, cut: bool) -> np.ndarray:
    return image.final_threshold(plane) if cut and not name.startswith("RectGrad") else plane


def _panel(title: str, plane: np.ndarray) -> image.Panel:
    return image.Panel(image.colour(plane, "signed"), title, f"Gini {sparsity(plane):.2f}")


def sparsity(plane: np.ndarray) -> float:
    return float(gini(torch.from_numpy(plane).unsqueeze(0))[0])
