"""DeepLIFT, from one baseline or from several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad import rules
from rectgrad.engine.diagnose import first_wrong, warn
from rectgrad.engine.op import Rules
from rectgrad.engine.request import Request
from rectgrad.kernels.baseline import baselines, differences_times, each_baseline, weighted_sum, with_rows
from rectgrad.kernels.reference import per_sample
from rectgrad.methods.method import Maps, Method
from rectgrad.methods.options import Value, check_baseline, option


@dataclass(frozen=True)
class DeepLift(Method):
    """DeepLIFT with the Rescale rule: contributions to the difference from a baseline input.

    baseline: a number or a tensor (one for all samples, or one for each; a tuple for several inputs).
    """

    baseline: Value = option(0.0, "Value that stands for no information; default: 0, mid-grey.")
    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu", "norm", "vector_norm")
    title: ClassVar[str] = "DeepLIFT"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_baseline(self)

    def rules(self) -> Rules:
        return rules.deeplift_rules()

    def raw(self, request: Request) -> Maps:
        raw = request.backward(self, baselines(self.baseline, request.inputs))
        if request.difference is not None:
            self._check_completeness(request, raw, request.difference)
        return raw

    def _check_completeness(self, request: Request, raw: Maps, difference: Tensor) -> None:
        """Warn if the contributions do not sum to the difference of the scores."""
        trace = request.trace
        assert trace is not None
        error: Any = sum(per_sample(m).sum(1) for m in self.finish(raw, request.inputs)) - difference
        trace.completeness_error = error
        # Batch statistics are not a function of the sample; training mode has a warning of its own.
        if request.diagnosing or (request.region is not None and request.region.trains):
            return
        i = first_wrong(request, error.abs() > 0.05 * difference.abs() + 1e-4)
        if i is not None:
            total, right = float(difference[i] + error[i]), float(difference[i])
            plain = f" (without an exact rule: {', '.join(trace.plain()[:3])})" if trace.plain() else ""
            sums = f"DeepLIFT's map of sample {request.number(i)} sums to {total:.4g} instead of {right:.4g}"
            warn(f"{sums}{plain}; another baseline may do better")

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return differences_times(raw, inputs, self.baseline)

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, baseline=with_rows(self.baseline, inputs, lambda rows: rows[start:stop]))

    def repeated(self, k: int, inputs: Maps) -> Method:
        return replace(self, baseline=with_rows(self.baseline, inputs, lambda rows: torch.cat([rows] * k)))


@dataclass(frozen=True)
class DeepLiftShap(Method):
    """The mean of DeepLIFT over several baselines, such as a sample of the training data.

    baselines: a tensor (B, ...), the same for all samples; a tuple for several inputs. They must be given.
    """

    baselines: Tensor | tuple[Tensor, ...] | None = option(None, "Inputs without information.")
    one_backward: ClassVar[bool] = False
    title: ClassVar[str] = "DeepLIFT SHAP"

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self.baselines is not None

    def rules(self) -> Rules:
        return rules.deeplift_rules()

    def raw(self, request: Request) -> Maps:
        if self.baselines is None:
            raise ValueError("DeepLiftShap needs baselines, a tensor (B, ...): baselines=images[:20]")
        given = each_baseline(self.baselines, request.inputs)
        return weighted_sum((1 / len(given), DeepLift(b).maps(request.at(request.inputs))) for b in given)
