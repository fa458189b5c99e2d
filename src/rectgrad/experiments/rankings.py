"""Rankings of pixels by importance, the input of ROAR and KAR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectgrad.data import Images, scaled
from rectgrad.experiments.maps import comparison_map

NOISE = 1e-4  # breaks ties
CHUNK = 5_000


def ranking(module: nn.Module, images: Images, method: str, blurred: bool = False, seed: int = 0) -> Tensor:
    """(images, 1024) as int16: the rank of each pixel in the map, 0 for the most important one."""
    generator = torch.Generator().manual_seed(seed)
    device = next(module.parameters()).device
    found = []
    for first in range(0, len(images), CHUNK):
        maps = comparison_map(module, scaled(images.pixels[first : first + CHUNK]), method)
        maps = blur(maps) if blurred else maps
        noisy = maps.flatten(1) + NOISE * torch.randn(len(maps), 1024, generator=generator)
        found.append(ranks(noisy.to(device)).cpu())
    return torch.cat(found)


def ranks(values: Tensor) -> Tensor:
    """The rank of each value in its row as int16, 0 for the largest."""
    order = values.argsort(1, descending=True)
    index = torch.arange(values.shape[1], device=values.device, dtype=torch.int16).expand_as(order)
    return torch.empty_like(index).scatter_(1, order, index)


def blur(maps: Tensor, sigma: float = 1.0) -> Tensor:
    """Gaussian blur of each map with replicated borders."""
    reach = 4
    at = torch.arange(-reach, reach + 1, dtype=maps.dtype)
    weights = torch.exp(-at.square() / (2 * sigma**2))
    weights /= weights.sum()
    padded = F.pad(maps.unsqueeze(1), (reach,) * 4, mode="replicate")
    rows = F.conv2d(padded, weights.reshape(1, 1, -1, 1))
    return F.conv2d(rows, weights.reshape(1, 1, 1, -1)).squeeze(1)
