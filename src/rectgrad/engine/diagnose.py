"""When a map cannot be trusted: which layer made it not finite, or passed nothing, or lost its relevance.

The check is cheap: sums that are read once, at the end of a pass. Only a suspicion runs the pass again to
find the layer.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, per_sample

if TYPE_CHECKING:
    from rectgrad.engine.backward import Pass
    from rectgrad.engine.request import Plan, Request
    from rectgrad.engine.trace import Trace

Maps = tuple[Tensor, ...]


def check_inputs(inputs: Maps) -> None:
    for x in inputs:
        if not bool(x.isfinite().all()):
            raise ValueError(f"the input of shape {tuple(x.shape)} contains {_what(x)}")


def check_finite(request: Request, method: Any, passed: Pass, scores: Tensor, maps: Maps) -> Maps:
    """No map from a NaN or an infinity: an error that names the first layer concerned."""
    outputs = getattr(passed.outputs, "logits", passed.outputs)
    outputs = outputs if isinstance(outputs, Tensor) else scores
    finite = all_finite((*request.inputs, outputs, scores, *maps), passed.sums)
    if request.suspicions is not None:
        request.suspicions.append(~finite)
        return maps
    if bool(finite):
        return maps
    check_inputs(request.inputs)
    found = _find(request, method, outputs)
    return maps if all(bool(x.isfinite().all()) for x in maps) else found  # a sum overflowed, nothing else


def all_finite(tensors: Maps, sums: list[Tensor | float]) -> Tensor:
    """Whether all of these are finite: one flag on the device."""
    values = [_sum(x) for x in tensors] + [s for s in sums if isinstance(s, Tensor)]
    dtype = torch.float64 if any(s.dtype is torch.float64 for s in values) else torch.float32
    device = tensors[-1].device
    stacked = torch.stack([s.detach().reshape(()).to(device, dtype) for s in values])
    finite = stacked.isfinite().all()
    numbers = all(math.isfinite(s) for s in sums if not isinstance(s, Tensor))
    return finite if numbers else torch.zeros_like(finite)


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float32 if x.element_size() < 4 else None)


def _what(x: Tensor) -> str:
    return "NaN" if bool(x.isnan().any()) else "an infinity"


def _find(request: Request, method: Any, outputs: Tensor) -> Maps:
    """Run again, looking at every tensor. The maps, if all are finite."""
    from rectgrad.engine.request import Plan

    again = request.watched(_look)
    forward = again.recording(Plan.of(method))
    forward.close()
    for op in forward.ops:
        if op._output is not None and not bool(op.output.isfinite().all()):
            layer = forward.trace.layer_of(op)
            raise ValueError(f"the output of layer {layer!r} ({op.name}) contains {_what(op.output)}")
    if not bool(outputs.isfinite().all()):
        raise ValueError(f"the model's output contains {_what(outputs)}")
    try:
        maps: Maps = method.raw(again)
    except _NotFiniteError as found:
        assert again.trace is not None
        layer = again.trace.layer_of(found.op)
        sentence = f"the gradient arriving at layer {layer!r} ({found.op.name}) contains {_what(found.R)}"
        raise ValueError(sentence) from None
    for x in maps:
        if not bool(x.isfinite().all()):
            raise ValueError(f"the gradient at the input contains {_what(x)}")
    return maps


class _NotFiniteError(Exception):
    def __init__(self, op: Op, R: Tensor) -> None:
        self.op, self.R = op, R


def _look(op: Op, R: Tensor) -> None:
    if not bool(R.isfinite().all()):
        raise _NotFiniteError(op, R)


def warn_if_nothing_passed(request: Request, method: Any, plan: Plan, maps: Maps) -> None:
    """Name the layer that stopped a map that is zero, and what would let something through."""
    if not plan.thresholds:
        return
    if request.suspicions is None and len(maps[0]) == 1 and bool(maps[0].any()):
        return
    zero = torch.stack([(per_sample(x) == 0).all(1) for x in maps]).all(0)
    if _noted(request, zero) or not bool(zero.any()):
        return
    sample = int(zero.nonzero()[0])
    sentence = _stopped_at(request, method, plan, sample)
    if sentence:
        warn(f"the map of sample {request.offset + sample} is zero: {sentence}")


def _stopped_at(request: Request, method: Any, plan: Plan, sample: int) -> str | None:
    """The last layer that the sample's gradient reached: it let nothing through."""
    row = sample
    if request.passed is None:
        request, row = request.rows(sample, sample + 1), 0
    again = request.passed or request.recording(plan, named=True)
    found: list[tuple[Op, Tensor]] = []

    def look(op: Op, R: Tensor) -> None:
        if op.family in ops.RECTIFIERS and not op.facts.gate:
            rows = R.reshape(op.batch, -1)
            if bool((rows[row] != 0).any()):
                found[:] = [(op, R.detach().clone())]
                advice[:] = [_advice(op, R, row)]

    advice: list[str | None] = []
    scores = again.scores(request.resolved(again.outputs))
    again.backward(plan, scores, once=False, observe=look)
    if not advice or not advice[0]:
        return _masked(again, plan, scores, row)
    op, R = found[0]
    units = R.numel() // op.batch
    return f"layer {again.trace.layer_of(op)!r} with {units} units passed nothing {advice[0]}"


def _noted(request: Request, wrong: Tensor) -> bool:
    """In a capture, remember a flag on the device instead of reading it now."""
    if request.suspicions is not None:
        request.suspicions.append(wrong.any())
    return request.suspicions is not None


def _advice(op: Op, R: Tensor, row: int) -> str | None:
    """What the rule that stopped everything says; None if something passed."""
    rule = op.state.rules[op.family]
    if rule.advice is not None:
        return rule.advice(op, R, row)
    result = rule.apply(op, R)
    grad = result[0] if isinstance(result, tuple) else result
    passed = bool((torch.as_tensor(grad).reshape(op.batch, -1)[row] != 0).any())
    return None if passed else f"by the rule {rule.name!r}"


def _masked(again: Pass, plan: Plan, scores: Tensor, sample: int) -> str | None:
    """Whether the padding trick removed what was left."""
    if "conv" not in plan.rules:
        return None
    without = replace(plan, rules={family: rule for family, rule in plan.rules.items() if family != "conv"})
    maps = again.backward(without, scores, once=False)
    if not any(bool(x[sample].any()) for x in maps):
        return None
    return "all that passed was at positions where convolutions saw padding; padding_trick=False keeps it"


def warn_if_incomplete(request: Request, trace: Trace, difference: Tensor) -> None:
    """DeepLIFT's contributions should sum to the difference of the scores: say if they do not."""
    assert trace.completeness_error is not None
    if request.region is not None and request.region.trains:
        return  # batch statistics are no function of the sample, which has its own warning
    wrong = trace.completeness_error.abs() > 0.05 * difference.abs() + 1e-4
    if not _noted(request, wrong) and bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        total, right = float(difference[i] + trace.completeness_error[i]), float(difference[i])
        plain = f" (without an exact rule: {', '.join(trace.plain()[:3])})" if trace.plain() else ""
        sums = f"DeepLIFT's map of sample {request.offset + i} sums to {total:.4g} instead of {right:.4g}"
        warn(f"{sums}{plain}; another baseline may do better")


EXPLODED = 100.0  # times the largest output


def warn_if_relevance_explodes(request: Request, method: Any, raw: Maps) -> None:
    """Relevance should sum to about the score: say if it became much larger, and in which layer."""
    if request.diagnosing or request.answer is None or not len(request.answer):
        return
    total: Any = sum(per_sample(m).double().sum(1) for m in method.finish(raw, request.inputs))
    largest = per_sample(request.answer.detach()).double().abs().amax(1)
    wrong = total.abs() > EXPLODED * largest
    if _noted(request, wrong) or not bool(wrong.any()):
        return
    i = int(wrong.nonzero()[0])
    score = float(request.resolved()(request.answer)[i])
    layer = _exploding_layer(request.rows(i, i + 1), method, EXPLODED * float(largest[i]))
    warn(
        f"the relevance of sample {request.offset + i} sums to {float(total[i]):.4g} at the input and to "
        f"{score:.4g} at the score: it explodes at layer {layer!r}, whose output is nearly zero"
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


def warn(message: str) -> None:
    """A warning that points at the caller's line, however deep the library noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rectgrad"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
