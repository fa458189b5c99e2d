"""Layer-wise relevance propagation."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad import rules
from rectgrad.engine.backward import Pass
from rectgrad.engine.diagnose import first_wrong, warn
from rectgrad.engine.facts import Finder
from rectgrad.engine.op import Op, Rules
from rectgrad.engine.request import Request
from rectgrad.engine.torch_private import map_tensors
from rectgrad.kernels.reference import per_sample, wide
from rectgrad.kernels.relevance_ops import COMPOSITES, Account, Composite, Conservation, safe
from rectgrad.methods.method import Maps, Method, times
from rectgrad.methods.options import Value, option


@dataclass(frozen=True)
class Relevance(Method):
    """Relevance propagation: a map sums to the score, less what biases and stabilisers absorb."""

    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu")
    facts: ClassVar[tuple[Finder, ...]] = (rules.find_layers,)

    def raw(self, request: Request) -> Maps:
        raw = super().raw(request)
        warn_if_relevance_explodes(request, self, raw)
        if request.passed is not None and request.trace is not None:
            kept, asked = weakref.ref(request.passed), replace(request, passed=None, region=None)
            request.trace.conservation = Conservation(lambda: self._account(replace(asked, passed=kept())))
        return raw

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)

    def _account(self, request: Request) -> Account:
        """One backward pass per sample, because dimensions do not always identify the samples."""
        if (passed := request.passed) is None:
            raise RuntimeError("the record was deleted; keep it for as long as you need trace.conservation")
        target, state, found = request.resolved(passed.outputs), passed.state, []
        score = target(map_tensors(torch.clone, passed.outputs)).detach()
        for only in torch.eye(request.n, dtype=score.dtype, device=score.device):
            one = replace(request, target=lambda outputs, only=only: target(outputs) * only, diagnosing=True)
            one.observe, state.absorbed = rules.absorbed_by_constants, []
            try:
                maps = self.finish(one.backward(self), request.inputs)
            finally:
                absorbed, state.absorbed = state.absorbed, None
            found.append([sum(float(m.double().sum()) for m in maps), *map(sum, zip(*absorbed, strict=True))])
        return Account(score.double().cpu(), *torch.tensor(found, dtype=torch.float64).T)


@dataclass(frozen=True)
class LRP(Relevance):
    """Layer-wise relevance propagation, with a composite of rules for the kinds of layers."""

    composite: str = option(
        "epsilon_plus_flat",
        f"Rules of the first layer, convolutions and dense layers: {', '.join(COMPOSITES)}.",
        choices=tuple(COMPOSITES),
    )
    epsilon: float = option(1e-6, "Stabiliser of every denominator; default: 0.000001.", low=0)
    gamma: float = option(0.25, "How much the gamma rule favours a sum's own sign; default: 0.25.", low=0)
    low: Value | None = option(None, "Smallest value of the input, for epsilon_gamma_box and deep_taylor.")
    high: Value | None = option(None, "Largest value of the input, for the same.")
    title: ClassVar[str] = "LRP"

    @property
    def _rules(self) -> Composite:
        return Composite.named(self.composite, self.epsilon, self.gamma, self.low, self.high)

    def rules(self) -> Rules:
        return rules.lrp_rules(self._rules)

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, tuple(map(safe, inputs)) if self._rules.at_the_input else inputs)


@dataclass(frozen=True)
class EpsilonLRP(Relevance):
    """Layer-wise relevance propagation with the epsilon rule."""

    epsilon: float = option(1e-4, "Stabiliser of the epsilon rule; default: 0.0001.", low=0)
    title: ClassVar[str] = "epsilon-LRP"

    def rules(self) -> Rules:
        return rules.lrp_rules(Composite.named("epsilon", self.epsilon))


@dataclass(frozen=True)
class AttnLRP(Relevance):
    """Layer-wise relevance propagation for transformers."""

    epsilon: float = option(1e-6, "Stabiliser of the epsilon rule; default: 0.000001.", low=0)
    facts: ClassVar[tuple[Finder, ...]] = (partial(rules.find_layers, softmax=False),)
    title: ClassVar[str] = "AttnLRP"

    def rules(self) -> Rules:
        return rules.attn_lrp_rules(self.epsilon)


@dataclass(frozen=True)
class ExcitationBackprop(Method):
    """Layer-wise relevance propagation along positive connections only."""

    contrastive: bool = option(False, "Subtract the map of the opposite weights; keep positive values.")
    decompose: ClassVar[tuple[str, ...]] = Relevance.decompose
    facts: ClassVar[tuple[Finder, ...]] = Relevance.facts
    title: ClassVar[str] = "excitation backprop"

    def rules(self) -> Rules:
        return rules.excitation_rules(self.contrastive)

    def result(self, request: Request, passed: Pass, scores: Tensor) -> Maps:
        """The relevance of a probability of 1 at the score, whatever its value and its sign."""
        maps, score = super().result(request, passed, scores), safe(wide(scores.detach())).unsqueeze(1)
        return tuple((per_sample(R) / score).to(R).reshape(R.shape) for R in maps)

    def raw(self, request: Request) -> Maps:
        raw = super().raw(request)
        if not request.diagnosing:
            zero = torch.stack([(per_sample(m) == 0).all(1) for m in raw]).all(0)
            if (i := first_wrong(request, zero)) is not None:
                layer = _last_layer(request.rows(i, i + 1), self)
                why = "no positive input has a positive weight"
                zero_map = f"the map of sample {request.number(i)} is zero"
                warn(f"{zero_map}: it ends at layer {layer!r}, where {why}")
        return raw

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        maps = times(raw, inputs)
        return tuple(m.clamp(min=0) for m in maps) if self.contrastive else maps


EXPLODED = 100.0  # times the largest output


def warn_if_relevance_explodes(request: Request, method: Any, raw: Maps) -> None:
    """Warn if the sum of relevance is much larger than the score, and name the layer."""
    if request.diagnosing or request.answer is None or not len(request.answer):
        return
    total: Any = sum(per_sample(m).double().sum(1) for m in method.finish(raw, request.inputs))
    largest = per_sample(request.answer.detach()).double().abs().amax(1)
    if (i := first_wrong(request, total.abs() > EXPLODED * largest)) is not None:
        score = float(request.resolved()(request.answer)[i])
        layer = _exploding_layer(request.rows(i, i + 1), method, EXPLODED * float(largest[i]))
        sums = f"sums to {float(total[i]):.4g} at the input and to {score:.4g} at the score"
        where = f"it explodes at layer {layer!r}, where outputs are nearly zero or cancel"
        warn(f"the relevance of sample {request.number(i)} {sums}: {where}")


def _exploding_layer(request: Request, method: Any, bound: float) -> str:
    """The first layer of the backward pass at which relevance exceeds a bound."""
    readers: dict[int, Op] = {}
    found: list[Op] = []

    def look(op: Op, R: Tensor) -> None:
        layer = op.facts.part_of or op
        within = op in (layer, *layer.facts.after)[:-1]  # R is relevance / output of the linear map
        if not found and not within and float((op.output.double() * R).sum().abs()) > bound:
            found.append(readers.get(id(op), op))
        readers.update((id(source), op) for source in op.sources if id(source) not in readers)

    again = request.watched(look)
    method.raw(again)
    return again.trace.layer_of(found[0]) if found and again.trace is not None else "input"


def _last_layer(request: Request, method: Any) -> str:
    """The last layer that relevance reaches."""
    reached: list[Op] = []
    again = request.watched(lambda op, R: reached.append(op) if bool(R.any()) else None)
    method.raw(again)
    return again.trace.layer_of(reached[-1]) if reached and again.trace is not None else "output"
