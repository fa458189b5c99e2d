"""Networks to measure on: the usual ones with random weights, so that no file is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rectgrad.models.efficientnet import EfficientNetLite0
from rectgrad.models.inception import InceptionV4
from rectgrad.models.resnet import ResNet50
from rectgrad.models.vgg import VGG16
from rectgrad.models.vit import ViTB16


class Network(NamedTuple):
    """make: from the side of its pictures. pixels: its own. least, step: the sides it takes."""

    make: Callable[[int], nn.Module]
    pixels: int
    least: int = 32
    step: int = 1


NETWORKS = {
    "efficientnet_lite0": Network(lambda _: EfficientNetLite0(), 224),
    "resnet50": Network(lambda _: ResNet50(), 224),
    "vgg16": Network(lambda _: VGG16(), 224),
    "inception_v4": Network(lambda _: InceptionV4(), 299, least=75),
    "vit_b_16": Network(ViTB16, 224, step=16),
}


def check(name: str, pixels: int | None) -> None:
    """A sentence about a network that is not there, or a side that it does not take."""
    if name not in NETWORKS:
        raise ValueError(f"unknown model {name!r}; bench knows {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    side = network.pixels if pixels is None else pixels
    if side < network.least or side % network.step:
        multiple = f", in multiples of {network.step}" if network.step > 1 else ""
        raise ValueError(f"{name} takes pixels of at least {network.least}{multiple}, not {side}")


def build(name: str, pixels: int, calibrated: bool = True) -> nn.Module:
    """The network in evaluation mode, the same every time; its parameters require no gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = NETWORKS[name].make(pixels).apply(_kaiming).eval().requires_grad_(False)
        if calibrated:
            calibrate(module, torch.randn(4, 3, pixels, pixels))
    return module


def _kaiming(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=0.1)  # without any, a ReLU network is linear along a ray


@torch.no_grad()
def calibrate(module: nn.Module, inputs: Tensor) -> None:
    """Make every batch norm's running statistics those of `inputs`, as training would have.

    Without, signals grow from block to block and a random network is no model of a trained one.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    if norms:
        module(inputs)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.eval().momentum = momentum
