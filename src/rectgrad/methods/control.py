"""The control of every experiment: a random map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rectgrad.engine.diagnose import check_inputs
from rectgrad.engine.request import Request
from rectgrad.kernels.draws import uniform
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
        return tuple(uniform(x.detach().cpu(), self.seed).to(x) for x in request.inputs)
