"""Many batches of one shape on a GPU: the model is captured once, and later batches replay it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rectgrad.api import Capture, Model, Record, capture, record_for, warn_probabilities
from rectgrad.engine.capture import NeedsOrdinaryCallError, StaleCaptureError
from rectgrad.engine.op import UnsupportedModelError
from rectgrad.engine.trace import Trace
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.kernels.device import has_graphs
from rectgrad.methods import Method

AFTER = 8  # ordinary calls, which together take about as long as a capture
KEPT = 4  # captures of one model: each holds the memory of a pass
COUNTED = 256  # kinds of calls


class Replay:
    """A batch that was explained by a capture. Gives what a `Record` for one method gives."""

    def __init__(self, captured: Capture, trace: Trace, model: Model, inputs: Tensor, target: Any) -> None:
        self._captured, self.trace, self._target = captured, trace, target
        self._model, self._inputs = model, inputs
        (self._maps,), outputs = captured.replayed((inputs,), target)
        self.outputs: Any = outputs
        warn_probabilities(self.outputs)

    def attribute(self, method: Method, target: Any = None) -> Tensor:
        if target is self._target:
            return self._maps
        with contextlib.suppress(NeedsOrdinaryCallError, StaleCaptureError):
            return self._captured.replayed((self._inputs,), target)[0][0]
        return record_for(self._model, self._inputs, method).attribute(method, target)


class Captures:
    """The captures of one model, by method, shape and type of the inputs. They are held until `release`."""

    def __init__(self) -> None:
        self._calls: Counter[Any] = Counter()
        self._captured: OrderedDict[Any, tuple[Capture, Trace] | None] = OrderedDict()  # None: impossible
        self._lock = threading.Lock()

    def replay(self, model: Model, inputs: Tensor, method: Method, target: Any) -> Replay | None:
        """None if an ordinary call is needed: on a CPU, for the first batches of a kind, for a method of many
        passes or a callable target, and for a model that cannot be captured."""
        pays = method.one_backward and method.runs_model and has_graphs(inputs.device)
        if not pays or callable(target):
            return None
        key = method, inputs.shape, inputs.dtype, inputs.device
        try:
            captured = self._capture(key, model, inputs)
            return captured and Replay(*captured, model, inputs, target)
        except StaleCaptureError:
            self._forget(key)
        except NeedsOrdinaryCallError:
            pass
        return None

    def release(self) -> None:
        """Frees the memory."""
        for key in list(self._captured):
            self._forget(key)

    def _forget(self, key: Any) -> None:
        captured = self._captured.pop(key, None)
        if captured is not None:
            captured[0].release()

    def _capture(self, key: Any, model: Model, inputs: Tensor) -> tuple[Capture, Trace] | None:
        """The capture with this key, if it was requested often enough."""
        with self._lock:
            if key not in self._captured:
                if len(self._calls) == COUNTED:
                    self._calls.clear()
                self._calls[key] += 1
                if self._calls[key] <= AFTER:
                    return None
                del self._calls[key]
                self._captured[key] = _captured(model, inputs, key[0])
                while len(self._captured) > KEPT:
                    self._forget(next(iter(self._captured)))
            self._captured.move_to_end(key)
            return self._captured[key]


def _captured(model: Model, inputs: Tensor, method: Method) -> tuple[Capture, Trace] | None:
    """A capture, and the trace of an ordinary call, whose ops it replays. None if the model cannot be
    captured."""
    with WarningLog(quiet=True):  # the ordinary calls before it have warned
        recorded = record_for(model, inputs, method)
        recorded.attribute(method)
        trace = without_tensors(recorded.trace, method)
        del recorded  # and its activations
        try:
            return capture(model, inputs, method), trace
        except UnsupportedModelError:
            return None


def without_tensors(trace: Trace, method: Method) -> Trace:
    """A copy that names each op's rule and keeps no activations, which would fill the memory.

    A method without a backward pass of its own on this record used no rule: those in the trace are of an
    earlier method.
    """
    light, used = copy.copy(trace), method.one_backward and method.runs_model
    rules = (SimpleNamespace(rule=row.rule if used else "plain") for row in trace.rows)
    light.rows = [row._replace(op=each) for row, each in zip(trace.rows, rules, strict=True)]  # type: ignore[arg-type]
    light.hidden, light.conservation = {}, None  # it would hold the batch
    return light


Answered = Record[Tensor] | Replay  # either of them, for a batch
