"""DeepLIFT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from rectgrad import rules
from rectgrad.engine.op import Rules
from rectgrad.engine.request import Request
from rectgrad.methods.baseline import baselines, differences_times, with_rows
from rectgrad.methods.method import Maps, Method
from rectgrad.methods.options import check_baseline, option


@dataclass(frozen=True)
class DeepLift(Method):
    """DeepLIFT with the Rescale rule: contributions to the difference from a baseline input.

    baseline: a number or a tensor (one for all samples, or one for each; a tuple for several inputs).
    """

    baseline: Any = option(0.0, "Value that stands for no information; default: 0, mid-grey.")
    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu", "norm", "vector_norm")
    title: ClassVar[str] = "DeepLIFT"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_baseline(self)

    def rules(self) -> Rules:
        return rules.deeplift_rules()

    def raw(self, request: Request) -> Maps:
        x0 = baselines(self.baseline, request.inputs)
        return request.backward_from_baseline(self, x0, lambda raw: self.finish(raw, request.inputs))

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return differences_times(raw, inputs, self.baseline)

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, baseline=with_rows(self.baseline, inputs, lambda rows: rows[start:stop]))

    def repeated(self, k: int, inputs: Maps) -> Method:
        return replace(self, baseline=with_rows(self.baseline, inputs, lambda rows: torch.cat([rows] * k)))
