"""Helpers for the tests of the models."""

from pathlib import Path

import torch
from PIL import Image
from torch import nn

import rectgrad
from rectgrad.models import ImageModel

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parents[1] / "standins"
PACKAGES = "timm", "torchvision", "transformers", "huggingface_hub"


def model_of(module: nn.Module | None = None, **changes) -> ImageModel:
    fields = {"labels": [], "size": (16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_fraction": 1.0}
    return ImageModel("mine", **{"module": module or nn.Flatten(), **fields, **changes})


def scores(model: ImageModel, picture: Image.Image) -> torch.Tensor:
    with torch.no_grad():
        return model.module(model.prepare(model.crop(picture))[None])


def relus(model: nn.Module, size: int) -> int:
    rows = rectgrad.record(model.eval(), torch.rand(1, 3, size, size)).trace.rows
    return sum(row.family == "relu" for row in rows)


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text
