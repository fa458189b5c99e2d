"""Rankings of pixels by importance, the input of ROAR and KAR, and the variants of the controls.

blurred              the map is blurred first
ties by gradient     pixels with equal values are ordered by |gradient * input|
ties by distance     pixels with equal values are ordered by their distance to a marked one
any picture          the ranking of a random other picture: regions of the same shape, which say nothing
                     about this picture or its class
same class           the ranking of another picture of the class: regions that reveal the class as much,
                     but say nothing else about this picture
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectgrad.data import Images, scaled
from rectgrad.experiments.maps import comparison_map
from rectgrad.methods import Method

NOISE = 1e-4  # breaks ties
CHUNK = 5_000


def rankings(
    module: nn.Module, images: Images, method: str | Method, variants: Sequence[str] = ("",), seed: int = 0
) -> Tensor:
    """(variants, images, 1024) as int16: the rank of each pixel in the map, 0 for the most important one."""
    generator = torch.Generator().manual_seed(seed)
    device = next(module.parameters()).device
    kept: dict[str, list[Tensor]] = {name: [] for name in ("", *KEYS) if name in ("", *variants)}
    for first in range(0, len(images), CHUNK):
        x = scaled(images.pixels[first : first + CHUNK])
        maps = comparison_map(module, x, method)
        noise = torch.randn(len(maps), 1024, generator=generator)
        for name, found in kept.items():
            keys = KEYS[name](module, x, maps, noise) if name else (_noisy(maps, noise),)
            found.append(ranks(*(key.flatten(1).to(device) for key in keys)).cpu())
    whole = {name: torch.cat(found) for name, found in kept.items()}
    whole |= {
        name: whole[""][given(images.labels, seed)] for name, given in PARTNERS.items() if name in variants
    }
    return torch.stack([whole[name] for name in variants])


def ranks(*keys: Tensor) -> Tensor:
    """The rank of each value of the first key in its row as int16, 0 for the largest. The other keys break
    ties."""
    order = keys[-1].argsort(dim=1, descending=True, stable=True)
    for key in reversed(keys[:-1]):
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    index = torch.arange(order.shape[1], device=order.device, dtype=torch.int16).expand_as(order)
    return torch.empty_like(index).scatter_(1, order, index)


def _noisy(maps: Tensor, noise: Tensor) -> Tensor:
    return maps.flatten(1) + NOISE * noise


def _by_gradient(module: nn.Module, x: Tensor, maps: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    return maps, comparison_map(module, x, "gradient_x_input").abs(), noise


def nearness(maps: Tensor) -> Tensor:
    """32 - the distance of each pixel to the nearest one with a positive value, in steps to any of eight
    neighbours; at least 0."""
    marked, total = (maps > 0).float().unsqueeze(1), torch.zeros_like(maps)
    for _ in range(32):
        total += marked.squeeze(1)
        marked = F.max_pool2d(marked, 3, 1, 1)
    return total


def blur(maps: Tensor, sigma: float = 1.0) -> Tensor:
    """Gaussian blur of each map with replicated borders."""
    reach = 4
    at = torch.arange(-reach, reach + 1, dtype=maps.dtype)
    weights = torch.exp(-at.square() / (2 * sigma**2))
    weights /= weights.sum()
    padded = F.pad(maps.unsqueeze(1), (reach,) * 4, mode="replicate")
    rows = F.conv2d(padded, weights.reshape(1, 1, -1, 1))
    return F.conv2d(rows, weights.reshape(1, 1, 1, -1)).squeeze(1)


def any_picture(labels: np.ndarray, seed: int) -> np.ndarray:
    """A random other picture for each one."""
    order = np.random.default_rng(seed).permutation(len(labels))
    return _next_in(order, np.zeros_like(labels))


def same_class(labels: np.ndarray, seed: int) -> np.ndarray:
    """A random other picture of the same class for each one."""
    classes, counts = np.unique(labels, return_counts=True)
    if (counts < 2).any():
        raise ValueError(f"there is no other picture of class {classes[counts < 2][0]}")
    return _next_in(np.random.default_rng(seed).permutation(len(labels)), labels)


def _next_in(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The picture that follows each one in an order, within its group."""
    found = np.empty_like(order)
    for group in np.unique(groups):
        members = order[groups[order] == group]
        found[members] = np.roll(members, -1)
    return found


# variant -> the keys of a ranking, from network, inputs, maps and noise
KEYS: dict[str, Callable[[nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "blurred": lambda module, x, maps, noise: (_noisy(blur(maps), noise),),
    "ties by gradient": _by_gradient,
    "ties by distance": lambda module, x, maps, noise: (maps, nearness(maps), noise),
}
# variant -> the picture whose ranking is used, from labels and seed
PARTNERS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "any picture": any_picture,
    "same class": same_class,
}
