"""Errors and warnings about maps: which layer made a value that is not finite, or passed nothing.

The check is cheap: it reads a few sums, once, at the end of a pass. Only if it fails, the pass runs again to
find the layer.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op
from rectgrad.kernels.device import not_finite
from rectgrad.kernels.reference import per_sample

if TYPE_CHECKING:
    from rectgrad.engine.backward import Maps, Pass
    from rectgrad.engine.request import Request
    from rectgrad.engine.trace import Trace


def check_inputs(inputs: Maps) -> None:
    for x in inputs:
        _check(x, f"the input of shape {tuple(x.shape)}")


def _check(x: Tensor, what: str, op: Op | None = None, trace: Trace | None = None) -> None:
    """Raises an error if x is not finite, with its description `what` and the op's layer."""
    if not bool(x.isfinite().all()):
        layer = f" {trace.layer_of(op)!r} ({op.name})" if op is not None and trace is not None else ""
        raise ValueError(f"{what}{layer} contains {'NaN' if bool(x.isnan().any()) else 'an infinity'}")


def check_finite(request: Request, method: Any, passed: Pass, scores: Tensor, maps: Maps) -> Maps:
    """Raise an error that names the first layer with a NaN or an infinity, if there is one."""
    outputs = scores if request.answer is None else request.answer
    looked_at = (*request.inputs, outputs, scores, *maps)
    if first_wrong(request, not_finite(looked_at, passed.state.sums)) is None:
        return maps
    check_inputs(request.inputs)
    return _find(request, method, outputs)  # returns the maps if only a sum overflowed


def first_wrong(request: Request, wrong: Tensor) -> int | None:
    """The index of the first True, or None. A capture stores a flag instead of synchronising."""
    if request.suspicions is not None:
        request.suspicions.append(wrong.any())
        return None
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def _find(request: Request, method: Any, outputs: Tensor) -> Maps:
    """Run again and check every tensor. Returns the maps if all are finite."""
    met: list[tuple[Op, Tensor]] = []

    def look(op: Op, R: Tensor) -> None:
        if not met and not bool(R.isfinite().all()):
            met.append((op, R.clone()))

    again = request.watched(look)
    forward = again.recording(method)
    forward.close()
    for op in forward.ops:
        if op._output is not None:
            _check(op.output, "the output of layer", op, forward.trace)
    _check(outputs, "the model's output")
    maps: Maps = method.raw(again)
    for op, R in met:
        _check(R, "the gradient arriving at layer", op, again.trace)
    for x in maps:
        _check(x, "the gradient at the input")
    return maps


def warn_if_nothing_passed(request: Request, method: Any, maps: Maps) -> None:
    """Warn about maps that are zero: name the layer that passed nothing, and what to change."""
    if not method.thresholds or (request.suspicions is None and len(maps[0]) == 1 and bool(maps[0].any())):
        return
    zero = torch.stack([(per_sample(x) == 0).all(1) for x in maps]).all(0)
    if first_wrong(request, zero) is None:
        return
    samples: dict[str, dict[int, None]] = {}  # by the reason
    for row, sentence in _stopped_at(request, method, zero.nonzero().flatten().tolist()):
        samples.setdefault(sentence, {})[request.number(row)] = None
    for sentence, (sample, *others) in samples.items():
        too = f", and so are those of {', '.join(map(str, others))}" if others else ""
        warn(f"the map of sample {sample} is zero{too}: {sentence}")


def _stopped_at(request: Request, method: Any, rows: list[int]) -> Iterator[tuple[int, str]]:
    """For each row, why its map is zero: the last layer that its gradient reached passed nothing."""
    if request.mixes(method):  # one by one, because a row of an activation is not a sample
        alone = ((row, _stopped_at(request.rows(row, row + 1), method, [0])) for row in rows)
        yield from ((row, sentence) for row, found in alone for _, sentence in found)
        return
    again = request.passed or request.recording(method, named=True)
    last: dict[int, tuple[Op, str | None]] = {}

    def look(op: Op, R: Tensor) -> None:
        if op.family in ops.RECTIFIERS and not op.facts.gate:
            arrived = R.reshape(op.batch, -1).any(1).tolist()
            last.update({row: (op, _advice(op, R, row)) for row in rows if arrived[row]})

    scores = again.scores(request.resolved(again.outputs))
    method = method.prepared(request, again, scores)
    again.backward(method, scores, once=False, observe=look)
    for row, (op, advice) in last.items():
        if advice:
            units = math.prod(op.shape) // op.batch
            yield row, f"layer {again.trace.layer_of(op)!r} with {units} units passed nothing {advice}"
    left = [row for row in rows if row not in last or not last[row][1]]
    if left and "conv" in method.rules():  # did the padding trick remove the rest?
        without = again.backward(method, scores, once=False, without="conv")
        where = "at positions where convolutions reach into padding"
        for row in left:
            if any(bool(x[row].any()) for x in without):
                yield row, f"all units that passed are {where}; padding_trick=False keeps them"


def _advice(op: Op, R: Tensor, row: int) -> str | None:
    """Why the rule passed nothing, and what to change; None if something passed."""
    rule = op.state.rules[op.family]
    if rule.advice is not None:
        return rule.advice(op, R, row)
    return None if bool(op.backward(R)[0].reshape(op.batch, -1)[row].any()) else f"by the rule {rule.name!r}"


# A list that collects the warnings of this thread, instead of issuing them.
listening: ContextVar[list[str] | None] = ContextVar("listening", default=None)


def warn(message: str) -> None:
    """Issue a warning that points at the user's line of code."""
    if (sentences := listening.get()) is not None:
        sentences.append(message)
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rectgrad"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
