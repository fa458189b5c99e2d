"""The units of the CNN: activations of its convolutions, and masks at their resolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = {"conv1": "relu1", "conv2": "relu2", "conv3": "relu3", "conv4": "relu4"}


@torch.no_grad()
def activations(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output of the ReLU after each convolution."""
    found: dict[str, Tensor] = {}
    hooks = [
        getattr(module, relu).register_forward_hook(lambda _, __, y, name=name: found.update({name: y.cpu()}))
        for name, relu in LAYERS.items()
    ]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def resized(masks: Tensor, side: int) -> Tensor:
    """Masks at a lower resolution: true where at least half of the area is."""
    return F.avg_pool2d(masks.float().unsqueeze(1), masks.shape[-1] // side).squeeze(1) >= 0.5
