"""The list of networks, and how their weights and inputs are made.

All numbers come from `numpy.random.RandomState`, whose stream never changes, seeded by their own names.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Tensor, ...]
IMAGE = (2, 3, 8, 8)
TOKENS = (2, 6, 8)

NETWORKS: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {}


def network(
    *shapes: tuple[int, ...],
    name: str = "",
    seed: int = 0,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Add a function that builds a module to NETWORKS, under its own name or another.

    shapes: those of the inputs; default: one batch of images. seed: the default of what is registered; it is
    not 0 where 0 puts a unit's score next to the threshold or produces an empty map.
    """

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        key = name or build.__name__

        def make(seed: int = seed, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Inputs]:
            with torch.random.fork_rng(devices=[]):
                model = build()
            fill(model, f"{key} {seed}")
            inputs = [
                torch.tensor(normal(shape, f"{key} {seed} input {i}"), dtype=dtype)
                for i, shape in enumerate(shapes or (IMAGE,))
            ]
            model = model.to(dtype).eval()
            if memory_format is not None:
                model = model.to(memory_format=memory_format)
                inputs = [x.contiguous(memory_format=memory_format) for x in inputs]
            return model, inputs[0] if len(inputs) == 1 else tuple(inputs)

        NETWORKS[key] = make
        return build

    return register


def also_in(dtype: torch.dtype, name: str, seed: int | None = None) -> None:
    """Add the network `name` once more, in another floating type."""
    make = NETWORKS[name]
    kwargs = {} if seed is None else {"seed": seed}
    NETWORKS[f"{name}_{str(dtype).removeprefix('torch.')}"] = lambda **given: make(
        **{**kwargs, "dtype": dtype, **given}
    )


def uniform(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Numbers between 0 and 1 that depend on the name alone."""
    return np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)


@functools.cache  # each network is built for every method
def normal(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Almost normal: a sum of twelve uniform numbers is the same to the last bit on every platform, which a
    logarithm is not. RandomMap hashes these bits."""
    total = np.zeros(shape)
    for i in range(12):
        total += uniform(shape, f"{name} {i}")
    return total - 6


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


@torch.no_grad()
def fill(model: nn.Module, name: str) -> None:
    """Weights that carry a signal to the output, and norms unlike those of a fresh layer."""
    for path, module in model.named_modules():
        for key, value in module.named_parameters(recurse=False):
            value.copy_(torch.from_numpy(weights(module, key, tuple(value.shape), f"{name} {path}.{key}")))
        for key, value in module.named_buffers(recurse=False):
            if key == "running_mean":
                value.copy_(torch.from_numpy(0.3 * normal(tuple(value.shape), f"{name} {path}.{key}")))
            if key == "running_var":
                value.copy_(torch.from_numpy(0.5 + 1.5 * uniform(tuple(value.shape), f"{name} {path}.{key}")))


def weights(module: nn.Module, key: str, shape: tuple[int, ...], name: str) -> np.ndarray:
    if isinstance(module, NORMS) and key == "weight":
        return 0.5 + uniform(shape, name)
    if isinstance(module, nn.PReLU):
        return 0.1 + 0.3 * uniform(shape, name)
    if len(shape) < 2:
        return 0.2 * normal(shape, name)
    return normal(shape, name) * 1.5 / math.sqrt(math.prod(shape[1:]))


class Written(nn.Module):
    """Layers by name, and a forward pass written as a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def head(features: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 5))


def conv(channels: int, out: int, kernel: Any = 3, stride: int = 1, **options: Any) -> nn.Conv2d:
    """A convolution padded to keep the size, unless `options` say otherwise."""
    if "padding" not in options:
        options["padding"] = kernel // 2
    return nn.Conv2d(channels, out, kernel, stride, **options)


def conv_norm(channels: int, out: int, kernel: int = 3, stride: int = 1, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(channels, out, kernel, stride, bias=False, **options), nn.BatchNorm2d(out))
