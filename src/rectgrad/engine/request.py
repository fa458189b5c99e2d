"""What a method explains: a model on some inputs, for a target. Methods ask it for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectgrad import kernels, ops
from rectgrad.engine import target as targets
from rectgrad.engine.backward import LinkedPass, linked
from rectgrad.engine.bridge import Tape
from rectgrad.engine.diagnose import check_finite, check_inputs, warn_if_incomplete, warn_if_nothing_passed
from rectgrad.engine.op import Keep, per_sample
from rectgrad.engine.passes import Maps, Observe, Pass, copied
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import LinkedTape, Unlinked
from rectgrad.engine.trace import Row, Trace

if TYPE_CHECKING:
    from rectgrad.methods import Method


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
    tape: Tape | LinkedTape | None = field(default=None, init=False)  # of the last pass
    answer: Tensor | None = field(default=None, init=False)  # the outputs of the last pass

    @property
    def trace(self) -> Trace | None:
        return self.tape.trace if self.tape is not None else None

    @property
    def n(self) -> int:
        return len(self.inputs[0])

    def at(self, inputs: Maps) -> Request:
        """The same question at other inputs: a class left open stays that of the clean inputs."""
        if not self.checked:
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

        return copied((self.args, self.kwargs), changed)

    def given(self, x: Tensor) -> Tensor:
        """A tensor among the further arguments, as the model gets it."""
        x = x.clone() if x.is_inference() else x.detach()
        return x.to(self.device or x.device)

    def tape_for(self, method: Method, named: bool = False) -> Tape:
        """A tape that records what the method's rules need, and what is looked at besides. named: somebody
        will ask for the names of layers."""
        rules = method.rules()
        families = frozenset(rules) | ({"pad"} if "conv" in rules else set())
        if self.diagnosing:
            return Tape(families | frozenset(ops.FAMILIES), decompose=method.decompose)
        carries = method.thresholds and self.observe is None and kernels.carries(self.inputs[0])
        if self.observe is not None:
            families |= ops.RECTIFIERS
        elif carries:
            families |= CARRYING
        elif method.thresholds and kernels.chosen() != "reference":
            families |= {"batch_norm"}  # torch would keep its input, and take longer
        keeps = {family: keeping(family, rules.get(family), carries) for family in families}
        tape = Tape(families, keeps, method.decompose)
        tape.current.carries = carries
        tape.named = named or self.observe is not None or bool(method.decompose)
        return tape

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
        return Pass(self, Tape((), decompose=())).outputs

    def backward(self, method: Method) -> Maps:
        """The gradient of the scores by the method's rules; sample by sample if the batch is mixed."""
        if self._simple(method):
            passed: LinkedPass | None = None
            try:
                passed = self._linked(method)
                if passed is not None:
                    return self._answered(method, passed)
            except Unlinked:
                assert passed is not None
                passed.give_up(self.model)
            finally:
                if passed is not None:
                    passed.end()
            del passed
        return self._answered(method, self.passed or Pass(self, self.tape_for(method)))

    def backward_from_baseline(self, method: Method, baseline: Maps, finish: Callable[[Maps], Maps]) -> Maps:
        """The same with the ops of a second pass, on the baseline, as reference (DeepLIFT). Sets the trace's
        completeness error: the sum of the finished map minus the difference of the scores."""
        resolved = self.resolved()
        reference = Pass(self.at(baseline), self.tape_for(method))
        baseline_scores = reference.scores(resolved)
        passed = Pass(self, self.tape_for(method))
        scores = passed.scores(resolved)
        pair(passed, reference)
        raw = self.finish(method, passed, scores)
        total = sum(per_sample(m).sum(1) for m in finish(raw))
        difference = (scores - baseline_scores).detach()
        passed.tape.trace.completeness_error = total - difference
        if not self.diagnosing:
            warn_if_incomplete(self, passed.tape.trace, difference)
        return raw

    def _simple(self, method: Method) -> bool:
        """Whether the method needs no more than a linked pass."""
        simple = method.rectifies and not method.decompose and kernels.chosen() != "reference"
        return simple and self.passed is None and self.observe is None and not self.diagnosing

    def _linked(self, method: Method) -> LinkedPass | None:
        rules, carries = method.rules(), method.thresholds and kernels.carries(self.inputs[0])
        keeps = {family: keeping(family, rule, carries) for family, rule in rules.items()}

        return linked(self, lambda: LinkedPass(self, LinkedTape(keeps, carries)))

    def _answered(self, method: Method, passed: Pass | LinkedPass) -> Maps:
        if method.per_sample and self.n > 1 and mixes_samples(self, passed):
            if self.settled is None and not callable(self.target):
                self.resolved(passed.outputs)
            del passed
            parts = [self.rows(i, i + 1).backward(method) for i in range(self.n)]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        with passed.lock:
            passed.adopt(self.region)
            try:
                return self.finish(method, passed, passed.scores(self.resolved(passed.outputs)))
            finally:
                passed.forget()

    def finish(self, method: Method, passed: Pass | LinkedPass, scores: Tensor) -> Maps:
        """The backward pass and its checks."""
        self.tape = passed.tape
        outputs = getattr(passed.outputs, "logits", passed.outputs)
        self.answer = outputs.detach() if isinstance(outputs, Tensor) else None
        maps = passed.backward(method, scores, once=self.passed is None, observe=self.observe)
        if self.region is not None and maps[0].is_cuda:
            self.region.settle()  # while the device is at work
        if not self.diagnosing:
            maps = check_finite(self, method, passed, scores, maps)
            warn_if_nothing_passed(self, method, maps)
        return maps


# Linear steps with kernels of their own. Their gradient needs nothing kept.
CARRYING = frozenset({"conv", "linear", "batch_norm", "avg_pool"})


def keeping(family: str, rule: Any, carries: bool) -> Keep:
    """What a rule reads of the calls it is for; without one, what the plain gradient does."""
    shapes_only = getattr(rule, "shapes_only", rule is None and family in CARRYING)
    inputs = not (shapes_only or getattr(rule, "output_only", False))
    return Keep(inputs, not shapes_only, None if carries else getattr(rule, "concerns", None))


def pair(passed: Pass, reference: Pass) -> None:
    """Each op with its counterpart in the baseline's pass."""
    ours, theirs = passed.tape.ops, reference.tape.ops
    for i, op in enumerate(ours):
        if i >= len(theirs) or theirs[i].name != op.name or theirs[i].shape != op.shape:
            raise ValueError(
                f"the model ran other operations on the baseline than on the input, from "
                f"{passed.tape.trace.layer_of(op)!r} on; DeepLIFT needs both to take the same path"
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


def mixes_samples(request: Request, passed: Pass | LinkedPass) -> bool:
    """Whether a rectified activation's first dimension is not the samples (tokens folded into the batch)."""
    if passed.mixes is None:
        passed.mixes = _mixes(request, passed)
    return passed.mixes


def _mixes(request: Request, passed: Pass | LinkedPass) -> bool:
    n, rows = passed.n, [row for row in passed.tape.trace.rows if row.shape]
    shapes = [op.shape for op in passed.rectified()]
    if any(not shape or shape[0] != n for shape in shapes) or any(_by_chance(row, n) for row in rows):
        return True
    if not passed.tape.trace.turned and not any(_turned(row, n) for row in rows):
        return False
    # The size alone does not tell samples from channels or positions: one sample alone does.
    try:
        alone = Pass(request.rows(0, 1), Tape(ops.RECTIFIERS, decompose=()))
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


_TURNING = frozenset("transpose permute movedim moveaxis swapaxes swapdims t einsum".split())
