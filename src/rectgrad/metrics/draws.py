"""Random numbers that depend on a seed and on the sample's own values, not on the batch.

A metric is therefore the same for one photo alone, in any batch and on any machine. Numbers are drawn on the
CPU in float32.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

MANY = 2**20  # numbers from which threads save time


def seeded(*parts: bytes) -> torch.Generator:
    """A generator on the CPU whose seed is a hash of the parts."""
    digest = hashlib.blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=8)
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest.digest(), "big") >> 1)


class Draws:
    """One random generator per sample. Each call continues the sequence of every sample."""

    def __init__(self, inputs: Tensor, seed: int) -> None:
        values = inputs.detach().float().cpu().flatten(1).contiguous().numpy()
        self.generators = [seeded(str(seed).encode(), each.tobytes()) for each in values]
        self.device = inputs.device

    def normal(self, *shape: int) -> Tensor:
        """(N, *shape), standard normal."""
        return self._filled("normal_", shape)

    def uniform(self, *shape: int) -> Tensor:
        """(N, *shape), uniform in [0, 1)."""
        return self._filled("uniform_", shape)

    def subset(self, total: int, size: int) -> Tensor:
        """(N, total), boolean: `size` random positions of each sample are True."""
        drawn = self.uniform(total)
        return torch.zeros_like(drawn, dtype=torch.bool).scatter_(1, drawn.topk(size, dim=1).indices, True)

    def _filled(self, fill: str, shape: tuple[int, ...]) -> Tensor:
        drawn = torch.empty(len(self.generators), *shape, dtype=torch.float32, device="cpu")

        def fill_one(own: Tensor, generator: torch.Generator) -> None:
            getattr(own, fill)(generator=generator)

        if drawn.numel() < MANY:
            list(map(fill_one, drawn, self.generators))
        else:
            with ThreadPoolExecutor() as pool:  # torch draws without Python's lock, on one core
                list(pool.map(fill_one, drawn, self.generators))
        return drawn.to(self.device)
