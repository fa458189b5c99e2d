"""An image classifier with its preprocessing and class names.

The models are listed in catalog.py; reading and writing image files is not part of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad.models import classes

if TYPE_CHECKING:
    from PIL import Image

INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming")


@dataclass(frozen=True)
class Guess:
    """A predicted class; its probability is the softmax of the scores."""

    index: int
    label: str
    probability: float


@dataclass(frozen=True)
class ImageModel:
    """A network in evaluation mode with its class names and preprocessing.

        model = rectgrad.models.load("efficientnet_lite0")
        cropped = model.crop(picture)
        scores = model.module(model.prepare(cropped)[None])

    labels: the display name of each class; empty if unknown. size: height and width of the input.
    mean, std: one number per colour channel, for pixels scaled to 0..1. crop_fraction: the part of the
    shorter side that the network sees. interpolation: "bicubic", "bilinear", "nearest", "lanczos", "box" or
    "hamming". synonyms: alternative names of each class, for find_class.
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
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"{self.name}: module must be an nn.Module, not {type(self.module).__name__}")
        listed = isinstance(self.labels, (list, tuple))
        if not listed or not all(isinstance(label, str) for label in self.labels):
            raise TypeError(f"{self.name}: labels must be a list of class names, [] if they are unknown")
        if len(self.size) != 2 or not all(isinstance(side, Integral) and side > 0 for side in self.size):
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
        if self.interpolation.lower() not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise ValueError(f"{self.name}: interpolation={self.interpolation!r} must be one of {known}")

    def crop(self, image: Image.Image) -> Image.Image:
        """The centre of the picture in RGB, at the input size of the network.

        Cropping and resizing are one step, so that a very long picture is never enlarged as a whole.
        """
        from PIL import Image

        _check_picture("crop", image)
        height, width = self.size
        scale = self.crop_fraction * min(image.width / width, image.height / height)
        left, top = (image.width - scale * width) / 2, (image.height - scale * height) / 2
        box = (left, top, image.width - left, image.height - top)
        method = Image.Resampling[self.interpolation.upper()]
        return image.convert("RGB").resize((width, height), method, box=box)

    def prepare(self, cropped: Image.Image) -> Tensor:
        """The input, (3, height, width) in the type of the network's weights, for a cropped picture.

        Computed as (pixel - 255 mean) / (255 std) in double precision, so that (pixel - 127) / 128 is exact.
        """
        _check_picture("prepare", cropped)
        height, width = self.size
        if cropped.size != (width, height):
            raise ValueError(
                f"{self.name} takes pictures of {width} × {height} pixels, not "
                f"{cropped.width} × {cropped.height}: use crop() first"
            )
        pixels = np.asarray(cropped.convert("RGB"), dtype=np.float64)
        scaled = (pixels - 255 * np.array(self.mean)) / (255 * np.array(self.std))
        weights = (each.dtype for each in self.module.parameters() if each.is_floating_point())
        x = torch.from_numpy(scaled.astype(np.float32)).permute(2, 0, 1).contiguous()
        return x.to(next(weights, torch.float32))

    def find_class(self, query: str | SupportsIndex) -> int:
        """The index of a class, given as an index, a name or a unique part of a name; case is ignored."""
        return classes.find(self.names(), query)

    def top(self, scores: Tensor, k: int = 5) -> list[Guess]:
        """The k classes with the largest scores (logits) of one picture, largest first."""
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
        """The display name of a class; "class 7" if it is unknown."""
        return self.labels[index] if index < len(self.labels) else f"class {index}"

    def check_labels(self, count: int) -> None:
        """Raises an error if the number of class names differs from the number of classes."""
        classes.check_count(self.name, self.names(), count)

    def names(self) -> Sequence[Sequence[str]]:
        """All names of each class, the display name first."""
        if len(self.synonyms) != len(self.labels):
            return [[label] for label in self.labels]
        return [[label, *others] for label, others in zip(self.labels, self.synonyms, strict=True)]


def _check_picture(call: str, picture: object) -> None:
    from PIL import Image

    if not isinstance(picture, Image.Image):
        given = "model.crop(PIL.Image.open(path))" if call == "prepare" else "PIL.Image.open(path)"
        raise TypeError(
            f"{call} takes a PIL image, not {type(picture).__name__}: pass {given}, or call "
            "rectgrad.explain(picture, model), which takes paths, arrays and tensors"
        )
