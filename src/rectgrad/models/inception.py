"""Inception-v4 (Szegedy et al., 2016, figures 3 to 9), the network of the paper's photographs.

Attributes are named like the keys of timm/inception_v4.tf_in1k, so that its file loads unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class InceptionV4(nn.Module):
    """Takes images of 299×299 pixels scaled to -1..1; every one of the 149 activations is a ReLU."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *stem(),
            *(block_a() for _ in range(4)),
            reduction_a(),
            *(block_b() for _ in range(7)),
            reduction_b(),
            *(BlockC() for _ in range(3)),
        )
        self.last_linear = nn.Linear(1536, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_linear(self.features(x).mean((2, 3)))


class Unit(nn.Module):
    """Convolution, normalisation, ReLU. `same` pads so that a stride of 1 keeps the size."""

    def __init__(self, channels: int, out: int, kernel: Any, stride: int = 1, same: bool = False) -> None:
        super().__init__()
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = (sides[0] // 2, sides[1] // 2) if same else 0
        self.conv = nn.Conv2d(channels, out, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=1e-3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class Branches(nn.Module):
    """Applies all children to the same input and concatenates their channels in order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([child(x) for child in self.children()], 1)


class BlockC(nn.Module):
    """The block for 8×8 grids (figure 6); two of its branches split at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.branch0 = Unit(1536, 256, 1)
        self.branch1_0 = Unit(1536, 384, 1)
        self.branch1_1a, self.branch1_1b = fork(384)
        self.branch2_0 = Unit(1536, 384, 1)
        self.branch2_1 = Unit(384, 448, (3, 1), same=True)
        self.branch2_2 = Unit(448, 512, (1, 3), same=True)
        self.branch2_3a, self.branch2_3b = fork(512)
        self.branch3 = pooled(1536, 256)

    def forward(self, x: Tensor) -> Tensor:
        one = self.branch1_0(x)
        two = self.branch2_2(self.branch2_1(self.branch2_0(x)))
        ones, twos = (
            (self.branch1_1a(one), self.branch1_1b(one)),
            (self.branch2_3a(two), self.branch2_3b(two)),
        )
        return torch.cat([self.branch0(x), *ones, *twos, self.branch3(x)], 1)


def stem() -> list[nn.Module]:
    """Figure 3."""
    tall = chain(160, (64, 1), (64, (1, 7)), (64, (7, 1)))
    return [
        Unit(3, 32, 3, stride=2),
        Unit(32, 32, 3),
        Unit(32, 64, 3, same=True),
        Branches(maxpool=nn.MaxPool2d(3, 2), conv=Unit(64, 96, 3, stride=2)),
        Branches(
            branch0=nn.Sequential(Unit(160, 64, 1), Unit(64, 96, 3)),
            branch1=tall.append(Unit(64, 96, 3)),
        ),
        Branches(conv=Unit(192, 192, 3, stride=2), maxpool=nn.MaxPool2d(3, 2)),
    ]


def block_a() -> Branches:
    """The block for 35×35 grids (figure 4)."""
    return Branches(
        branch0=Unit(384, 96, 1),
        branch1=chain(384, (64, 1), (96, 3)),
        branch2=chain(384, (64, 1), (96, 3), (96, 3)),
        branch3=pooled(384, 96),
    )


def block_b() -> Branches:
    """The block for 17×17 grids (figure 5)."""
    return Branches(
        branch0=Unit(1024, 384, 1),
        branch1=chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1))),
        branch2=chain(1024, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
        branch3=pooled(1024, 128),
    )


def reduction_a() -> Branches:
    """From 35×35 to 17×17 (figure 7)."""
    return Branches(
        branch0=Unit(384, 384, 3, stride=2),
        branch1=chain(384, (192, 1), (224, 3)).append(Unit(224, 256, 3, stride=2)),
        branch2=nn.MaxPool2d(3, 2),
    )


def reduction_b() -> Branches:
    """From 17×17 to 8×8 (figure 8)."""
    return Branches(
        branch0=chain(1024, (192, 1)).append(Unit(192, 192, 3, stride=2)),
        branch1=chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1))).append(Unit(320, 320, 3, stride=2)),
        branch2=nn.MaxPool2d(3, 2),
    )


def chain(channels: int, *steps: tuple[int, Any]) -> nn.Sequential:
    """A sequence of units, given as (channels out, kernel), that keep the size."""
    units = nn.Sequential()
    for out, kernel in steps:
        units.append(Unit(channels, out, kernel, same=True))
        channels = out
    return units


def fork(channels: int) -> tuple[Unit, Unit]:
    return Unit(channels, 256, (1, 3), same=True), Unit(channels, 256, (3, 1), same=True)


def pooled(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), Unit(channels, out, 1))
