"""Layer-wise relevance propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rectgrad import rules
from rectgrad.engine.diagnose import first_wrong, warn
from rectgrad.engine.op import Op, Rules, per_sample
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
