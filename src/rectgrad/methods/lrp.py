"""Layer-wise relevance propagation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad import rules
from rectgrad.engine.diagnose import first_wrong, warn
from rectgrad.engine.facts import Wanted
from rectgrad.engine.op import Op, Rules, per_sample
from rectgrad.engine.request import Request
from rectgrad.engine.torch_private import map_tensors
from rectgrad.kernels.relevance_ops import safe
from rectgrad.methods.method import Maps, Method, times
from rectgrad.methods.options import option, wrong_option


@dataclass(frozen=True)
class Relevance(Method):
    """Relevance propagation: its maps sum to the score, less what biases and stabilisers absorb."""

    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu")
    facts: ClassVar[tuple[Wanted, ...]] = (rules.find_layers,)

    def raw(self, request: Request) -> Maps:
        raw = super().raw(request)
        warn_if_relevance_explodes(request, self, raw)
        if request.passed is not None and request.trace is not None:
            kept, asked = weakref.ref(request.passed), replace(request, passed=None, region=None)
            request.trace.measure = lambda: conservation(self, replace(asked, passed=kept()))
        return raw

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)


@dataclass(frozen=True)
class LRP(Relevance):
    """Layer-wise relevance propagation, with the rules of a composite for each kind of layer."""

    composite: str = option(
        "epsilon_plus_flat",
        f"Rules of the first layer, convolutions and dense layers: {', '.join(rules.COMPOSITES)}.",
        choices=tuple(rules.COMPOSITES),
    )
    epsilon: float = option(1e-6, "Stabiliser of every denominator; default: 0.000001.", low=0)
    gamma: float = option(0.25, "How much the gamma rule favours a sum's own sign; default: 0.25.", low=0)
    low: Any = option(None, "Smallest value of the input, for epsilon_gamma_box and deep_taylor.")
    high: Any = option(None, "Largest value of the input, for the same.")
    title: ClassVar[str] = "LRP"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "high"):
            if not isinstance(getattr(self, name), (int, float, tuple, Tensor, type(None))):
                raise wrong_option(self, name, TypeError, "a number, one for each channel, or a tensor")

    def rules(self) -> Rules:
        return rules.lrp_rules(self._composite())

    def _composite(self) -> rules.Composite:
        chosen, bounds = rules.COMPOSITES[self.composite], (self.low, self.high)
        if None in bounds and "box" in chosen:
            raise wrong_option(self, "low" if self.low is None else "high", ValueError, BOUND)
        if self.composite == "deep_taylor" and None not in bounds:
            chosen = ("box", *chosen[1:])
        return rules.Composite(*chosen, self.epsilon, self.gamma, *bounds)

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        at_the_input = self._composite().first in rules.AT_THE_INPUT
        return times(raw, tuple(safe(x.detach()) for x in inputs) if at_the_input else inputs)


BOUND = "given with this composite: a number, or one for each channel"


@dataclass(frozen=True)
class EpsilonLRP(Relevance):
    """Layer-wise relevance propagation with the epsilon rule."""

    epsilon: float = option(1e-4, "Stabiliser of the epsilon rule; default: 0.0001.", low=0)
    title: ClassVar[str] = "epsilon-LRP"

    def rules(self) -> Rules:
        return LRP("epsilon", self.epsilon).rules()


@dataclass(frozen=True)
class AttnLRP(Relevance):
    """Layer-wise relevance propagation through attention: softmax and products of data have rules too."""

    epsilon: float = option(1e-6, "Stabiliser of the epsilon rule; default: 0.000001.", low=0)
    facts: ClassVar[tuple[Wanted, ...]] = (partial(rules.find_layers, softmax=False),)
    title: ClassVar[str] = "AttnLRP"

    def rules(self) -> Rules:
        return rules.attn_lrp_rules(self.epsilon)


@dataclass(frozen=True)
class ExcitationBackprop(Relevance):
    """The probability that a winner-take-all process ends at each input: positive connections alone."""

    contrastive: bool = option(False, "Subtract what speaks for all other classes, and keep what is left.")
    title: ClassVar[str] = "excitation backprop"

    def rules(self) -> Rules:
        return rules.excitation_rules(self.contrastive)

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        maps = super().finish(raw, inputs)
        return tuple(m.clamp(min=0) for m in maps) if self.contrastive else maps


@dataclass(frozen=True)
class Conservation:
    """Where the relevance of each sample went: score = at_input + biases + stabilisers, to rounding."""

    score: Tensor
    at_input: Tensor
    biases: Tensor
    stabilisers: Tensor

    @property
    def error(self) -> Tensor:
        return self.score - self.at_input - self.biases - self.stabilisers


def conservation(method: Relevance, request: Request) -> Conservation | None:
    """One backward pass for each sample, since other things than samples may be in the first dimension."""
    passed = request.passed
    if passed is None:  # the record is gone
        return None
    target = request.resolved(passed.outputs)
    score = target(map_tensors(lambda x: x.detach().clone(), passed.outputs)).detach()
    account = [[total, *_absorbed(method, request, score, target, i)] for i, total in enumerate(score)]
    return Conservation(*map(torch.stack, zip(*account, strict=True)))


def _absorbed(method: Relevance, request: Request, score: Tensor, target: Any, i: int) -> Iterator[Tensor]:
    """Relevance at the input, and what biases and stabilisers absorb, of the i-th sample alone."""
    only, state = torch.arange(request.n, device=score.device) == i, request.passed.state
    one = replace(request, target=lambda outputs: target(outputs) * only, diagnosing=True)
    one.observe, state.absorbed = rules.absorbed_by_constants, []
    try:
        maps = method.finish(one.backward(method), request.inputs)
        yield torch.stack([m[i].double().sum() for m in maps]).sum()
        yield from torch.tensor(state.absorbed, dtype=torch.float64).reshape(-1, 2).sum(0)
    finally:
        state.absorbed = None


EXPLODED = 100.0  # times the largest output


def warn_if_relevance_explodes(request: Request, method: Any, raw: Maps) -> None:
    """Relevance should sum to about the score: say if it became much larger, and in which layer."""
    if request.diagnosing or request.answer is None or not len(request.answer):
        return
    total: Any = sum(per_sample(m).double().sum(1) for m in method.finish(raw, request.inputs))
    largest = per_sample(request.answer.detach()).double().abs().amax(1)
    i = first_wrong(request, total.abs() > EXPLODED * largest)
    if i is None:
        return
    score = float(request.resolved()(request.answer)[i])
    layer = _exploding_layer(request.rows(i, i + 1), method, EXPLODED * float(largest[i]))
    warn(
        f"the relevance of sample {request.number(i)} sums to {float(total[i]):.4g} at the input and to "
        f"{score:.4g} at the score: it explodes at layer {layer!r}, where outputs are nearly zero or cancel"
    )


def _exploding_layer(request: Request, method: Any, bound: float) -> str:
    """The layer behind which relevance first exceeds a bound."""
    readers: dict[int, Op] = {}
    found: list[Op] = []

    def look(op: Op, R: Tensor) -> None:
        if not found and float((op.output.double() * R.double()).sum().abs()) > bound:
            found.append(readers.get(id(op), op))
        for source in op.sources:
            readers.setdefault(id(source), op)

    again = request.watched(look)
    method.raw(again)
    return again.trace.layer_of(found[0]) if found and again.trace is not None else "input"
