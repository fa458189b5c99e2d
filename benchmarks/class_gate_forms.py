"""Forms of the class gate: RectGrad with other functions of the class map, and the rows of the study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad import (
    GradCAM,
    GradientXInput,
    GuidedBackprop,
    GuidedGradCAM,
    IntegratedGradients,
    RectGrad,
    ops,
    rules,
)
from rectgrad.kernels.class_maps import Gate, class_map, resized
from rectgrad.kernels.reference import percentile
from rectgrad.methods import Method
from rectgrad.methods.rectgrad import GatedRectGrad
from rectgrad.rules.rectified import score


@dataclass(frozen=True)
class Quiet(RectGrad):
    """RectGrad that does not look for the layer at which a zero map stopped."""

    thresholds: ClassVar[bool] = False


@dataclass(frozen=True)
class Form(Quiet):
    """Gated RectGrad with another gate.

    power, cut: g ** power; 1 where g exceeds the cut, else 0; or with both, the same without a hard edge,
    g ** power / (g ** power + cut ** power).
    soft: a unit below tau passes R * (s / tau) ** soft, where s > 0, instead of nothing; least: nothing below
    this percentile; ratio: nothing below this multiple of tau.
    shrink: a unit above tau passes R * (1 - tau / s) ** shrink instead of R.
    within: tau is the percentile of the units whose g exceeds this number. mass: the units above tau have
    this share of the sum of all positive scores.
    bottom: q at the first rectified activation; it changes linearly up to q at the last one.
    upper: rule applies to this share of the rectified activations, from the output, rounded down; PR1 to the
    others.
    normed: s is divided by the sum over channels of |a * R| to this power.
    dilate: the class map is the maximum of this many positions in each direction.
    passes: what passes is R * g ** passes.
    end: the map is multiplied by c ** end.
    cam: the class map's formula, or "rectified", a * R of the units that pass at the class layer.
    top: the share of the rectified activations, from the output, at which the gate acts.
    layer: the module whose output is used instead of the class layer. both: times the class layer's; mean:
    the mean of the two.
    absolute: the gradient is multiplied by |x| instead of x.
    against: c is that of the output minus the mean of all outputs, or of the log-probability.
    conserve: what passes is scaled to the sum of all positive scores.
    """

    padding_trick: bool = False
    gate: str | None = "class"
    power: float = 1.0
    cut: float | None = None
    soft: float | None = None
    least: float | None = None
    ratio: float = 0.0
    shrink: float = 0.0
    within: float | None = None
    mass: float | None = None
    bottom: float | None = None
    upper: float = 1.0
    normed: float = 0.0
    dilate: int = 1
    passes: float = 0.0
    end: float = 0.0
    cam: str = "hirescam"
    top: float = 1.0
    layer: str | None = None
    both: bool = False
    mean: bool = False
    absolute: bool = False
    against: str | None = None
    conserve: bool = False
    everything = property(lambda self: self.layer is not None)

    def prepared(self, request: Any, passed: Any, scores: Tensor) -> Any:
        return FormPlan(self, request, passed, scores)

    def gated(self, gate: Any) -> Any:
        found = super().gated(gate)
        rule = found["relu"]
        if any(getattr(self, field) != getattr(Form, field) for field in WEIGHTED):
            rule = replace(rule, apply=self._weighted(gate))
        if self.conserve:
            rule = conserved(rule)
        return found | dict.fromkeys(ops.RECTIFIERS, rule)

    def finish(self, raw: Any, inputs: Any) -> Any:
        return super().finish(raw, tuple(x.abs() for x in inputs) if self.absolute else inputs)

    def _weighted(self, gate: Any) -> Callable[[Any, Tensor], Tensor]:
        def apply(op: Any, R: Tensor) -> Tensor:
            op.state.report(R)
            g, (i, n) = gate(op), gate.place(op)
            s = score(op, R, self.rule if i < int(self.upper * n) else "PR1", gate=gate)
            if self.normed and s.dim() > 2:
                each = (op.output * R).abs().sum(1, keepdim=True)
                s = s / each.clamp(min=torch.finfo(s.dtype).tiny) ** self.normed
            q = self.q if self.bottom is None else self.q + (self.bottom - self.q) * i / (n - 1)
            weight = self._weight(s.reshape(op.batch, -1), q, g, R.shape)
            passed = R * weight.reshape(R.shape)
            return passed * g**self.passes if self.passes and g is not None else passed

        return apply

    def _weight(self, s: Tensor, q: float, g: Tensor | None, shape: torch.Size) -> Tensor:
        tau = self._tau(s, q, g, shape).clamp(min=0)
        tiny = torch.finfo(s.dtype).tiny
        if self.shrink:
            return (1 - tau / s.clamp(min=tiny)).clamp(min=0) ** self.shrink
        if self.soft is None:
            return (s > tau).to(s)
        below = (s.clamp(min=0) / tau.clamp(min=tiny)).clamp(max=1)
        weight = torch.where(tau > 0, below**self.soft, s > tau)  # where tau is 0, nothing is below it
        least = self.ratio * tau if self.least is None else percentile(s, self.least).unsqueeze(1)
        return weight * (s > least)

    def _tau(self, s: Tensor, q: float, g: Tensor | None, shape: torch.Size) -> Tensor:
        """(N, 1). A percentile of some units is that of all, where the others are below each of them."""
        if self.mass is not None:
            ordered = s.clamp(min=0).sort(1, descending=True).values
            sums = ordered.double().cumsum(1)
            index = (sums < self.mass * sums[:, -1:]).sum(1, keepdim=True) + 1
            return ordered.gather(1, index.clamp(max=s.shape[1] - 1))
        if self.within is None or g is None:
            return percentile(s, q).unsqueeze(1)
        inside = (g > self.within).expand(shape).reshape(s.shape)
        ordered = torch.where(inside, s, -torch.inf).sort(1, descending=True).values
        index = ((inside.sum(1, keepdim=True) - 1) * (1 - q / 100)).round().long().clamp(min=0)
        return ordered.gather(1, index)


WEIGHTED = ("soft", "shrink", "within", "mass", "bottom", "upper", "normed", "passes")


class FormPlan(GatedRectGrad):
    """The plan of a form: the same walks, another gate."""

    def __init__(self, method: Form, request: Any, passed: Any, scores: Tensor) -> None:
        super().__init__(method, request, passed, scores)
        gate = FormGate(method, request, passed, scores)
        self.rules = lambda: method.gated(gate)
        self._cams, self._end = gate.cams, method.end

    def result(self, request: Any, passed: Any, scores: Tensor) -> Any:
        maps = super().result(request, passed, scores)
        for _, cam in self._cams._cams if self._end else ():
            maps = tuple(m * resized(cam, m.shape[2:]).to(m) ** self._end for m in maps)
        return maps


class FormGate(rules.ClassGate):
    def __init__(self, method: Form, request: Any, passed: Any, scores: Tensor) -> None:
        walk, plain = GradCAM(), replace(request, observe=None)
        super().__init__(walk, plain, passed, scores)
        usual, target = self.cams, request.resolved(passed.outputs)
        asked = scores if method.against is None else passed.scores(AGAINST[method.against](target))
        found = rules.class_layers(walk, plain, passed, asked, method.layer)
        passed.scores(target)  # from which the next walk starts
        self.cams = Gate([(each.rows, cam(each.a, each.R, method)) for each in found])
        self._usual = usual
        self._method = method
        rectified = [op for op in passed.ops if op.family in ops.RECTIFIERS]
        self._place = {id(op): (i, len(rectified)) for i, op in enumerate(reversed(rectified))}
        self._acts = {id(op) for op in rectified[len(rectified) - round(method.top * len(rectified)) :]}
        self._known: dict[int, Tensor | None] = {}

    def __call__(self, op: Any) -> Tensor | None:
        if id(op) not in self._known:
            self._known[id(op)] = self._computed(op) if id(op) in self._acts else None
        return self._known[id(op)]

    def place(self, op: Any) -> tuple[int, int]:
        """How many rectified activations follow, and how many there are."""
        return self._place[id(op)]

    def _computed(self, op: Any) -> Tensor | None:
        g = super().__call__(op)
        if g is None:
            return None
        if self._method.both or self._method.mean:
            other = self._usual.at(self._images().get(id(op)), tuple(op.shape))
            g = g * other if self._method.both else (g + other) / 2
        power, cut = self._method.power, self._method.cut
        if cut is not None and power == 1:
            return (g > cut).to(g)
        return g**power if cut is None else g**power / (g**power + cut**power)


AGAINST: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "mean": lambda target: lambda outputs: target(outputs) - outputs.mean(1),
    "ten largest": lambda target: lambda outputs: target(outputs) - outputs.topk(10, 1).values.mean(1),
    "log-probability": lambda target: lambda outputs: target(outputs) - outputs.logsumexp(1),
}


def cam(a: Tensor, R: Tensor, method: Form) -> Tensor:
    if method.cam != "rectified":
        found, wide = class_map(a, R, method.cam), method.dilate
        return found if wide == 1 else F.max_pool2d(found, wide, 1, wide // 2)
    s = (a.float() * R.float()).flatten(1)
    tau = percentile(s, method.q).clamp(min=0).unsqueeze(1)
    return torch.where(s > tau, s, 0).reshape(a.shape).sum(1, keepdim=True)


def conserved(rule: Any) -> Any:
    """A rectified rule whose result is scaled: the passing scores a * R sum to what all positive ones do."""

    def apply(op: Any, R: Tensor) -> Tensor:
        passed = rule.apply(op, R)
        passed = passed if isinstance(passed, Tensor) else passed.dense()
        own = ((op.output * each).clamp(min=0).reshape(op.batch, -1).sum(1) for each in (R, passed))
        before, after = own
        factor = torch.where(after > 0, before / after.clamp(min=torch.finfo(after.dtype).tiny), 1)
        return passed * factor.reshape(-1, *(1,) * (passed.dim() - 1))

    return replace(rule, apply=apply)


def baseline() -> dict[str, Method]:
    """The methods that the forms are compared with, by the name of their row; the slow one is last."""
    plain = {"padding_trick": False}
    return {
        "gated": Quiet(gate="class"),
        "gated, no trick": Quiet(gate="class", **plain),
        "rectgrad": Quiet(),
        "rectgrad, no trick": Quiet(**plain),
        "guided backprop x c": GuidedGradCAM(GuidedBackprop(), variant="hirescam"),
        "guided backprop x input x c": GuidedGradCAM(
            GuidedBackprop(multiply_by_input=True), variant="hirescam"
        ),
        "rectgrad x c": GuidedGradCAM(Quiet(), variant="hirescam"),
        "rectgrad x c, no trick": GuidedGradCAM(Quiet(**plain), variant="hirescam"),
        "gated, q=95": Quiet(gate="class", q=95),
        "gated, q=95, no trick": Quiet(gate="class", q=95, **plain),
        "c alone": GradCAM(variant="hirescam"),
        "gradient x input": GradientXInput(),
        "integrated gradients": IntegratedGradients(),
    }


LOG, TEN = {"against": "log-probability"}, {"against": "ten largest"}
FORMS: tuple[dict[str, Any], ...] = (
    *({"rule": rule, "soft": 0.5, "power": power} for rule in ("mod", "PR2") for power in (1, 2)),
    *({"rule": "mod", "soft": soft, "power": 2} for soft in (0.25, 1)),
    *({"rule": "mod", "soft": 0.5, "power": power, "q": 96} for power in (1, 2)),
    {"rule": "mod", "soft": 1, "power": 1, "q": 96},
    {"rule": "mod", "soft": 0.5, "power": 4},
    *({"soft": soft, "power": power} for soft in (0.5, 1) for power in (2, 4)),
    {"soft": 1, "cut": 0.5},
    {"soft": 1, **LOG},
    {"soft": 1, **TEN},
    *({"soft": soft, "power": 8, "cut": 0.5} for soft in (0.5, 1)),
    *({"soft": 0.5, "power": power, "q": q} for power in (2, 4, 8) for q in (95, 99)),
    *({"soft": 0.25, "power": power, "q": q} for power in (2, 4, 8) for q in (98, 99)),
    {"soft": 0.5, "power": 8},
    {"soft": 1},
    *({"soft": 1, "power": power, "q": 95} for power in (2, 4, 8)),
    *({"soft": 0.5, "power": 2, **other} for other in (LOG, TEN)),
    {"soft": 1, "cut": 0.5, "within": 0.5, "q": 90},
    {"soft": 0.5, "power": 4, "end": 1},
    {"soft": 0.5, "power": 4, "multiply_by_input": False},
    {"soft": 0.5, "power": 4, "padding_trick": True},
    {"soft": 0.5, "power": 4, "positive_only": False},
    {"soft": 0.5, "power": 4, "conserve": True},
    {"soft": 0.5, "power": 4, "top": 0.5},
    {"soft": 0.5, "passes": 1},
    {"soft": 0.5, "passes": 0.1, "power": 2},
    {"rule": "mod", "soft": 0.5, "power": 2, "padding_trick": True},
    # A hard threshold.
    *({"power": power, "q": q} for power in (2, 4) for q in (90, 95, 96)),
    *({"cut": 0.5, "q": q} for q in (90, 96)),
    {"cut": 0.5, "within": 0.5, "q": 90},
    {"multiply_by_input": False},
    {"end": 2, "q": 95},
    {"passes": 1, "q": 95},
    {"q": 90},
    LOG,
    {"q": 96, **LOG},
    {"power": 2, "q": 95, **LOG},
    TEN,
    {"against": "mean"},
    {"conserve": True},
    {"conserve": True, "q": 95},
    *({"power": power} for power in (0.5, 2, 4)),
    *({"cut": cut} for cut in (0.25, 0.5, 0.75)),
    *({"cam": cam} for cam in ("layercam", "gradcam++", "rectified")),
    *({"rule": rule} for rule in ("PR2", "mod")),
    *({"top": top} for top in (0.25, 0.5, 0.75)),
)
# Forms in which most units pass nothing.
PR2 = {"rule": "PR2"}
# At all but the first rectified activation. The commands in the records of SPARSE do not name this `upper`.
NEARLY = {**PR2, "upper": 0.98}
SOFT = {**NEARLY, "soft": 0.5}
SPARSE: tuple[dict[str, Any], ...] = (
    *({**PR2, "q": q} for q in (90, 93, 95, 96, 97)),
    *({**NEARLY, "shrink": shrink, "q": q} for shrink in (0.5, 1) for q in (80, 90)),
    *({"shrink": 1, "q": q} for q in (80, 90)),
    *({**SOFT, "least": least} for least in (80, 90, 95)),
    *({**NEARLY, "bottom": bottom} for bottom in (80, 90)),
    {**NEARLY, "q": 90, "bottom": 98},
    {"bottom": 90},
    *({**NEARLY, "mass": mass} for mass in (0.3, 0.5, 0.7)),
    {"mass": 0.5},
    *({**NEARLY, "normed": normed, "q": 95} for normed in (0.5, 1)),
    *({**PR2, "upper": upper, "q": 95} for upper in (0.25, 0.5, 0.75)),
    *({**NEARLY, "passes": passes, "q": 93} for passes in (0.05, 0.1)),
    *({"passes": passes, "q": 93} for passes in (0.05, 0.1)),
    *({**PR2, "end": end, "q": 93} for end in (0.5, 1)),
    *({"end": end, "q": 95} for end in (1, 2)),
    {**NEARLY, "within": 0.25, "q": 95},
    {**NEARLY, "within": 0.25, "q": 90},
    {**PR2, "cut": 0.25, "q": 95},
    {**PR2, "power": 0.5, "q": 95},
    {**PR2, "power": 2, "q": 95},
    {**PR2, "dilate": 3, "q": 95},
    {**PR2, "q": 95, "positive_only": False},
    {**PR2, "q": 95, "multiply_by_input": False},
    {**PR2, "q": 95, "absolute": True},
    {**PR2, "conserve": True, "q": 95},
    {**PR2, "top": 0.5, "q": 95},
    *({**SOFT, "ratio": ratio} for ratio in (0.1, 0.25)),
    *({**SOFT, "least": 85, "upper": upper} for upper in (0.75, 0.9)),
    {**SOFT, "least": 85, "upper": 0.75, "power": 2},
    *({**SOFT, "least": 85, "upper": upper, "cut": 0.5} for upper in (0, 0.5, 0.75, 0.98)),
    {**SOFT, "least": 85, "q": 96},
    {**SOFT, "least": 85, "normed": 0.5},
    {**SOFT, "least": 85, "passes": 0.05, "q": 96},
    {**SOFT, "least": 85, "power": 0.5},
    {**SOFT, "least": 85, "bottom": 92},
    {**SOFT, "least": 85, "positive_only": False},
    {**SOFT, "least": 85, "multiply_by_input": False},
    {**SOFT, "least": 85, "absolute": True},
    {**SOFT, "least": 85, "dilate": 3},
    {**SOFT, "least": 85, "soft": 0.25, "passes": 0.05},
    {**SOFT, "least": 85, **LOG},
    {**PR2, "upper": 0.75, "passes": 0.1, "q": 94},
    {**PR2, "upper": 0.75, "cut": 0.5, "q": 95},
    {**PR2, "upper": 0.5, "cut": 0.5, "q": 95},
    {"cut": 0.5, "q": 94, "passes": 0.1},
    {**SOFT, "least": 85, "upper": 0.9, "cut": 0.25},
    {**SOFT, "least": 85, "upper": 0.9, "normed": 0.25},
    {**SOFT, "least": 85, "upper": 0.9, "normed": 0.5, "q": 99},
    {**SOFT, "least": 85, "upper": 0.8, "normed": 0.5, "q": 99, "cut": 0.35},
    {**SOFT, "least": 85, "upper": 0.8, "normed": 0.5, "q": 99, "power": 2},
    {**SOFT, "least": 80, "normed": 0.5, "q": 99},
    {**SOFT, "least": 85, "normed": 0.25},
    {**SOFT, "upper": 0.9, "normed": 0.5, "q": 99},
    {**SOFT, "least": 85, "upper": 0.75, "normed": 0.5, "q": 99, "cut": 0.3},
    {**SOFT, "least": 80, "upper": 0.75, "normed": 0.5, "q": 99, "cut": 0.35},
    {**SOFT, "least": 85, "upper": 0.75, "normed": 0.5, "q": 99, "cut": 0.5},
    *({**PR2, "upper": 0.8, "normed": 0.5, "q": q, "cut": 0.35} for q in (96, 97, 97.5, 98)),
    {**PR2, "upper": 0.9, "normed": 0.5, "q": 97},
    {**PR2, "upper": 0.75, "normed": 0.5, "q": 97, "cut": 0.3},
    {**PR2, "upper": 0.9, "normed": 0.5, "q": 97, "cut": 0.3},
    {**NEARLY, "normed": 0.5, "q": 97.5, "cut": 0.35},
    {**PR2, "upper": 0.8, "normed": 0.5, "q": 97.5, "power": 2},
    {**PR2, "upper": 0.8, "normed": 1, "q": 97.5, "cut": 0.35},
    {**PR2, "upper": 0.5, "normed": 0.5, "q": 97.5, "cut": 0.5},
    {"normed": 0.5, "q": 97.5, "cut": 0.35},
    *({**PR2, "upper": upper, "normed": 0.5, "q": 97, "cut": 0.35, "end": 1} for upper in (0.61, 0.8)),
    {**PR2, "upper": 0.7, "normed": 0.5, "q": 97.5, "cut": 0.3},
    {**PR2, "upper": 0.8, "normed": 0.5, "q": 97.5, "cut": 0.35, "top": 0.5},
    *(
        {**PR2, "upper": upper, "normed": 0.5, "q": 97.5, "cut": cut, "top": top}
        for upper, top, cut in ((0.8, 0.5, 0.45), (0.8, 0.7, 0.4), (0.75, 0.75, 0.4), (0.65, 0.65, 0.45))
    ),
    {**PR2, "upper": 0.8, "normed": 0.5, "q": 97.2, "cut": 0.45, "top": 0.6},
    {**PR2, "upper": 0.8, "normed": 0.5, "q": 97.3, "cut": 0.35, "top": 0.7},
    {**SOFT, "least": 85},
    {**PR2, "upper": 0.8, "normed": 0.5, "q": 98, "cut": 0.35, "soft": 1, "ratio": 0.5},
)
LAYERED: tuple[dict[str, Any], ...] = (
    {},
    {"both": True},
    {**SOFT, "least": 85, "mean": True},
    {"soft": 0.5, "power": 2, "both": True},
    {"soft": 0.5, "power": 4, "both": True},
)


def forms(layers: list[str]) -> dict[str, Method]:
    """Forms by what differs from `gated, no trick`, most promising first. layers: modules whose outputs are
    tried as the class layer."""
    changes = (*FORMS, *SPARSE, *({**each, "layer": layer} for layer in layers for each in LAYERED))
    return {named(each): Form(**each) for each in changes}


def named(changes: dict[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in changes.items())
