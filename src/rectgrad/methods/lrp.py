"""Layer-wise relevance propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rectgrad import rules
from rectgrad.engine.diagnose import warn_if_relevance_explodes
from rectgrad.engine.op import Rules
from rectgrad.engine.request import Request
from rectgrad.methods.method import Maps, Method, times
from rectgrad.methods.options import option


@dataclass(frozen=True)
class EpsilonLRP(Method):
    """Layer-wise relevance propagation with the epsilon rule."""

    epsilon: float = option(1e-4, "Stabiliser of the epsilon rule; default: 0.0001.", low=0)
    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu")
    facts: ClassVar[tuple[str, ...]] = ("folded",)
    title: ClassVar[str] = "epsilon-LRP"

    def rules(self) -> Rules:
        return rules.lrp_rules(self.epsilon)

    def raw(self, request: Request) -> Maps:
        raw = super().raw(request)
        warn_if_relevance_explodes(request, self, raw)
        return raw

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)
