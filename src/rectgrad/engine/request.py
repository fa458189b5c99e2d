"""What a method explains: a model on some inputs, for a target. Methods ask it for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine import target as targets
from rectgrad.engine.backward import (
    Maps,
    Observe,
    Pass,
    foreign_modes,
    recorded_pass,
    remember_bridged,
)
from rectgrad.engine.bridge import BridgedPass, BridgeRecorder, unsupported
from rectgrad.engine.diagnose import check_finite, check_inputs, warn_if_incomplete, warn_if_nothing_passed
from rectgrad.engine.op import Rules, as_rule, per_sample
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import Recorder, Refused, Unlinked
from rectgrad.engine.torch_private import map_tensors
from rectgrad.engine.trace import Row, Trace


@dataclass(frozen=True)
class Plan:
    """What the engine needs to know of a method: its rules and what they require. See methods/method.py."""

    name: str
    rules: Rules
    rectifies: bool = False
    thresholds: bool = False
    decompose: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    per_sample: bool = False

    @classmethod
    def of(cls, method: Any) -> Plan:
        return cls(
            type(method).__name__,
            {family: as_rule(rule) for family, rule in method.rules().items()},
            method.rectifies,
            method.thresholds,
            method.decompose,
            method.facts,
            method.per_sample,
        )


class NeedsOrdinaryCallError(Exception):
    """A replay found something that deserves the warnings or the error of an ordinary call."""


NO_RULES = Plan("saliency", {})
ANYTHING = ("attention", "glu")  # decomposed in a pass that is kept for any method


@dataclass
class Request:
    model: Any
    inputs: Maps
    args: tuple
    kwargs: dict[str, Any]
    target: Any
    passed: Pass | None = None  # a recorded pass to answer from
    settled: targets.Scores | None = None  # the target, once a class left open is known
    observe: Observe | None = None  # sees R at every rectified activation
    region: Region | None = None
    device: torch.device | None = None  # where the model is, if it sends its inputs there itself
    offset: int = 0  # of the first sample in what the caller gave
    diagnosing: bool = False  # run to find a fault: its own checks would do so for ever
    checked: bool = False  # whether the inputs are known to be finite
    bridged: bool = False  # the recorder could not link this request
    unmixed: bool = False  # it is known that no activation mixes the samples
    suspicions: list[Tensor] | None = None  # in a capture: flags, instead of warnings and errors
    graph: Any = None  # a captured pass of the method, to replay
    last: Pass | None = field(default=None, init=False)  # the last pass
    answer: Tensor | None = field(default=None, init=False)  # the outputs of the last pass

    @property
    def trace(self) -> Trace | None:
        """Of the last pass."""
        return self.last.trace if self.last is not None else None

    @property
    def n(self) -> int:
        return len(self.inputs[0])

    def at(self, inputs: Maps) -> Request:
        """The same question at other inputs: a class left open stays that of the clean inputs."""
        if not self.checked and self.suspicions is None:  # a capture checks them with everything else
            check_inputs(self.inputs)
            self.checked = True
        return replace(self, inputs=inputs, passed=None, settled=self.resolved(), checked=False)

    def at_once(self, points: Sequence[Maps]) -> Request:
        """The same question at several inputs in one pass: all samples of the first, then of the second."""
        k, one = len(points), self.at(points[0])
        args, kwargs = self._of_samples(lambda x: torch.cat([x] * k))
        inputs = tuple(torch.cat(tensors) for tensors in zip(*points, strict=True))
        settled, offset = self.resolved().copies(k), Repeating(self.offset, self.n)
        return replace(
            one, inputs=inputs, args=args, kwargs=kwargs, target=None, settled=settled, offset=offset
        )

    def asking(self, target: Any) -> Request:
        """Another question about the same inputs, answered from the same pass."""
        return replace(self, target=target, settled=None)

    def watched(self, observe: Observe) -> Request:
        """The same question in fresh passes that record every op, to find a fault."""
        return replace(self, passed=None, observe=observe, diagnosing=True)

    def rows(self, start: int, stop: int) -> Request:
        """Some of the samples."""
        args, kwargs = self._of_samples(lambda x: x[start:stop])
        return replace(
            self,
            inputs=tuple(x[start:stop] for x in self.inputs),
            args=args,
            kwargs=kwargs,
            target=targets.narrow(self.target, start, stop, self.n),
            passed=None,
            settled=self.settled.rows(start, stop) if self.settled is not None else None,
            offset=self.offset + start,
        )

    def _of_samples(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The further arguments, those changed that have one row for each sample."""
        n = self.n

        def changed(x: Tensor) -> Tensor:
            return change(x) if x.dim() > 0 and x.shape[0] == n else x

        return map_tensors(changed, (self.args, self.kwargs))

    def given(self, x: Tensor) -> Tensor:
        """A tensor among the further arguments, as the model gets it."""
        x = x.clone() if x.is_inference() else x.detach()
        return x.to(self.device or x.device)

    def resolved(self, outputs: Any = None) -> targets.Scores:
        if self.settled is None:
            if outputs is None and self.passed is not None:
                outputs = self.passed.outputs
            if outputs is None and not callable(self.target):
                outputs = self.outputs()
            self.settled = targets.resolve(self.target, outputs, self.n)
        return self.settled

    def outputs(self) -> Any:
        """The model's outputs, without recording anything."""
        passed = self.recording(NO_RULES)
        passed.close()
        return passed.outputs

    def recording(self, plan: Plan, whole: bool = False, named: bool = False) -> Pass:
        """A forward pass: recorded, or bridged if it has something that cannot be linked.

        whole: keep everything, for any method. named: note the layer of each op.
        """
        everything = whole or self.diagnosing or self.observe is not None
        named, decompose = named or everything, ANYTHING if whole else plan.decompose
        if not self.bridged:
            passed = recorded_pass(self, plan, Recorder(None if everything else plan.rules, decompose, named))
            if passed is not None:
                return passed
        families = frozenset(plan.rules) | ({"pad"} if "conv" in plan.rules else set())
        if plan.rectifies or self.observe is not None:
            families |= ops.RECTIFIERS | {"div", "mul"}  # a division by six makes a gate of a ReLU6
        wanted, plain = None if everything else families, foreign_modes() > 0
        try:
            return BridgedPass(self, BridgeRecorder(wanted, decompose, plain=plain, named=named))
        except Refused as error:
            if plan.rules or whole:
                raise unsupported(plan.name, str(error)) from None
        return BridgedPass(self, BridgeRecorder((), transparent=True))

    def backward(self, method: Any) -> Maps:
        """The gradient of the scores by the method's rules; sample by sample if the batch is mixed."""
        if self.graph is not None:
            return self._replayed()
        plan = Plan.of(method)

        def maps(request: Request) -> Maps:
            passed = request.passed or request.recording(plan)
            try:
                return request._answered(method, plan, passed)
            finally:
                if request.passed is None:
                    passed.close()

        return self._or_bridged(maps)

    def backward_from_baseline(self, method: Any, baseline: Maps, finish: Callable[[Maps], Maps]) -> Maps:
        """The same with the ops of a second pass, on the baseline, as reference (DeepLIFT). Sets the trace's
        completeness error: the sum of the finished map minus the difference of the scores."""
        if self.graph is not None:
            return self._replayed()
        plan, resolved = Plan.of(method), self.resolved()
        return self._or_bridged(
            lambda request: request._from_baseline(method, plan, resolved, baseline, finish)
        )

    def _or_bridged(self, maps: Callable[[Request], Maps]) -> Maps:
        """`maps` of this request; over the bridge if something turns out that cannot be linked."""
        try:
            return maps(self)
        except Unlinked:
            if self.passed is None:
                remember_bridged(self.model)
        bridged = replace(self, passed=None, bridged=True)
        found = maps(bridged)
        self.last, self.answer, self.settled = bridged.last, bridged.answer, bridged.settled
        return found

    def _replayed(self) -> Maps:
        assert isinstance(self.settled, targets.Picked | targets.Given)
        index = self.settled.index if isinstance(self.settled, targets.Picked) else None
        found = self.graph.run(self.inputs, index)
        if found is None:
            raise NeedsOrdinaryCallError
        raw, self.answer = found
        return raw

    def recording_of(self, method: Any) -> Pass:
        """A forward pass for a method."""
        return self.recording(Plan.of(method))

    def _from_baseline(
        self, method: Any, plan: Plan, resolved: targets.Scores, x0: Maps, finish: Callable[[Maps], Maps]
    ) -> Maps:
        reference = self.at(x0).recording(plan)
        here = replace(self, passed=None, bridged=isinstance(reference, BridgedPass))
        passed = here.recording(plan)
        if type(passed) is not type(reference):
            raise Unlinked("only one of the two passes could be recorded")
        try:
            resolved = resolved.at(passed.outputs)
            baseline_scores, scores = reference.scores(resolved), passed.scores(resolved)
            pair(passed, reference)
            raw = self.finish(method, plan, passed, scores)
        finally:
            passed.close()
            reference.close()
        difference = (scores - baseline_scores).detach()
        assert self.trace is not None
        self.trace.completeness_error = sum(per_sample(m).sum(1) for m in finish(raw)) - difference
        if not self.diagnosing:
            warn_if_incomplete(self, self.trace, difference)
        return raw

    def _answered(self, method: Any, plan: Plan, passed: Pass) -> Maps:
        if plan.per_sample and self.n > 1 and not self.unmixed and mixes_samples(self, passed):
            if self.settled is None and not callable(self.target):
                self.resolved(passed.outputs)
            parts = [self.rows(i, i + 1).backward(method) for i in range(self.n)]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        with passed.lock:
            passed.adopt(self.region)
            try:
                target = self.resolved(passed.outputs).at(passed.outputs)
                return self.finish(method, plan, passed, passed.scores(target))
            finally:
                passed.forget()

    def finish(self, method: Any, plan: Plan, passed: Pass, scores: Tensor) -> Maps:
        """The backward pass and its checks."""
        outputs = getattr(passed.outputs, "logits", passed.outputs)
        self.answer = outputs.detach() if isinstance(outputs, Tensor) else None
        self.last = passed
        maps = passed.backward(plan, scores, once=self.passed is None, observe=self.observe)
        if self.region is not None and maps[0].is_cuda and self.suspicions is None:
            self.region.settle()  # while the device is at work
        if not self.diagnosing:
            maps = check_finite(self, method, passed, scores, maps)
            warn_if_nothing_passed(self, method, plan, maps)
        return maps


def pair(passed: Pass, reference: Pass) -> None:
    """Each op with its counterpart in the baseline's pass."""
    ours, theirs = passed.ops, reference.ops
    for i, op in enumerate(ours):
        if i >= len(theirs) or theirs[i].name != op.name or theirs[i].shape != op.shape:
            raise ValueError(
                f"the model ran other operations on the baseline than on the input, from "
                f"{passed.trace.layer_of(op)!r} on; DeepLIFT needs both to take the same path"
            )
        op.reference = theirs[i]


class Repeating(int):
    """The offset of n samples that are there several times: plus a row, the number of that row's sample."""

    n: int

    def __new__(cls, offset: int, n: int) -> Repeating:
        self = super().__new__(cls, offset)
        self.n = n
        return self

    def __add__(self, row: int) -> int:
        return int(self) + row % self.n


def mixes_samples(request: Request, passed: Pass) -> bool:
    """Whether a rectified activation's first dimension is not the samples (tokens folded into the batch)."""
    if passed.mixes is None:
        passed.mixes = _mixes(request, passed)
    return passed.mixes


def _mixes(request: Request, passed: Pass) -> bool:
    n, rows = passed.n, [row for row in passed.trace.rows if row.shape]
    shapes = [op.shape for op in passed.rectified()]
    if any(not shape or shape[0] != n for shape in shapes) or any(_by_chance(row, n) for row in rows):
        return True
    if not passed.trace.turned and not any(_turned(row, n) for row in rows):
        return False
    # The size alone does not tell samples from channels or positions: one sample alone does.
    try:
        alone = BridgedPass(request.rows(0, 1), BridgeRecorder(ops.RECTIFIERS))
        alone.close()
    except Exception:
        return False  # batch norm in training mode and programs of fixed size take no single sample
    return any(op.shape[0] != 1 for op in alone.rectified())


def _by_chance(row: Row, n: int) -> bool:
    """Some of the rows of a tensor that has other rows than samples, as many as there are samples."""
    picked = row.name in ("__getitem__", "index_select", "masked_select", "take_along_dim", "gather")
    return picked and len(row.source) == len(row.shape) and row.source[0] != n and row.shape[0] == n


def _turned(row: Row, n: int) -> bool:
    """The samples may have changed places with what is as many."""
    if row.name in _TURNING:
        return n in row.shape[1:]
    return row.shape[0] != n or bool(row.source and row.source[0] != n)


_TURNING = frozenset("transpose permute movedim moveaxis swapaxes swapdims t einsum stack".split())
