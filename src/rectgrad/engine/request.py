"""A request: a model, its inputs and a target. Methods ask it for gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine import target as targets
from rectgrad.engine.backward import Maps, Observe, Pass, Plan, foreign_modes, recorded_pass, remember_bridged
from rectgrad.engine.bridge import BridgedPass, BridgeRecorder, unsupported
from rectgrad.engine.diagnose import check_finite, warn_if_nothing_passed
from rectgrad.engine.op import as_rules
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import Recorder, Refused, Unlinked
from rectgrad.engine.torch_private import map_tensors
from rectgrad.engine.trace import Trace
from rectgrad.ops.samples import by_chance, may_move_samples

ANYTHING = ("attention", "glu")  # families to decompose in a pass that is kept for any method


@dataclass
class Request:
    model: Any
    inputs: Maps
    args: tuple
    kwargs: dict[str, Any]
    target: Any  # callable once it is resolved
    passed: Pass | None = None  # a recorded pass to use
    observe: Observe = None  # sees R at every rectified activation
    region: Region | None = None
    device: torch.device | None = None  # of the model, if it moves its inputs there itself
    offset: int = 0  # of the first sample in the caller's inputs
    copies: int = 1  # of the samples in the inputs
    diagnosing: bool = False  # run to find a fault, without checks of its own
    bridged: bool = False  # the recorder could not link this request
    suspicions: list[Tensor] | None = None  # in a capture: flags, instead of warnings and errors
    replay: Callable[[Maps, Tensor | None], tuple[Maps, Tensor]] | None = None  # a captured pass instead
    memo: dict[str, int] = field(default_factory=dict)  # what a capture learns from earlier passes
    last: Pass | None = field(default=None, init=False)  # the last pass
    answer: Tensor | None = field(default=None, init=False)  # the outputs of the last pass
    difference: Tensor | None = field(default=None, init=False)  # of the scores from those of a baseline

    @property
    def trace(self) -> Trace | None:
        """The trace of the last pass."""
        return self.last.trace if self.last is not None else None

    @property
    def n(self) -> int:
        return len(self.inputs[0])

    def number(self, row: int) -> int:
        """The index of a row's sample in the caller's inputs."""
        return self.offset + row % (self.n // self.copies)

    def at(self, inputs: Maps) -> Request:
        """The same request for other inputs. The target is resolved on the clean inputs."""
        clean = inputs is self.inputs and self.passed is None
        return replace(self, inputs=inputs, passed=None, target=self.target if clean else self.resolved())

    def at_once(self, inputs: Maps, k: int) -> Request:
        """The same request for k inputs in one pass: all samples of the first one, then of the second one."""
        self.resolved()
        return replace(self._of_samples(lambda x: torch.cat([x] * k), inputs), copies=k)

    def watched(self, observe: Observe) -> Request:
        """The same request with new passes that record every op, to find a fault."""
        return replace(self, passed=None, observe=observe, diagnosing=True)

    def rows(self, start: int, stop: int) -> Request:
        """The request for some of the samples."""
        rows = self._of_samples(lambda x: x[start:stop], tuple(x[start:stop] for x in self.inputs))
        return replace(rows, offset=self.number(start), copies=1)

    def _of_samples(self, change: Callable[[Tensor], Tensor], inputs: Maps) -> Request:
        """A request with these inputs, where `change` is applied to all that has one row for each sample."""
        n = self.n

        def changed(x: Tensor) -> Tensor:
            return change(x) if x.dim() > 0 and x.shape[0] == n else x

        args, kwargs = map_tensors(changed, (self.args, self.kwargs))
        target = targets.changed(self.target, n, change)
        return replace(self, inputs=inputs, args=args, kwargs=kwargs, target=target, passed=None)

    def given(self, x: Tensor) -> Tensor:
        """A tensor among the further arguments, as it is passed to the model."""
        return (x.clone() if x.is_inference() else x.detach()).to(self.device or x.device)

    def resolved(self, outputs: Any = None) -> targets.Scores:
        """The target as a function. None becomes the largest of these outputs, or of the model's."""
        if not callable(self.target):
            if outputs is None:
                outputs = self.outputs() if self.passed is None else self.passed.outputs
            self.target = targets.resolve(self.target, outputs, self.n)
        return self.target

    def outputs(self) -> Any:
        """The model's outputs, without recording anything."""
        with closing(self.recording(Plan())) as passed:
            return passed.outputs

    def mixes(self, method: Plan) -> bool:
        """Whether a pass for the method mixes samples: `mixes_samples` of the last pass or a new one."""
        if self.last is not None:
            return mixes_samples(self, self.last)
        if self.n < 2:
            return False
        with closing(self.recording(method)) as passed:
            return mixes_samples(self, passed)

    def recording(self, method: Plan | None, named: bool = False) -> Pass:
        """A forward pass: recorded, or bridged if something cannot be linked.

        method: what the pass is for; None keeps everything, for any method. named: store each op's layer.
        """
        everything = method is None or method.everything or self.observe is not None
        named, name = named or everything, "rectgrad" if method is None else type(method).__name__
        rules, decompose = ({}, ANYTHING) if method is None else (as_rules(method.rules()), method.decompose)
        families = frozenset(rules) | ({"pad"} if "conv" in rules else set())
        if (method is not None and method.rectifies) or self.observe is not None:
            families |= ops.RECTIFIERS | {"div", "mul"}  # a division by six makes a gate of a ReLU6
        try:
            recorder = Recorder(None if everything else rules, decompose, named)
            if not self.bridged and (passed := recorded_pass(self, recorder)) is not None:
                return passed
            wanted, plain = None if everything else families, foreign_modes() > 0
            return BridgedPass(self, BridgeRecorder(wanted, decompose, plain=plain, named=named))
        except Refused as error:
            if rules or method is None:
                raise unsupported(name, str(error)) from None
        return BridgedPass(self, BridgeRecorder((), transparent=True))

    def backward(self, method: Any, baseline: Maps | None = None) -> Maps:
        """The gradient of the scores by the method's rules; sample by sample if the batch is mixed. baseline:
        inputs of a second pass, whose ops are the references of the first one's (DeepLIFT)."""
        if self.replay is not None:
            index = self.target.index if isinstance(self.target, targets.Picked) else None
            raw, self.answer = self.replay(self.inputs, index)
            return raw
        try:
            return self._backward(method, baseline)
        except Unlinked:
            if self.passed is None:
                remember_bridged(self.model)
        bridged = replace(self, passed=None, bridged=True)
        found = bridged._backward(method, baseline)
        self.last, self.answer, self.target = bridged.last, bridged.answer, bridged.target
        self.difference = bridged.difference
        return found

    def _backward(self, method: Any, baseline: Maps | None) -> Maps:
        if baseline is not None:
            return self._from_baseline(method, baseline)
        if self.passed is not None:
            return self._answered(method, self.passed)
        with closing(self.recording(method)) as passed:
            return self._answered(method, passed)

    def _answered(self, method: Any, passed: Pass) -> Maps:
        # A capture is known not to mix the samples.
        if method.per_sample and self.suspicions is None and mixes_samples(self, passed):
            self.resolved(passed.outputs)
            parts = [self.rows(i, i + 1).backward(method) for i in range(self.n)]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        with passed.lock:
            passed.adopt(self.region)
            try:
                return self._finish(method, passed, passed.scores(self.resolved(passed.outputs)))
            finally:
                passed.recorder.truncate(passed.length)  # without the ops that a callable target added

    def _from_baseline(self, method: Any, baseline: Maps) -> Maps:
        with closing(replace(self, passed=None).recording(method)) as passed:
            target = self.resolved(passed.outputs)
            with closing(self.at(baseline).recording(method)) as reference:
                if type(passed) is not type(reference):
                    raise Unlinked("only one of the two passes could be recorded")
                baseline_scores, scores = reference.scores(target), passed.scores(target)
                self.difference = (scores - baseline_scores).detach()
                pair(passed, reference)
                return self._finish(method, passed, scores)

    def _finish(self, method: Any, passed: Pass, scores: Tensor) -> Maps:
        """Run the backward pass and its checks."""
        outputs = getattr(passed.outputs, "logits", passed.outputs)
        self.answer = outputs.detach() if isinstance(outputs, Tensor) else None
        self.last = passed
        maps = method.prepared(self, passed, scores).result(self, passed, scores)
        if self.region is not None and maps[0].is_cuda and self.suspicions is None:
            self.region.settle()  # while the device is busy
        if not self.diagnosing:
            maps = check_finite(self, method, passed, scores, maps)
            warn_if_nothing_passed(self, method, maps)
        return maps


def pair(passed: Pass, reference: Pass) -> None:
    """Give each op its counterpart in the baseline's pass."""
    ours, theirs = passed.ops, reference.ops
    for i, op in enumerate(ours):
        if i >= len(theirs) or theirs[i].name != op.name or theirs[i].shape != op.shape:
            raise ValueError(
                f"the model ran other operations on the baseline than on the input, beginning at "
                f"{passed.trace.layer_of(op)!r}; DeepLIFT needs the same operations on both"
            )
        op.reference = theirs[i]


def mixes_samples(request: Request, passed: Pass) -> bool:
    """Whether a rectified activation's first dimension is not the samples (tokens folded into the batch)."""
    if passed.mixes is None:
        passed.mixes = passed.n > 1 and _mixes(request, passed)
    return passed.mixes


def _mixes(request: Request, passed: Pass) -> bool:
    n, rows = passed.n, [row for row in passed.trace.rows if row.shape]
    if passed.folds or any(by_chance(row.name, row.source, row.shape, n) for row in rows):
        return True
    moves = (may_move_samples(row.family, row.source, row.shape, n) for row in rows)
    if not passed.trace.turned and not any(moves):
        return False
    # Sizes alone do not distinguish samples from channels or positions: a pass of one sample does.
    try:
        with closing(BridgedPass(request.rows(0, 1), BridgeRecorder(ops.RECTIFIERS))) as alone:
            return alone.folds
    except Exception:
        return False  # batch norm in training mode and programs of fixed size accept no single sample
