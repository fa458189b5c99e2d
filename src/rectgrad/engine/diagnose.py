"""When a map cannot be trusted: which layer made it not finite, or passed nothing.

The check is cheap (sums that are looked at once, at the end); only a suspicion runs the pass again to find
the layer.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.backward import LinkedPass
from rectgrad.engine.op import Op, per_sample
from rectgrad.engine.passes import Maps, Pass
from rectgrad.kernels.reference import percentile
from rectgrad.rules.rectified import score

if TYPE_CHECKING:
    from rectgrad.engine.request import Request
    from rectgrad.engine.trace import Trace
    from rectgrad.methods import Method, RectGrad


def check_inputs(inputs: Maps) -> None:
    for x in inputs:
        if not bool(x.isfinite().all()):
            raise ValueError(f"the input of shape {tuple(x.shape)} contains {_what(x)}")


def check_finite(
    request: Request, method: Method, passed: Pass | LinkedPass, scores: Tensor, maps: Maps
) -> Maps:
    """No map from a NaN or an infinity: an error that names the first layer concerned."""
    outputs = getattr(passed.outputs, "logits", passed.outputs)
    outputs = outputs if isinstance(outputs, Tensor) else scores
    tensors = [_sum(x) for x in (*request.inputs, outputs, scores, *maps)]
    tensors += [s for s in passed.sums if isinstance(s, Tensor)]
    finite = all(math.isfinite(s) for s in passed.sums if not isinstance(s, Tensor))
    dtype = torch.float64 if any(s.dtype is torch.float64 for s in tensors) else torch.float32
    stacked = torch.stack([s.detach().reshape(()).to(scores.device, dtype) for s in tensors])
    if not finite or not bool(stacked.isfinite().all()):
        check_inputs(request.inputs)
        found = _find(request, method, outputs)
        # Nothing was: a sum overflowed, or a carrier (kernels/survivors.py) went astray.
        return maps if all(bool(x.isfinite().all()) for x in maps) else found
    return maps


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float32 if x.element_size() < 4 else None)


def _what(x: Tensor) -> str:
    return "NaN" if bool(x.isnan().any()) else "an infinity"


def _find(request: Request, method: Method, outputs: Tensor) -> Maps:
    """Run again, looking at every tensor. The maps, where all are finite."""
    again = request.watched(_look)
    forward = Pass(again, again.tape_for(method))
    for op in forward.tape.ops:
        if not bool(op.output.isfinite().all()):
            layer = forward.tape.trace.layer_of(op)
            raise ValueError(f"the output of layer {layer!r} ({op.name}) contains {_what(op.output)}")
    if not bool(outputs.isfinite().all()):
        raise ValueError(f"the model's output contains {_what(outputs)}")
    try:
        maps = method.raw(again)
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


def warn_if_nothing_passed(request: Request, method: Method, maps: Maps) -> None:
    """Say which layer stopped a map that is zero, and what would let something through."""
    if not method.thresholds or (len(maps[0]) == 1 and bool(maps[0].any())):
        return
    zero = torch.stack([(per_sample(x) == 0).all(1) for x in maps]).all(0)
    if bool(zero.any()):
        sample = int(zero.nonzero()[0])
        sentence = _stopped_at(request, cast("RectGrad", method), sample)
        if sentence:
            warn(f"the map of sample {request.offset + sample} is zero: {sentence}")


def _stopped_at(request: Request, method: RectGrad, sample: int) -> str | None:
    """The last layer that the sample's gradient reached: it let none through."""
    if request.passed is None:
        request, sample = request.rows(sample, sample + 1), 0
    again = request.passed or Pass(request, request.tape_for(method, named=True))
    found: list[tuple[Op, Tensor]] = []

    def look(op: Op, R: Tensor) -> None:
        if op.family in ops.RECTIFIERS and bool((R.reshape(op.batch, -1)[sample] != 0).any()):
            found.append((op, score(op, R, method.rule).reshape(op.batch, -1)[sample]))

    scores = again.scores(request.resolved(again.outputs))
    again.backward(method, scores, once=False, observe=look)
    advice = _advice(method, found[-1][1]) if found else None
    if not advice:
        return _masked(again, method, scores, sample)
    op, s = found[-1]
    return f"layer {again.tape.trace.layer_of(op)!r} with {len(s)} units passed nothing {advice}"


def _masked(again: Pass, method: RectGrad, scores: Tensor, sample: int) -> str | None:
    """Whether the padding trick took away what was left."""
    if not method.padding_trick:
        return None
    maps = again.backward(replace(method, padding_trick=False), scores, once=False)
    if not any(bool(x[sample].any()) for x in maps):
        return None
    return "all that passed lay where convolutions saw padding; padding_trick=False keeps it"


def warn_if_incomplete(request: Request, trace: Trace, difference: Tensor) -> None:
    """DeepLIFT's contributions should sum to the difference of the scores: say where they do not."""
    assert trace.completeness_error is not None
    if request.region is not None and any(module.training for module in request.region.modules):
        return  # batch statistics are no function of the sample, and that was said
    wrong = trace.completeness_error.abs() > 0.05 * difference.abs() + 1e-4
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        total, right = float(difference[i] + trace.completeness_error[i]), float(difference[i])
        plain = f" (without an exact rule: {', '.join(trace.plain()[:3])})" if trace.plain() else ""
        sums = f"DeepLIFT's map of sample {request.offset + i} sums to {total:.4g} instead of {right:.4g}"
        warn(f"{sums}{plain}; another baseline may do better")


def warn(message: str) -> None:
    """A warning that points at the caller's line, however deep the library noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rectgrad"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _advice(method: RectGrad, s: Tensor) -> str | None:
    """What would let something through a layer with these scores; None if something did go through."""
    if method.tau is not None:
        stopped = bool(0 < s.max() <= method.tau)
        return f"above tau={method.tau:g}; its largest score is {float(s.max()):.4g}" if stopped else None
    if _passes(s, method.q, method.interpolation) or not bool(s.max() > 0):
        return None
    if bool((s < s.max()).any()):
        q = largest_q(s, method.interpolation)
        return f"at q={method.q:g}; the largest q that passes one unit is {q:.2f}"
    return f"at q={method.q:g}; no percentile passes scores that are all the same, a constant tau does"


def _passes(s: Tensor, q: float, interpolation: str) -> bool:
    return bool(percentile(s.unsqueeze(0), q, interpolation) < s.max())


def largest_q(s: Tensor, interpolation: str) -> float:
    """The largest q, to two decimals, at which tau lies below the largest score."""
    d, ties = len(s), int((s == s.max()).sum())
    above = ties - 0.5 if interpolation == "nearest" else ties - 1
    hundredths = min(math.floor(10_000 * (1 - above / (d - 1))) + 1, 10_000)
    while not _passes(s, hundredths / 100, interpolation):
        hundredths -= 1
    return hundredths / 100
