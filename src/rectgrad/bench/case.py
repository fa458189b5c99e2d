"""The input of every contender: one network, one batch of images, one class per image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rectgrad.bench import networks
from rectgrad.bench.plan import DTYPES, Plan


class Case(NamedTuple):
    module: nn.Module
    inputs: Tensor
    target: Tensor  # the class of each sample


def case_of(plan: Plan, name: str, pixels: int, batch: int, light: bool = False) -> Case:
    """Random images from a fixed seed, and the class that the network predicts for each.

    With `light`, the network is not run: it is not calibrated, and every class is 0.
    """
    layout = torch.channels_last if plan.channels_last else torch.contiguous_format
    module = networks.build(name, pixels, calibrated=not light).to(plan.device, DTYPES[plan.dtype])
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    inputs = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(1))
    inputs = inputs.to(plan.device, DTYPES[plan.dtype], memory_format=layout)
    with torch.no_grad():
        classes = inputs.new_zeros(batch).long() if light else module(inputs).argmax(1)
    return Case(module, inputs, classes)


def side(plan: Plan, name: str) -> int:
    """Height and width of the images, from the plan or the network's default."""
    return plan.pixels or networks.NETWORKS[name].pixels
