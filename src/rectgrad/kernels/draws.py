"""Random numbers that depend on a seed and on values alone: the same on every machine, device and type."""

from __future__ import annotations

import hashlib
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
    """A random generator that depends on its parts alone."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest.digest(), "big") >> 1)


def generators(inputs: Sequence[Tensor], seed: int) -> Callable[[int], list[torch.Generator]]:
    """From the number of a draw to a random generator for each sample, which depends on the seed, the number
    and the sample's own values. It draws on the CPU."""
    cpu = [x.detach().float().cpu() for x in inputs]  # equal values, equal numbers, whatever the type
    values = [b"".join(map(bytes_of, row)) for row in zip(*cpu, strict=True)]
    return lambda j: [generator_of(str(seed).encode(), str(j).encode(), each) for each in values]


def noisy(inputs: Tensors, noise: float, seed: int) -> Callable[[int], Tensors]:
    """From a number to a copy with normal noise, whose standard deviation is a share of each sample's value
    range."""
    scale, drawing = [noise * value_range(x) for x in inputs], generators(inputs, seed)
    normal = partial(torch.randn, dtype=torch.float32, device="cpu")

    def point(j: int) -> Tensors:
        own = drawing(j)
        drawn = (torch.stack([normal(x.shape[1:], generator=each) for each in own]).to(x) for x in inputs)
        return tuple(x.detach() + s * e for x, s, e in zip(inputs, scale, drawn, strict=True))

    return point


def between(inputs: Tensors, given: Sequence[Tensors], seed: int) -> Callable[[int], tuple[Tensors, Tensors]]:
    """From a number to a random point between a random one of the given baselines and the input, and
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
