"""The control of every experiment: a random map."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rectgrad.engine.diagnose import check_inputs
from rectgrad.engine.request import Request
from rectgrad.methods.method import Maps, Method
from rectgrad.methods.options import option


@dataclass(frozen=True)
class RandomMap(Method):
    """Uniform noise that depends on the seed and the sample's own values: the control of every experiment."""

    seed: int = option(0, "Seed of the random numbers.")
    one_backward: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    title: ClassVar[str] = "random"

    def raw(self, request: Request) -> Maps:
        check_inputs(request.inputs)
        return tuple(self._noise(x.detach().cpu()).to(x) for x in request.inputs)

    def _noise(self, x: Tensor) -> Tensor:
        """One transfer from the device and back for all samples."""
        y = torch.empty(x.shape, dtype=torch.float32, device="cpu")
        for own, values in zip(y, x, strict=True):
            own.uniform_(generator=generator_of(str(self.seed).encode(), bytes_of(values)))
        return y


def bytes_of(x: Tensor) -> bytes:
    """The values of a tensor on the CPU, as bytes."""
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def generator_of(*parts: bytes) -> torch.Generator:
    """A random generator that depends on its parts alone, on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest.digest(), "big") >> 1)
