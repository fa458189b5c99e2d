"""Random numbers that depend on a seed and on values alone: the same on every machine, device and type."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.kernels.baseline import Tensors, column, value_range
from rectgrad.kernels.reference import wide

BLOCK = 16  # masks that are made at a time


def bytes_of(x: Tensor) -> bytes:
    """The values of a tensor on the CPU, as bytes."""
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def generator_of(*parts: bytes) -> torch.Generator:
    """A random generator that depends on its parts alone."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest.digest(), "big") >> 1)


def generators(inputs: Sequence[Tensor], seed: int, count: int) -> Iterator[list[torch.Generator]]:
    """For each of `count` draws a random generator for each sample, which depends on the seed, the number of
    the draw and the sample's own values. It draws on the CPU."""
    cpu = [x.detach().float().cpu() for x in inputs]  # equal values, equal numbers, whatever the type
    values = [b"".join(map(bytes_of, row)) for row in zip(*cpu, strict=True)]
    for j in range(count):
        yield [generator_of(str(seed).encode(), str(j).encode(), each) for each in values]


def noisy(inputs: Tensors, noise: float, seed: int, count: int) -> Iterator[Tensors]:
    """Copies with normal noise, whose standard deviation is a share of each sample's value range."""
    scale = [noise * value_range(x) for x in inputs]
    normal = partial(torch.randn, dtype=torch.float32, device="cpu")
    for own in generators(inputs, seed, count):
        drawn = (torch.stack([normal(x.shape[1:], generator=each) for each in own]).to(x) for x in inputs)
        yield tuple(x.detach() + s * e for x, s, e in zip(inputs, scale, drawn, strict=True))


def between(
    inputs: Tensors, given: Sequence[Tensors], seed: int, count: int
) -> Iterator[tuple[Tensors, Tensors]]:
    """Random points between a random one of the given baselines and the input, and input - baseline."""
    uniform, kinds = partial(torch.rand, 2, dtype=torch.float32, device="cpu"), [x.dtype for x in inputs]
    for own in generators(inputs, seed, count):
        u, t = torch.stack([uniform(generator=each) for each in own]).T
        rows = list(enumerate((u.double() * len(given)).int().tolist()))
        chosen = (torch.stack([given[i][k][n] for n, i in rows]) for k in range(len(inputs)))
        away = tuple(wide(x) - wide(b) for x, b in zip(inputs, chosen, strict=True))
        points = (wide(x) - column(1 - t, x).to(d) * d for x, d in zip(inputs, away, strict=True))
        yield tuple(map(Tensor.to, points, kinds)), tuple(map(Tensor.to, away, kinds))


def random_masks(
    sides: Sequence[int], count: int, cells: int, keep: float, random: torch.Generator, like: Tensor
) -> Iterator[Tensor]:
    """Masks of shape `sides`, of the type and on the device of `like`, as in RISE (Petsiuk et al. 2018). Each
    is a grid of cells, 1 with probability `keep` and else 0, upsampled linearly to one cell more than is
    needed, and cut out at a random place."""
    grids = torch.empty(count, *(cells,) * len(sides), dtype=torch.float32, device="cpu")
    grids = grids.uniform_(generator=random) < keep
    steps = [-(-side // cells) for side in sides]
    shifts = [torch.randint(step, (count,), device="cpu", generator=random) for step in steps]
    larger = [_upsampling(cells, (cells + 1) * step) for step in steps]
    for start in range(0, count, BLOCK):
        found = grids[start : start + BLOCK].to(like)
        for d, side in enumerate(sides):
            at = shifts[d][start : start + BLOCK, None] + torch.arange(side, device="cpu")
            rows = larger[d][at].to(like)
            found = torch.einsum("bij,b...j->b...i", rows, found.movedim(d + 1, -1)).movedim(-1, d + 1)
        yield from found


def _upsampling(cells: int, size: int) -> Tensor:
    """The matrix that stretches a row of cells."""
    rows = torch.eye(cells, dtype=torch.float64, device="cpu")
    return F.interpolate(rows[None], size, mode="linear", align_corners=False)[0].T
