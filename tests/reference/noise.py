"""The noise of SmoothGrad, number by number: splitmix64 (Steele, Lea and Flood 2014), then Box and Muller."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LIMIT = 2**64


def splitmix64(state: int, count: int) -> list[int]:
    """The first numbers of the generator, as its authors define it."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % LIMIT
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % LIMIT
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % LIMIT
        found.append(z ^ (z >> 31))
    return found


def normal(key: int, j: int, size: int) -> list[float]:
    """The j-th `size` numbers of a key. Each 64-bit number is a radius, its upper half, and an angle: their
    cosines come first, then their sines."""
    half = (size + 1) // 2
    drawn = splitmix64(key, (j + 1) * half)[j * half :]
    polar = [
        (math.sqrt(-2 * math.log(((z >> 32) + 1) / 2**32)), 2 * math.pi * (z % 2**32) / 2**32) for z in drawn
    ]
    return ([r * math.cos(t) for r, t in polar] + [r * math.sin(t) for r, t in polar])[:size]


def key_of(sample: Sequence[Tensor], seed: int, i: int) -> int:
    """The key of the i-th input tensor of a sample: a hash of the seed, i and all of the sample's values."""
    values = b"".join(np.float32(x.numpy()).tobytes() for x in sample)
    parts = (str(seed).encode(), str(i).encode(), values)
    digest = hashlib.blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def noise_of(sample: Sequence[Tensor], seed: int, j: int) -> list[Tensor]:
    """The j-th standard normal noise of each input tensor of a sample."""
    return [
        torch.tensor(normal(key_of(sample, seed, i), j, x.numel()), dtype=torch.float64).reshape(x.shape)
        for i, x in enumerate(sample)
    ]
