"""Methods without a threshold: the gradient, gradient times input, guided backprop and deconv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rectgrad import ops, rules
from rectgrad.engine.op import Rules
from rectgrad.methods.method import Maps, Method, times
from rectgrad.methods.options import option


@dataclass(frozen=True)
class Saliency(Method):
    """The gradient of the score with respect to the input, with its sign."""

    title: ClassVar[str] = "saliency"


@dataclass(frozen=True)
class GradientXInput(Method):
    """The gradient times the input."""

    title: ClassVar[str] = "gradient x input"

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)


@dataclass(frozen=True)
class GuidedBackprop(Method):
    """The gradient passes through a unit if both the gradient and the pre-activation are positive."""

    multiply_by_input: bool = option(False, "Multiply the gradient by the input.")
    rectifies: ClassVar[bool] = True
    title: ClassVar[str] = "guided backprop"

    def rules(self) -> Rules:
        return rules.guided()

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs) if self.multiply_by_input else raw


@dataclass(frozen=True)
class Deconv(GuidedBackprop):
    """The gradient passes through a unit if it is positive."""

    title: ClassVar[str] = "deconv"

    def rules(self) -> Rules:
        return dict.fromkeys(ops.RECTIFIERS, rules.deconv())
