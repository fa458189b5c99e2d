"""The maps that experiments compare, each in the units of its method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad import image
from rectgrad.api import attribute, capture
from rectgrad.engine.op import UnsupportedModelError
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS

# The methods of the paper's comparisons in its order, plus Deconv and epsilon-LRP.
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

IMAGE_BYTES = 6 * 2**20  # upper bound of the memory per image in a pass of the paper's CNN


def comparison_map(
    module: nn.Module, x: Tensor, method: str | Method, target: Tensor | None = None
) -> Tensor:
    """(N, H, W): the map for the top class, summed over channels; for RectGrad, the positive part."""
    return channel_maps(module, x, method, target).sum(1)


def channel_maps(module: nn.Module, x: Tensor, method: str | Method, target: Tensor | None = None) -> Tensor:
    """(N, C, H, W): the map for the top class, or for the targets, on the CPU."""
    device = next(module.parameters()).device
    batch = _batch_size(device)
    chunks = x.split(batch)
    targets: Any = [None] * len(chunks) if target is None else target.split(batch)
    explain = (
        explainer(module, x[:batch].to(device), method) if len(x) > 2 * batch else partial(attribute, module)
    )
    return torch.cat(
        [
            explain(rows.to(device), method=method, target=chosen).cpu()
            for rows, chosen in zip(chunks, targets, strict=True)
        ]
    )


def explainer(module: nn.Module, example: Tensor, method: str | Method) -> Callable[..., Tensor]:
    """Like `attribute`, for many batches like the example. Uses a capture on a GPU if the model allows it."""
    ordinary = partial(attribute, module)
    if not example.is_cuda:
        return ordinary
    try:
        captured = capture(module, example, method)
    except UnsupportedModelError:
        return ordinary

    def explain(rows: Tensor, method: str | Method, target: Tensor | None) -> Tensor:
        fits = rows.shape == example.shape  # a smaller last batch uses an ordinary call
        return captured(rows, target) if fits else ordinary(rows, method=method, target=target)

    return explain


def _batch_size(device: torch.device) -> int:
    """Images of 32 x 32 per pass: few enough for the caches of a CPU, enough to keep a GPU busy within half
    of its free memory."""
    if device.type != "cuda":
        return 100
    return int(max(100, min(5000, torch.cuda.mem_get_info(device)[0] // (2 * IMAGE_BYTES))))


def nan_where_zero(values: Tensor, maps: Tensor) -> list[float]:
    """One value per map; NaN for a zero map, which would otherwise look like the best one."""
    return torch.where(maps.flatten(1).any(1), values, torch.nan).tolist()


def with_final_threshold(maps: Tensor, method: str) -> Tensor:
    """The maps with the final threshold of the paper's comparisons, which RectGrad does not use."""
    if METHODS[method].thresholds or not len(maps):
        return maps
    return torch.from_numpy(np.stack([image.final_threshold(each) for each in maps.numpy()]))


def shown(name: str) -> Method:
    """A method as in the paper's figures: RectGrad keeps its negative values."""
    method = METHODS[name]
    return replace(method, positive_only=False) if isinstance(method, RectGrad) else method
