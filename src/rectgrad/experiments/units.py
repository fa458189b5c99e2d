"""The units of the CNN: activations of its convolutions, masks at their resolution, and masks of others."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

OTHERS = 10  # masks of other images per image
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


def of_other_classes(labels: np.ndarray) -> Tensor:
    """(n, N): for each image up to ten images of other classes, spread evenly over them. Masks of its own
    class would be no null, because objects of one class have similar shapes and places."""
    candidates = [np.flatnonzero(labels != label) for label in labels]
    count = min(OTHERS, *map(len, candidates))
    if not count:
        raise ValueError("all images with masks have the same class, so there are no masks of other classes")
    chosen = [
        each[(np.arange(count) * len(each) // count + i) % len(each)] for i, each in enumerate(candidates)
    ]
    return torch.from_numpy(np.stack(chosen, axis=1))
