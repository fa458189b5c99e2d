"""Layer-wise relevance propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rectgrad import rules
from rectgrad.engine.op import Rules
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

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)
