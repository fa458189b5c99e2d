"""The maps that experiments compare. All in the units of their method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad import image
from rectgrad.api import attribute
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS

# The methods of the paper's comparisons, in its order, and Deconv and epsilon-LRP.
COMPARED = (
    "saliency",
    "deconv",
    "guided_backprop",
    "smoothgrad",
    "gradient_x_input",
    "integrated_gradients",
    "epsilon_lrp",
    "deeplift",
    "rectgrad",
    "rectgrad_prr",
)

PICTURE = 6 * 2**20  # bytes that one picture takes in a pass of the paper's CNN, at most


def comparison_map(module: nn.Module, x: Tensor, method: str, target: Tensor | None = None) -> Tensor:
    """(N, H, W): the map for the largest logit, summed over colours; of RectGrad, its positive parts."""
    device = next(module.parameters()).device
    batch = _rows(device)
    targets: Any = [None] * len(x) if target is None else target.split(batch)
    return torch.cat(
        [
            attribute(module, rows.to(device), method, wanted).sum(1).cpu()
            for rows, wanted in zip(x.split(batch), targets, strict=False)
        ]
    )


def _rows(device: torch.device) -> int:
    """Pictures of 32 x 32 in a pass: few enough for a CPU's caches, many enough for a GPU to work rather than
    wait for the next call, within half of its free memory."""
    if device.type != "cuda":
        return 100
    return int(max(100, min(5000, torch.cuda.mem_get_info(device)[0] // (2 * PICTURE))))


def of_maps(values: Tensor, maps: Tensor) -> list[float]:
    """One value a map; NaN for a map of zeros, which would look like the best one."""
    return torch.where(maps.flatten(1).any(1), values, torch.nan).tolist()


def finally_thresholded(maps: Tensor, method: str) -> Tensor:
    """Each map with the final threshold of the paper's comparisons, which RectGrad goes without."""
    if method.startswith("rectgrad"):
        return maps
    return torch.from_numpy(np.stack([image.final_threshold(each) for each in maps.numpy()]))


def shown(name: str) -> Method:
    """A method as the paper draws it: RectGrad keeps its negative values."""
    method = METHODS[name]
    return replace(method, positive_only=False) if isinstance(method, RectGrad) else method
