"""Rectified Gradient, the method of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rectgrad import ops, rules
from rectgrad.engine.backward import Pass, Plan
from rectgrad.engine.facts import Finder, find_channels, find_gates, find_last
from rectgrad.engine.op import Rules
from rectgrad.engine.request import Request
from rectgrad.kernels.class_maps import unknown_gate
from rectgrad.methods.method import Maps, Method, times
from rectgrad.methods.options import option


@dataclass(frozen=True)
class RectGrad(Method):
    """The gradient passes where activation * gradient exceeds the layer's q-th percentile."""

    q: float = option(
        98.0, "Percentile of a layer's scores that a unit must exceed; default: 98.", low=0, high=100
    )
    tau: float | None = option(None, "Constant threshold that replaces the percentile.")
    rule: str = option(
        "PR1",
        "Score of a unit: PR1 (a*R), PR2 (|a*R|), PR3 (a), PR4 (R), or mod (PR1 in last layers, else PR2).",
        choices=("PR1", "PR2", "PR3", "PR4", "mod"),
    )
    padding_trick: bool = option(True, "Drop the gradient where convolutions reach into zero padding.")
    prr: bool = option(False, "Max pooling distributes the gradient in proportion to its inputs.")
    multiply_by_input: bool = option(True, "Multiply the gradient by the input.")
    positive_only: bool = option(True, "Keep positive values only.")
    interpolation: str = option(
        "nearest", "Interpolation of the percentile: nearest or linear.", choices=("nearest", "linear")
    )
    gate: str | None = option(None, "Prefer units with evidence for the class: class.", choices=("class",))
    rectifies: ClassVar[bool] = True
    thresholds: ClassVar[bool] = True

    @property
    def title(self) -> str:  # type: ignore[override]
        return "RectGrad" + " PRR" * self.prr + " mod" * (self.rule == "mod") + " gated" * bool(self.gate)

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return self.tau is None or self.gate is not None

    @property
    def facts(self) -> tuple[Finder, ...]:  # type: ignore[override]
        return (find_last,) * (self.rule == "mod") + (find_channels,) * bool(self.gate)

    def rules(self) -> Rules:
        return rules.class_layer_rules(self.gated(unknown_gate)) if self.gate else self.gated(None)

    def prepared(self, request: Request, passed: Pass, scores: Tensor) -> Plan:
        return GatedRectGrad(self, request, passed, scores) if self.gate else self

    def gated(self, gate: Any) -> Rules:
        rectified = rules.rectified(self.q, self.tau, self.rule, self.interpolation, gate=gate)
        result = dict.fromkeys(ops.RECTIFIERS, rectified)
        if self.padding_trick:
            result["conv"] = rules.masked_padding()
        if self.prr:
            result["max_pool"] = rules.proportional_pooling()
        return result

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        maps = times(raw, inputs) if self.multiply_by_input else raw
        return tuple(m.clamp(min=0) for m in maps) if self.positive_only else maps


class GatedRectGrad(Plan):
    """RectGrad with the gate of a particular pass. At first, the plan of the pass that computes the gate."""

    def __init__(self, method: RectGrad, request: Request, passed: Pass, scores: Tensor) -> None:
        self.facts, self.rules = (find_gates,), rules.class_layer_rules  # type: ignore[misc,method-assign]
        gate = rules.ClassGate(self, request, passed, scores)
        self.class_layers, self.rectifies, self.thresholds = gate.layers, True, True  # type: ignore[misc]
        self.facts, self.rules = method.facts, lambda: method.gated(gate)  # type: ignore[misc,method-assign]
