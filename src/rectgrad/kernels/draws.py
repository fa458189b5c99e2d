"""Random numbers that depend on a seed and on values alone: the same on every machine, device and type."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
