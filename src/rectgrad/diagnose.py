"""When a map cannot be trusted: which layer made it not finite, or passed nothing.

The check is cheap (sums that are looked at once, at the end); only a suspicion runs the pass again to find
the layer.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.op import Op
from rectgrad.rules.rectified import score

if TYPE_CHECKING:
    from rectgrad.methods import Method, RectGrad
    from rectgrad.run import Maps, Pass, Subject


def check_finite(subject: Subject, method: Method, passed: Pass, scores: Tensor, maps: Maps) -> None:
    """No map from a NaN or an infinity: an error that names the first layer concerned."""
    outputs = getattr(passed.outputs, "logits", passed.outputs)
    outputs = outputs if isinstance(outputs, Tensor) else scores
    sums = [_sum(x) for x in (*subject.inputs, outputs, scores, *maps)] + passed.sums
    if bool(torch.stack([s.detach().double().to(scores.device) for s in sums]).isfinite().all()):
        return
    for x in subject.inputs:
        if not bool(x.isfinite().all()):
            raise ValueError(f"the input of shape {tuple(x.shape)} contains {_what(x)}")
    _find(subject, method, outputs)


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float32 if x.element_size() < 4 else None)


def _what(x: Tensor) -> str:
    return "NaN" if bool(x.isnan().any()) else "an infinity"


def _find(subject: Subject, method: Method, outputs: Tensor) -> None:
    """Run again, looking at every tensor. Returns where all are finite: a sum alone overflowed."""
    from rectgrad.run import Pass, tape_for

    again = Pass(subject, tape_for(method, frozenset(ops.FAMILIES)))
    for op in again.tape.ops:
        if not bool(op.output.isfinite().all()):
            layer = again.tape.trace.layer_of(op)
            raise ValueError(f"the output of layer {layer!r} ({op.name}) contains {_what(op.output)}")
    if not bool(outputs.isfinite().all()):
        raise ValueError(f"the model's output contains {_what(outputs)}")

    def look(op: Op, R: Tensor) -> None:
        if not bool(R.isfinite().all()):
            layer = again.tape.trace.layer_of(op)
            raise ValueError(f"the gradient arriving at layer {layer!r} ({op.name}) contains {_what(R)}")

    maps = again.backward(method, again.scores(subject.resolved()), once=False, observe=look)
    for x in maps:
        if not bool(x.isfinite().all()):
            raise ValueError(f"the gradient at the input contains {_what(x)}")


def warn_if_nothing_passed(subject: Subject, method: Method, maps: Maps) -> None:
    """Say which layer stopped a map that is zero, and what would let something through."""
    from rectgrad.methods import RectGrad

    if not isinstance(method, RectGrad):
        return
    zero = torch.stack([(x.flatten(1) == 0).all(1) for x in maps]).all(0)
    if bool(zero.any()):
        sample = int(zero.nonzero()[0])
        sentence = _stopped_at(subject, method, sample)
        if sentence:
            warn(f"the map of sample {subject.offset + sample} is zero: {sentence}")


def _stopped_at(subject: Subject, method: RectGrad, sample: int) -> str | None:
    """The last layer that the sample's gradient reached: it let none through."""
    from rectgrad.run import Pass, tape_for

    if subject.passed is None:
        subject, sample = subject.rows(sample, sample + 1), 0
    again = subject.passed or Pass(subject, tape_for(method))
    found: list[tuple[Op, Tensor]] = []

    def look(op: Op, R: Tensor) -> None:
        if op.family in ops.RECTIFIERS and bool((R.reshape(op.batch, -1)[sample] != 0).any()):
            found.append((op, score(op, R, method.rule).reshape(op.batch, -1)[sample]))

    again.backward(method, again.scores(subject.resolved(again.outputs)), once=False, observe=look)
    advice = _advice(method, found[-1][1]) if found else None
    if not advice:
        return None
    op, s = found[-1]
    return f"layer {again.tape.trace.layer_of(op)!r} with {len(s)} units passed nothing {advice}"


def warn(message: str) -> None:
    """A warning that points at the caller's line, however deep the library noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rectgrad"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level - 1)


def _advice(method: RectGrad, s: Tensor) -> str | None:
    if method.tau is not None:
        stopped = bool(0 < s.max() <= method.tau)
        return f"above tau={method.tau:g}; its largest score is {float(s.max()):.4g}" if stopped else None
    if bool((s > 0).any()) and bool((s < s.max()).any()):
        return f"at q={method.q:g}; the largest q that passes one unit is {largest_q(s):.2f}"
    if len(s) == 1:
        return f"at q={method.q:g}; no percentile passes the only unit of a layer, a constant tau does"
    return None


def largest_q(s: Tensor) -> float:
    """The largest q, to two decimals, at which tau lies below the largest score."""
    d, ties = len(s), int((s == s.max()).sum())
    q = math.floor(100 * 100 * (1 - (ties - 0.5) / (d - 1))) / 100
    while round((d - 1) * (1 - q / 100)) < ties:
        q -= 0.01
    return q
