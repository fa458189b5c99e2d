"""Networks for benchmarks: common architectures with random weights, so that no file is needed."""

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
    """A constructor from the image size, the default size, and the smallest size and step that it accepts."""

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
    """Raises an error for an unknown network or an image size that it does not accept."""
    if name not in NETWORKS:
        raise ValueError(f"unknown model {name!r}; bench models are {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    side = network.pixels if pixels is None else pixels
    if side < network.least or side % network.step:
        multiple = f" and a multiple of {network.step}" if network.step > 1 else ""
        raise ValueError(f"pixels must be at least {network.least}{multiple} for {name}, not {side}")


def build(name: str, pixels: int, calibrated: bool = True) -> nn.Module:
    """The network in evaluation mode with weights from a fixed seed that require no gradient."""
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
            nn.init.normal_(layer.bias, std=0.1)  # without biases, a ReLU network is linear along a ray


@torch.no_grad()
def calibrate(module: nn.Module, inputs: Tensor) -> None:
    """Sets the running statistics of every batch norm to those of `inputs`, as training would.

    Otherwise activations grow from block to block, unlike those of a trained network.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    if norms:
        module(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
