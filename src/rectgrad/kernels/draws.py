"""Random numbers that depend only on a seed and on values, so that they are the same on every machine, device
and dtype, up to rounding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rectgrad.kernels.baseline import Tensors, column, value_range
from rectgrad.kernels.reference import wide


def bytes_of(x: Tensor) -> bytes:
    """The values of a tensor on the CPU, as bytes."""
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def generator_of(*parts: bytes) -> torch.Generator:
    """A random generator that depends only on these parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest.digest(), "big") >> 1)


def generators(inputs: Sequence[Tensor], seed: int) -> Callable[[int], list[torch.Generator]]:
    """A function from the index of a draw to a random generator for each sample, which depends on the seed,
    the index and the sample's values. It draws on the CPU."""
    cpu = [x.detach().float().cpu() for x in inputs]  # equal values give equal numbers in every dtype
    values = [b"".join(map(bytes_of, row)) for row in zip(*cpu, strict=True)]
    return lambda j: [generator_of(str(seed).encode(), str(j).encode(), each) for each in values]


def noisy(inputs: Tensors, noise: float, seed: int) -> Callable[[int], Tensors]:
    """A function from the index of a draw to a copy with normal noise, whose standard deviation is a share of
    each sample's value range."""
    scale, keys = [noise * value_range(x) for x in inputs], _keys(inputs, seed)

    def point(j: int) -> Tensors:
        drawn = (normal(own, j, x.shape[1:]).to(x) for own, x in zip(keys, inputs, strict=True))
        return tuple(x.detach() + s * e for x, s, e in zip(inputs, scale, drawn, strict=True))

    return point


def _keys(inputs: Tensors, seed: int) -> list[Tensor]:
    """For each input, a 64-bit key for each sample, from the seed and the sample's values, on the input's
    device. With one key for all inputs, inputs of different sizes would get the same numbers."""
    drawing, device = generators(inputs, seed), inputs[0].device
    seeds = ([each.initial_seed() for each in drawing(i)] for i in range(len(inputs)))
    keys = [torch.tensor(own, dtype=torch.int64, device="cpu") for own in seeds]
    return [own.cuda(device) for own in keys] if inputs[0].is_cuda else keys


def normal(keys: Tensor, j: int, shape: Sequence[int]) -> Tensor:
    """The j-th standard normal numbers of each key, (N, *shape), in float32, for all keys at once: pairs of
    uniform 32-bit numbers from splitmix64 (Steele et al. 2014), transformed in float64 (Box and Muller)."""
    size = math.prod(shape)
    half = -(-size // 2)
    z = keys[:, None] + torch.arange(j * half + 1, (j + 1) * half + 1, device=keys.device) * _GAMMA
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    z = z ^ _shifted(z, 31)
    radius = ((_shifted(z, 32) + 1).double() / 2**32).log_().mul_(-2).sqrt_()
    angle = (z & 0xFFFFFFFF).double() * (math.tau / 2**32)
    both = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
    return both[:, :size].float().reshape(-1, *shape)


_GAMMA = -0x61C8864680B583EB  # constants of splitmix64, as signed numbers


def _shifted(z: Tensor, by: int) -> Tensor:
    """A shift to the right that does not copy the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def between(inputs: Tensors, given: Sequence[Tensors], seed: int) -> Callable[[int], tuple[Tensors, Tensors]]:
    """A function from the index of a draw to a random point between a random baseline and the input, and
    input - baseline."""
    uniform, kinds = partial(torch.rand, 2, dtype=torch.float32, device="cpu"), [x.dtype for x in inputs]
    drawing = generators(inputs, seed)

    def drawn(j: int) -> tuple[Tensors, Tensors]:
        u, t = torch.stack([uniform(generator=each) for each in drawing(j)]).T
        rows = list(enumerate((u.double() * len(given)).int().tolist()))
        chosen = (torch.stack([given[i][k][n] for n, i in rows]) for k in range(len(inputs)))
        away = tuple(wide(x) - wide(b) for x, b in zip(inputs, chosen, strict=True))
        points = (wide(x) - column(1 - t, x).to(d) * d for x, d in zip(inputs, away, strict=True))
        return tuple(map(Tensor.to, points, kinds)), tuple(map(Tensor.to, away, kinds))

    return drawn


def uniform(x: Tensor, seed: int) -> Tensor:
    """Uniform numbers from 0 to 1, like x, on the CPU: from a seed and each sample's own values."""
    y = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    for own, values in zip(y, x, strict=True):
        own.uniform_(generator=generator_of(str(seed).encode(), bytes_of(values)))
    return y
