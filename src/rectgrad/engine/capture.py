"""Capture: the forward and the backward pass of a model as one CUDA graph, for many inputs of one shape.

A graph replays the kernels of one pass on other values, without running the model's Python code. Checks
prevent wrong replays: at capture, that the graph agrees with an ordinary call; at every call, that inputs and
model match those at capture; in the graph, that no warning or error is due, which needs an ordinary call.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, cast

import torch
from torch import Tensor

from rectgrad.engine import target as targets
from rectgrad.engine.backward import Inputs, Maps, RecordedPass
from rectgrad.engine.op import UnsupportedModelError
from rectgrad.engine.preserve import modules_in
from rectgrad.engine.request import Request
from rectgrad.kernels.device import Graph, has_graphs, largest_difference

REFUSED = "the model cannot be captured"


class StaleCaptureError(RuntimeError):
    """The inputs or the model do not match those at capture."""


class NeedsOrdinaryCallError(Exception):
    """A replay found a reason for a warning or an error, which an ordinary call will give."""


def captured_pass(request: Request, method: Any) -> Graph:
    """The graph of a method's forward and backward pass. It reads the inputs and the classes to explain."""
    inputs = tuple(x.detach().clone() for x in request.inputs)
    index = torch.full((request.n,), -1, dtype=torch.long, device=inputs[0].device)
    target = request.target if callable(request.target) else targets.Open(index)
    request = replace(request, inputs=inputs, target=target)
    return Graph(lambda: _pass(request, method), (*inputs, index))


def _pass(request: Request, method: Any) -> tuple[Maps, Tensor, Tensor]:
    """The raw maps, the outputs, and whether an ordinary call is needed."""
    suspicions: list[Tensor] = []
    request = replace(request, suspicions=suspicions)
    raw = method.raw(request)
    if not isinstance(request.last, RecordedPass):
        raise UnsupportedModelError("it needs the autograd bridge")
    assert request.answer is not None
    return raw, request.answer, torch.stack(suspicions).any()


class Capture(Generic[Inputs]):
    """A captured model. Called with inputs and a target, it returns their maps as new tensors."""

    def __init__(self, request: Request, method: Any, ordinary: Callable[..., Any]) -> None:
        """ordinary: (inputs, target, method=method) -> maps, by an ordinary call."""
        self._method, self._ordinary, self._request = method, ordinary, replace(request, region=None)
        self._kinds = _kinds(request.inputs)
        self._modules = [module for root in modules_in(request.model) for module in root.modules()]
        self._flags = [module.training for module in self._modules]
        self._tensors = [
            (held, name, x, x.data_ptr())
            for module in self._modules
            for held in (module._parameters, module._buffers)
            for name, x in held.items()
            if x is not None
        ]
        self._lock = threading.Lock()
        if request.region is not None and request.region.trains:
            raise UnsupportedModelError("a model in training mode cannot be captured: call model.eval()")
        self._inner = method
        while hasattr(self._inner, "over") and not self._inner.one_backward:  # of averages, the inner method
            self._inner = self._inner.over
        pays = self._inner.one_backward and self._inner.runs_model and request.n > 0
        pays = pays and has_graphs(request.inputs[0].device)
        self._graph = self._captured(request, self._inner) if pays else None

    def _captured(self, request: Request, method: Any) -> Graph:
        if method.per_sample and request.mixes(method):
            raise UnsupportedModelError(f"{REFUSED}: it merges other dimensions into that of the samples")
        try:
            return captured_pass(request, method)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{REFUSED}: {error}") from None
        except RuntimeError as error:
            why = "its control flow depends on values, or it waits for the device"
            raise UnsupportedModelError(f"{REFUSED}: {why} ({str(error).splitlines()[0]})") from error

    def __call__(self, inputs: Inputs, target: targets.Target = None) -> Inputs:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        if not all(isinstance(x, Tensor) for x in tensors):
            return self._ordinary(inputs, target)  # whose error says what is wrong
        if (kinds := _kinds(tensors)) != self._kinds:
            raise StaleCaptureError(f"captured for {self._kinds}, not for {kinds}; capture again")
        if callable(self._request.target) and target is not None:
            raise ValueError("the target was given at capture and is fixed; leave it out")
        asked = self._request.target if target is None else target
        with contextlib.suppress(NeedsOrdinaryCallError):
            maps, _ = self.replayed(tensors, asked)
            return maps if isinstance(inputs, tuple) else maps[0]  # type: ignore[return-value]
        return self._ordinary(inputs, asked)

    def replayed(self, inputs: Maps, asked: Any) -> tuple[Maps, Tensor | None]:
        """The maps and, if they need one backward pass, the outputs. Raises if an ordinary call is needed."""
        with self._lock:
            if self._graph is None:
                self._check_model()
                raise NeedsOrdinaryCallError
            given = asked is not None and not callable(asked)
            index = targets.indices(self._graph.result[1], asked) if given else None
            if self._method.one_backward:
                raw, outputs = self._run(inputs, index)
                return self._method.finish(raw, inputs), outputs
            if asked is None:  # the class is that of the clean inputs
                index = targets.indices(self._run(inputs, None)[1], None)
            target = asked if index is None else targets.Picked(index)
            request = replace(self._request, inputs=inputs, target=target, replay=self._run)
            return self._method.maps(request), None

    def _run(self, inputs: Maps, index: Tensor | None) -> tuple[Maps, Tensor]:
        assert self._graph is not None
        raw, outputs, suspicious = self._graph.replay((*inputs, -1 if index is None else index))
        fresh = tuple(x.clone() for x in raw), outputs.clone()
        self._check_model()  # while the device computes
        if bool(suspicious):
            raise NeedsOrdinaryCallError
        return fresh

    def _check_model(self) -> None:
        if [module.training for module in self._modules] != self._flags:
            raise StaleCaptureError("the model's training flag changed after the capture; capture again")
        for held, name, x, address in self._tensors:
            if held.get(name) is not x or x.data_ptr() != address:
                raise StaleCaptureError(f"the weight {name!r} was replaced after the capture; capture again")

    def check_replays(self) -> None:
        """Raise an error unless replays agree with ordinary calls, on the example and a modified copy. For
        averages, check the inner method: several copies in one pass may be rounded by another kernel."""
        example, replayed = self._request.inputs, cast(Any, copy.copy(self))
        ordinary = lambda x, t=self._request.target: self._ordinary(x, t, self._inner)  # noqa: E731
        replayed._method, replayed._ordinary = self._inner, ordinary
        for inputs in (example, tuple(0.5 * x.roll(1, 0) for x in example)) if self._graph else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = ordinary(inputs)
                difference = largest_difference(replayed(inputs), expected)
                # Nondeterministic kernels can move units across a threshold between any two calls.
                repeats = largest_difference(ordinary(inputs), expected) if difference > 1e-5 else 0
            if difference > max(1e-5, 2 * repeats):
                differs = f"a replay differs from an ordinary call by {difference:.1g} of the map's maximum"
                raise UnsupportedModelError(f"{REFUSED}: {differs}")

    def release(self) -> None:
        """Frees the memory of the graph; later calls are ordinary ones."""
        with self._lock:
            self._graph = None


def _kinds(inputs: Maps) -> str:
    return ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}" for x in inputs)
