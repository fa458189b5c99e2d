"""The control of every experiment: a random map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rectgrad.engine.diagnose import check_inputs
from rectgrad.engine.request import Request
from rectgrad.kernels.draws import bytes_of, generator_of
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
