import enum
from types import SimpleNamespace

from torch import nn


class InterpolationMode(enum.Enum):
    BILINEAR = "bilinear"


class Weights:
    """As the members of torchvision's weight enumerations."""

    meta = {"categories": ["heron", "crane bird", "crane"]}  # noqa: RUF012

    def transforms(self):
        return SimpleNamespace(
            crop_size=[64],
            resize_size=[80],
            mean=[0.1, 0.2, 0.3],
            std=[0.4, 0.5, 0.6],
            interpolation=InterpolationMode.BILINEAR,
        )


def get_model_weights(name):
    _check(name)
    return SimpleNamespace(DEFAULT=Weights())


def get_model(name, *, weights=None):
    _check(name)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3), nn.ReLU())
    if weights == "DEFAULT":
        nn.init.constant_(model[2].bias, 0.5)
    return model


def _check(name):
    if name != "tiny":
        raise ValueError(f"Unknown model {name}")
