"""Photos and the network that classifies them, for the experiments that show photos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from rectgrad import photos
from rectgrad.models import ImageModel, load
from rectgrad.photos import files

MODEL = "efficientnet_lite0"
PAPERS = "inception_v4"


class Gallery(NamedTuple):
    """Photos as the network sees them, and their predicted classes."""

    model: ImageModel
    names: list[str]
    crops: list[Image.Image]
    x: Tensor
    found: Tensor  # the predicted class of each photo

    def labels(self) -> list[str]:
        return [self.model.label(int(c)) for c in self.found]


def gallery(model: str, images: Path | None, device: str) -> tuple[Gallery, list[str]]:
    """The user's photos, or those from scikit-image, and an error message for each unreadable one."""
    network = load(model)
    network.module.to(device).requires_grad_(False)
    sources = files.sources([str(images)]) if images else files.sample_photos()
    names, crops, broken = [], [], []
    for source in sources:
        try:
            crops.append(network.crop(photos.read(source.path)))
            names.append(source.name)
        except photos.UnreadableImageError as error:
            broken.append(str(error))
    if not crops:
        raise ValueError(f"none of the photos in {str(images)!r} can be read: {broken[0]}")
    x = torch.stack([network.prepare(crop) for crop in crops])
    return Gallery(network, names, crops, x, _predict(network, x, device)), broken


@torch.no_grad()
def _predict(network: ImageModel, x: Tensor, device: str) -> Tensor:
    scores = [network.module(rows.to(device)) for rows in x.split(8)]
    return torch.cat([getattr(s, "logits", s).argmax(1).cpu() for s in scores])


def pairs(labels: Sequence[int]) -> list[tuple[int, int]]:
    """The indices of the first two images of each class that has at least two."""
    first: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for i, label in enumerate(labels):
        if label in first and label not in found:
            found[label] = (first[label], i)
        first.setdefault(label, i)
    return [found[label] for label in sorted(found)]
