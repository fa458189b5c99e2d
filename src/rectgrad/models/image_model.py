"""An image classifier and all that a picture needs on its way in and out of it.

Where models come from is in catalog.py; reading and writing picture files is not done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad.models import classes

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Guess:
    """One class of an answer; probability is the softmax of the scores."""

    index: int
    label: str
    probability: float


@dataclass(frozen=True)
class ImageModel:
    """A network in evaluation mode, its class names and how a picture becomes its input.

        model = rectgrad.models.load("efficientnet_lite0")
        seen = model.crop(picture)
        scores = model.module(model.prepare(seen)[None])

    labels: the name to show for each class index; empty where unknown. size: height and width of the input.
    mean, std: one number for each colour channel, for pixels scaled to 0..1. crop_fraction: the part of the
    shorter side that the network sees. interpolation: "bicubic", "bilinear", "nearest", "lanczos", "box" or
    "hamming". synonyms: further names of each class, for find_class.
    """

    name: str
    module: nn.Module
    labels: list[str]
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_fraction: float
    interpolation: str = "bicubic"
    synonyms: list[list[str]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"{self.name}: size={self.size!r} must be (height, width) in pixels")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"{self.name}: mean={self.mean!r} and std={self.std!r} must be three numbers each, for red, "
                "green and blue, and std above 0"
            )
        if not 0 < self.crop_fraction <= 1:
            raise ValueError(
                f"{self.name}: crop_fraction={self.crop_fraction!r} must be above 0 and at most 1"
            )

    def crop(self, image: Image.Image) -> Image.Image:
        """What the network sees: the centre of the picture, in RGB and at the network's size.

        The box is cut and resized in one step, so a very long picture is never enlarged as a whole.
        """
        from PIL import Image

        height, width = self.size
        scale = self.crop_fraction * min(image.width / width, image.height / height)
        left, top = (image.width - scale * width) / 2, (image.height - scale * height) / 2
        box = (left, top, image.width - left, image.height - top)
        method = Image.Resampling[self.interpolation.upper()]
        return image.convert("RGB").resize((width, height), method, box=box)

    def prepare(self, cropped: Image.Image) -> Tensor:
        """The input, (3, height, width) in float32, of a picture that has the network's size.

        Computed as (pixel - 255 mean) / (255 std) in double precision: so (pixel - 127) / 128 is exact.
        """
        height, width = self.size
        if cropped.size != (width, height):
            raise ValueError(
                f"{self.name} takes pictures of {width} × {height} pixels, not "
                f"{cropped.width} × {cropped.height}: crop() makes them so"
            )
        pixels = np.asarray(cropped.convert("RGB"), dtype=np.float64)
        scaled = (pixels - 255 * np.array(self.mean)) / (255 * np.array(self.std))
        return torch.from_numpy(scaled.astype(np.float32)).permute(2, 0, 1).contiguous()

    def find_class(self, wanted: str | SupportsIndex) -> int:
        """The index of a class, given as that or as a name: a whole one, else part of one; case aside."""
        return classes.find(self._names(), wanted)

    def top(self, scores: Tensor, k: int = 5) -> list[Guess]:
        """The k largest of one picture's scores (logits), largest first."""
        scores = scores.detach().reshape(-1) if scores.shape[:-1].numel() == 1 else scores
        if scores.dim() != 1 or (self.labels and len(scores) != len(self.labels)):
            shape = f"({len(self.labels) or 'classes'},)"
            raise ValueError(f"top takes one picture's scores, {shape}, not shape {tuple(scores.shape)}")
        if k < 1:
            raise ValueError(f"top takes k of at least 1, not {k}")
        probabilities = scores.double().softmax(0).topk(min(k, len(scores)))
        pairs = zip(probabilities.indices.tolist(), probabilities.values.tolist(), strict=True)
        return [Guess(index, self.label(index), p) for index, p in pairs]

    def label(self, index: int) -> str:
        """The name to show for a class, "class 7" where none is known."""
        return self.labels[index] if index < len(self.labels) else f"class {index}"

    def _names(self) -> Sequence[Sequence[str]]:
        if len(self.synonyms) != len(self.labels):
            return [[label] for label in self.labels]
        return [[label, *others] for label, others in zip(self.labels, self.synonyms, strict=True)]
