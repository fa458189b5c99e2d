"""A small network for the command line's tests: rectgrad explain --model tests/tiny_model.py:tiny"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from rectgrad.models import ImageModel


def tiny() -> ImageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1352, 4),
        ).eval()
    labels = ["red cat", "green dog", "blue bird", "blue fish"]
    return ImageModel(
        "tiny", module, labels, size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop_fraction=1.0
    )


def for_grey() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())


class Named(nn.Module):
    """Returns a dict."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": x.mean((2, 3)).relu()}


def without_weights() -> nn.Module:
    return nn.Linear(3, 2, device="meta")


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(3, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


class OneOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().mean((1, 2, 3))


no_function = OneOutput()


class Slow(nn.Module):
    """Takes its time, so that a test can interrupt it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return self.module(x)


def slow() -> ImageModel:
    net = tiny()
    return replace(net, module=Slow(net.module).eval())


class Held(Slow):
    """Waits as long as the working directory has a file `hold`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while Path("hold").exists():
            time.sleep(0.02)
        return self.module(x)


def held() -> ImageModel:
    net = tiny()
    return replace(net, module=Held(net.module).eval())


class Chatty(Slow):
    """Prints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        return self.module(x)


def chatty() -> ImageModel:
    print("factory")
    net = tiny()
    return replace(net, module=Chatty(net.module).eval())
