"""Matched comparisons: methods with the same post-processing, which explains many differences between
methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from rectgrad import rules
from rectgrad.engine.op import Rules
from rectgrad.engine.request import Request
from rectgrad.methods import GradientXInput, Method, Saliency
from rectgrad.methods.method import Maps
from rectgrad.metrics import matching
from rectgrad.verdict.rows import Row, is_gradient

HIGHEST = 0.98  # Gini index to which maps are cut at most


class Steps(NamedTuple):
    """The post-processing of a variant."""

    times_input: bool = False
    positive: bool = False
    padding: bool = False
    cut: bool = False


SAME_SPARSITY = "times input, positive part, same Gini index"
VARIANTS = {
    "no post-processing": Steps(),
    "times input, positive part": Steps(True, True),
    "times input, positive part, padding trick": Steps(True, True, True),
    SAME_SPARSITY: Steps(True, True, cut=True),
}


@dataclass(frozen=True)
class Matched(Method):
    """Wraps a method with the given post-processing."""

    over: Method = Saliency()
    times_input: bool = False
    positive: bool = False
    gini: float | None = None
    one_backward: ClassVar[bool] = False

    def maps(self, request: Request) -> Maps:
        return tuple(map(self.processed, self.over.maps(request), request.inputs))

    def processed(self, maps: Tensor, inputs: Tensor) -> Tensor:
        maps = matching.times_input(maps, inputs) if self.times_input else maps
        maps = matching.positive_part(maps) if self.positive else maps
        return matching.cut_to_gini(maps, self.gini) if self.gini is not None else maps


@dataclass(frozen=True)
class Padded(Method):
    """Wraps a method with the padding trick, without its own post-processing."""

    over: Method = Saliency()

    def rules(self) -> Rules:
        return {**self.over.rules(), "conv": rules.masked_padding()}

    @property
    def rectifies(self) -> bool:  # type: ignore[override]
        return self.over.rectifies

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return self.over.per_sample

    @property
    def facts(self) -> Any:  # type: ignore[override]
        return self.over.facts


def bare(method: Method) -> Method:
    """The method without the steps that are matched."""
    if isinstance(method, GradientXInput):
        return Saliency()
    steps = ("multiply_by_input", "positive_only", "padding_trick")
    return replace(method, **{f.name: False for f in fields(method) if f.name in steps})


def matched_rows(leaders: Sequence[Row], gini: Mapping[str, float]) -> dict[str, list[Row]]:
    """For each variant, the leaders with its post-processing.

    gini: the mean index of each leader's own maps; all are cut to the largest. Maps that are contributions
    already (integrated gradients, LRP, CAM) are not multiplied by the input again. The padding trick is for
    methods of one backward pass that have no rule for convolutions.
    """
    target = min(max((gini[row.name] for row in leaders if row.name in gini), default=0.0), HIGHEST)
    found: dict[str, list[Row]] = {}
    for variant, steps in VARIANTS.items():
        rows = []
        for row in leaders:
            base = bare(row.method)
            times = steps.times_input and is_gradient(base)
            base = _padded(base) if steps.padding else base
            method = Matched(base, times, steps.positive, round(target, 3) if steps.cut else None)
            rows.append(Row(f"{row.name}: {variant}", method))
        found[variant] = rows
    return found


def without_variant(name: str) -> str:
    """The name of the method, from that of a row of a matched comparison."""
    method, _, variant = name.rpartition(": ")
    return method if variant in VARIANTS else name


def _padded(method: Method) -> Method:
    """The method with the padding trick, its own if it has one; unchanged if it does not support it."""
    if any(each.name == "padding_trick" for each in fields(method)):
        return replace(method, padding_trick=True)  # type: ignore[call-arg]
    one_pass = method.one_backward and method.runs_model
    takes = one_pass and is_gradient(method) and "conv" not in method.rules()
    return Padded(method) if takes else method
