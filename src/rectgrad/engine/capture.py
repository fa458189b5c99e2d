"""Capture: the forward and the backward pass of a model as one CUDA graph, for many inputs of one shape.

A graph replays the kernels of one pass on other values: the model's Python does not run again. So everything
that could make a replay wrong is checked: at capture that the graph agrees with an ordinary call, at every
call that the inputs and the model are the ones it was captured for, and in the graph itself that nothing
needs an ordinary call's warnings and errors.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rectgrad.engine import target as targets
from rectgrad.engine.backward import Maps, RecordedPass
from rectgrad.engine.op import UnsupportedModelError
from rectgrad.engine.preserve import modules_in
from rectgrad.engine.request import NeedsOrdinaryCallError, Request, mixes_samples
from rectgrad.kernels.linear_ops import constants


class StaleCaptureError(RuntimeError):
    """The inputs or the model are not the ones that a capture was made for."""


class Guard:
    """The shape, type and device of the inputs, and the weights and training flags of the model."""

    def __init__(self, model: Any, inputs: Maps) -> None:
        self._inputs = [_kind(x) for x in inputs]
        self._modules = [module for root in modules_in(model) for module in root.modules()]
        self._flags = [module.training for module in self._modules]
        self._tensors = [
            (held, name, x, x.data_ptr())
            for module in self._modules
            for held in (module._parameters, module._buffers)
            for name, x in held.items()
            if x is not None
        ]

    def check_inputs(self, inputs: Maps) -> None:
        for x, kind in zip(inputs, self._inputs, strict=True):
            if _kind(x) != kind:
                raise StaleCaptureError(f"captured for {kind}, not for {_kind(x)}; capture again")

    def check_model(self) -> None:
        if [module.training for module in self._modules] != self._flags:
            raise StaleCaptureError("the model's training flag changed after the capture; capture again")
        for held, name, x, address in self._tensors:
            if held.get(name) is not x or x.data_ptr() != address:
                raise StaleCaptureError(f"the weight {name!r} was replaced after the capture; capture again")


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that captures on a device: torch keeps workspaces for every stream that ever ran."""
    return torch.cuda.Stream(device)


class PassGraph:
    """One CUDA graph of a method's forward and backward pass."""

    def __init__(self, request: Request, method: Any, guard: Guard) -> None:
        self._guard, self._inputs = guard, tuple(x.detach().clone() for x in request.inputs)
        self._device = device = self._inputs[0].device
        self._index = torch.full((request.n,), -1, dtype=torch.long, device=device)
        self._open = not callable(request.target)
        settled = targets.Open(self._index) if self._open else request.resolved()
        request = replace(request, inputs=self._inputs, settled=settled, target=None, unmixed=True)
        self._capture(lambda: _pass(request, method))
        self._last = torch.cuda.current_stream(device)

    def _capture(self, work: Callable[[], tuple[Maps, Tensor, Tensor]]) -> None:
        from rectgrad.kernels.cuda import one_scratch

        current, stream = torch.cuda.current_stream(self._device), _stream(self._device)
        stream.wait_stream(current)
        self._graph = graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):  # kernels are compiled and chosen, constants are made
                work()
            self._constants = tuple(constants.values())  # a graph reads them as long as it lives
            torch.cuda.synchronize(self._device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                with one_scratch():
                    self._raw, self.outputs, self._suspicious = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the cause is reported, not its consequence
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)

    def run(self, inputs: Maps, index: Tensor | None) -> tuple[Maps, Tensor] | None:
        """The raw maps and the outputs for other inputs; None if an ordinary call is needed. The model is
        checked while the device is at work."""
        stream = torch.cuda.current_stream(self._device)
        if self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        with torch.no_grad():
            for place, x in zip(self._inputs, inputs, strict=True):
                place.copy_(x)
            if self._open:
                self._index.fill_(-1) if index is None else self._index.copy_(index)
            self._graph.replay()
            raw, outputs = tuple(x.clone() for x in self._raw), self.outputs.clone()
        self._guard.check_model()
        return None if bool(self._suspicious) else (raw, outputs)


def _pass(request: Request, method: Any) -> tuple[Maps, Tensor, Tensor]:
    """The raw maps, the outputs, and whether something calls for an ordinary call."""
    suspicions: list[Tensor] = []
    request = replace(request, suspicions=suspicions)
    raw = method.raw(request)
    if not isinstance(request.last, RecordedPass):
        raise UnsupportedModelError("it needs the autograd bridge")
    assert request.answer is not None
    return raw, request.answer, torch.stack(suspicions).any()


class Captured:
    """A captured model: `captured(inputs, target=None)` gives the maps. Made by `rectgrad.capture`."""

    def __init__(self, request: Request, method: Any, ordinary: Callable[[Any, Any], Maps]) -> None:
        """ordinary: (inputs, target) -> maps, by an ordinary call."""
        self._method, self._ordinary, self._request = method, ordinary, request
        self._guard = Guard(request.model, request.inputs)
        self._lock = threading.Lock()
        self._graph: PassGraph | None = None
        if request.region is not None and request.region.trains:
            raise UnsupportedModelError("a model in training mode cannot be captured: call model.eval()")
        inner = method
        while hasattr(inner, "over"):
            inner = inner.over
        if request.inputs[0].is_cuda and inner.runs_model and request.n:
            self._graph = self._made(inner)

    def _made(self, method: Any) -> PassGraph:
        request, refused = self._request, "the model cannot be captured"
        passed = request.recording_of(method)
        if request.n > 1 and method.per_sample and mixes_samples(request, passed):
            raise UnsupportedModelError(f"{refused}: it folds other things into the batch")
        try:
            return PassGraph(request, method, self._guard)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{refused}: {error}") from None
        except RuntimeError as error:
            why = "its control flow depends on values, or it waits for the device"
            raise UnsupportedModelError(f"{refused}: {why} ({str(error).splitlines()[0]})") from error

    @property
    def replays(self) -> bool:
        """Whether a graph replays; False for an ordinary call behind the same checks."""
        return self._graph is not None

    def maps(self, inputs: Maps, target: Any) -> Maps:
        self._guard.check_inputs(inputs)
        fixed = self._request.target
        if callable(fixed) and target is not None:
            raise ValueError("the target was given at capture and is fixed; leave it out")
        asked = fixed if target is None else target
        if self._graph is None:
            self._guard.check_model()
        with self._lock:
            found = None if self._graph is None else self._replayed(self._graph, inputs, asked)
        return self._ordinary(inputs, asked) if found is None else found

    def _replayed(self, graph: PassGraph, inputs: Maps, asked: Any) -> Maps | None:
        """None if an ordinary call is needed. An average replays the inner method's graph at every point."""
        index = None if asked is None or callable(asked) else targets.indices(graph.outputs, asked)
        if self._method.one_backward:
            found = graph.run(inputs, index)
            return None if found is None else self._method.finish(found[0], inputs)
        if asked is None:  # the class is that of the clean inputs
            found = graph.run(inputs, None)
            if found is None:
                return None
            index = targets.indices(found[1], None)
        settled = self._request.resolved() if index is None else targets.Picked(index)
        request = replace(
            self._request, inputs=inputs, settled=settled, target=None, graph=graph, region=None
        )
        try:
            return self._method.maps(request)
        except NeedsOrdinaryCallError:
            return None

    def release(self) -> None:
        """Free the memory of the graph; calls are ordinary ones from then on."""
        self._graph = None


def close_to(maps: Maps, expected: Maps) -> float:
    """The largest difference, as a share of the expected maps' largest value."""
    worst = 0.0
    for a, b in zip(maps, expected, strict=True):
        scale = float(b.abs().max())
        worst = max(worst, float((a - b).abs().max()) / scale if scale else float((a != b).any()))
    return worst
