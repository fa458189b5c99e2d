"""One forward pass kept for any number of backward passes, and the subject that a method explains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rectgrad import graph, ops
from rectgrad import target as targets
from rectgrad.diagnose import check_finite, check_inputs, warn_if_nothing_passed
from rectgrad.op import Op
from rectgrad.preserve import Region
from rectgrad.tape import Tape
from rectgrad.trace import Row, Trace

if TYPE_CHECKING:
    from rectgrad.methods import Method

Maps = tuple[Tensor, ...]
Observe = Callable[[Op, Tensor], None]


class UnsupportedModelError(RuntimeError):
    """A part of the model that a rule cannot reach: the map would be a plain gradient without saying so."""


class Pass:
    """One forward pass of a subject's model on its inputs, recorded on `tape`."""

    def __init__(self, subject: Subject, tape: Tape) -> None:
        self.n = len(subject.inputs[0])
        self.mixes: bool | None = None  # see mixes_samples
        self.lock = threading.RLock()  # held from scores to maps: both leave traces on the tape
        self.tape = tape
        tape.foreign_leaves, tape.current.batch = True, self.n
        tape.keeper = subject.region.keeper if subject.region is not None else None
        tape.trace.root = subject.model if isinstance(subject.model, nn.Module) else None
        with torch.inference_mode(False), torch.enable_grad():
            self.leaves = tuple(_leaf(x) for x in subject.inputs)
            # Copies, so that a model may write on its input and into the containers it is given.
            inputs = tuple(leaf.to(subject.device or leaf.device, copy=True) for leaf in self.leaves)
            args, kwargs = (copied(given, subject.given) for given in (subject.args, subject.kwargs))
            with tape:
                self.outputs = subject.model(*inputs, *args, **kwargs)
        if subject.region is not None:
            subject.region.restore()
        self.length = tape.length()

    def scores(self, target: targets.Scores) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            if isinstance(target, targets.Picked):
                scores = target(self.outputs)
            else:  # a callable target is part of what is explained: its steps follow the rules too
                outputs = copied(self.outputs, torch.clone)
                with self.tape:
                    scores = target(outputs)
        if not scores.requires_grad:
            raise ValueError(
                "the score to explain does not depend on the input: the forward pass detaches it, runs under "
                "no_grad, or leaves torch; explain a model that is differentiable from input to output"
            )
        return scores

    def backward(self, method: Method, scores: Tensor, once: bool, observe: Observe | None = None) -> Maps:
        """The gradient of `scores` by the method's rules, one tensor for each input."""
        current = self.tape.current
        rules = method.rules()
        with self.lock, torch.inference_mode(False):
            if rules or observe:
                self._prepare(method, scores, observe is not None)
            current.rules, current.observe, current.once = rules, observe, once
            current.ran, current.sums = set(), []
            ones = torch.ones_like(scores)
            try:
                with self.tape:  # a backward hook may write on the model
                    grads = torch.autograd.grad(
                        scores, self.leaves, ones, retain_graph=not once, allow_unused=True
                    )
            except RuntimeError as error:
                raise _in_our_words(error, method, once) from None
            finally:
                current.rules, current.observe = {}, None
            self.sums, ran = current.sums, current.ran
        if method.rectifies and not ran & ops.RECTIFIERS:
            raise UnsupportedModelError(_nothing_rectified(method, self))
        return tuple(
            torch.zeros_like(x) if g is None else g.detach() for g, x in zip(grads, self.leaves, strict=True)
        )

    def _prepare(self, method: Method, scores: Tensor, observed: bool) -> None:
        """What the rules need to know of the graph; and no rule for a network with parts out of reach."""
        nodes = graph.walk(scores)
        for op in self.tape.ops:
            op.facts.clear()
        hidden = graph.hidden_part(nodes, self.tape.trace) if method.rules() else None
        if hidden:
            raise _unsupported(method, hidden)
        graph.mark_gates(nodes)
        if "last" in method.facts:
            graph.mark_last(scores)
        if "folded" in method.facts:
            graph.mark_constant(nodes, self.leaves)
            graph.mark_folded(nodes)
        if observed:
            graph.mark_channels(nodes)

    def rectified(self) -> list[Op]:
        return [op for op in self.tape.ops if op.family in ops.RECTIFIERS]


class Subject:
    """What is explained: a model on some inputs, for a target. Methods ask it for gradients."""

    def __init__(
        self, model: Any, inputs: Maps, args: tuple, kwargs: dict, target: Any, passed: Pass | None = None
    ) -> None:
        self.model, self.inputs, self.args, self.kwargs = model, inputs, args, kwargs
        self.target, self.passed = target, passed
        self._resolved: targets.Scores | None = None
        self.observe: Observe | None = None
        self.trace: Trace | None = None  # of the last pass
        self.region: Region | None = None
        self.device: torch.device | None = None  # where the model is, if it sends its inputs there itself
        self.diagnosing = False  # the pass is run to find a fault: its own checks would do so for ever
        self._checked = False  # whether the inputs are known to be finite
        self.offset = 0  # of the first sample in what the caller gave

    @property
    def n(self) -> int:
        return len(self.inputs[0])

    def at(self, inputs: Maps) -> Subject:
        """The same question at other inputs: a class left open stays that of the clean inputs."""
        if not self._checked:
            check_inputs(self.inputs)
            self._checked = True
        other = Subject(self.model, inputs, self.args, self.kwargs, self.target)
        other._resolved = self.resolved()
        return other._like(self, self.offset)

    def given(self, x: Tensor) -> Tensor:
        """A tensor among the further arguments, as the model gets it."""
        x = x.clone() if x.is_inference() else x.detach()
        return x.to(self.device or x.device)

    def asking(self, target: Any) -> Subject:
        """Another question about the same inputs, answered from the same pass."""
        other = Subject(self.model, self.inputs, self.args, self.kwargs, target, self.passed)
        return other._like(self, self.offset)

    def rows(self, start: int, stop: int) -> Subject:
        """Some of the samples."""
        n = self.n

        def cut(x: Tensor) -> Tensor:
            return x[start:stop] if x.dim() > 0 and x.shape[0] == n else x

        inputs = tuple(x[start:stop] for x in self.inputs)
        target = targets.narrow(self.target, start, stop, n)
        other = Subject(self.model, inputs, copied(self.args, cut), copied(self.kwargs, cut), target)
        if self._resolved is not None:
            other._resolved = self._resolved.rows(start, stop)
        return other._like(self, self.offset + start)

    def _like(self, other: Subject, offset: int) -> Subject:
        self.observe, self.region, self.offset = other.observe, other.region, offset
        self.diagnosing, self.device = other.diagnosing, other.device
        return self

    def watched(self, observe: Observe) -> Subject:
        """The same subject in fresh passes that record every op, to find a fault."""
        other = Subject(self.model, self.inputs, self.args, self.kwargs, self.target)._like(self, self.offset)
        other._resolved, other.observe, other.diagnosing = self._resolved, observe, True
        return other

    def tape_for(self, method: Method) -> Tape:
        """A tape that records what the method's rules need, and what is looked at besides."""
        rules = method.rules()
        outputs_only = {f for f, rule in rules.items() if getattr(rule, "output_only", False)}
        families = frozenset(rules) | method.families
        if self.diagnosing:
            families |= frozenset(ops.FAMILIES)
        elif self.observe is not None:
            families |= ops.RECTIFIERS
        return Tape(families, outputs_only, method.decompose)

    def resolved(self, outputs: Any = None) -> targets.Scores:
        if self._resolved is None:
            if outputs is None and self.passed is not None:
                outputs = self.passed.outputs
            if outputs is None and not callable(self.target):
                outputs = self.outputs()
            self._resolved = targets.resolve(self.target, outputs, self.n)
        return self._resolved

    def outputs(self) -> Any:
        """The model's outputs, without recording anything."""
        return Pass(self, Tape((), decompose=())).outputs

    def backward(self, method: Method) -> Maps:
        """The gradient of the scores by the method's rules; sample by sample where the batch is mixed."""
        passed = self.passed or Pass(self, self.tape_for(method))
        if method.per_sample and self.n > 1 and mixes_samples(self, passed):
            if self._resolved is None and not callable(self.target):
                self.resolved(passed.outputs)
            del passed
            parts = [self.rows(i, i + 1).backward(method) for i in range(self.n)]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        with passed.lock:
            passed.tape.keeper = self.region.keeper if self.region is not None else None
            try:
                return self.finish(method, passed, passed.scores(self.resolved(passed.outputs)))
            finally:
                passed.tape.truncate(passed.length)  # what a callable target added

    def finish(self, method: Method, passed: Pass, scores: Tensor) -> Maps:
        """The backward pass and its checks."""
        self.trace = passed.tape.trace
        maps = passed.backward(method, scores, once=self.passed is None, observe=self.observe)
        if not self.diagnosing:
            check_finite(self, method, passed, scores, maps)
            warn_if_nothing_passed(self, method, maps)
        return maps


def mixes_samples(subject: Subject, passed: Pass) -> bool:
    """Whether a rectified activation's first dimension is not the samples (tokens folded into the batch)."""
    if passed.mixes is None:
        passed.mixes = _mixes(subject, passed)
    return passed.mixes


def _mixes(subject: Subject, passed: Pass) -> bool:
    n, rows = passed.n, [row for row in passed.tape.trace.rows if row.shape]
    shapes = [op.output.shape for op in passed.rectified()]
    if any(not shape or shape[0] != n for shape in shapes) or any(_by_chance(row, n) for row in rows):
        return True
    if not any(n in shape[1:] for shape in shapes) and not any(_turned(row, n) for row in rows):
        return False
    # The size alone does not tell samples from channels or positions: one sample alone does.
    try:
        alone = Pass(subject.rows(0, 1), Tape(ops.RECTIFIERS, decompose=()))
    except Exception:
        return (
            False  # no single sample is taken by batch norm in training mode, or by a program of fixed size
        )
    return any(op.output.shape[0] != 1 for op in alone.rectified())


def _by_chance(row: Row, n: int) -> bool:
    """Some of the rows of a tensor that has other rows than samples, as many as there are samples."""
    picked = row.name in ("__getitem__", "index_select", "masked_select", "take_along_dim", "gather")
    return picked and len(row.source) == len(row.shape) and row.source[0] != n and row.shape[0] == n


def _turned(row: Row, n: int) -> bool:
    """Dimensions change places, and more than one of them may be the samples."""
    return row.name in _TURNING and n in row.shape[1:]


_TURNING = frozenset("transpose permute movedim moveaxis swapaxes swapdims t einsum".split())


def _leaf(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.clone() if x.is_inference() else x).requires_grad_()


def copied(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Lists, tuples and dicts rebuilt, with `change` applied to every tensor in them."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(copied(v, change) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(v, change) for v in value))
    if type(value) is dict:
        return {k: copied(v, change) for k, v in value.items()}
    if isinstance(value, dict):  # transformers' outputs are dicts with attributes
        try:
            return type(value)(**{k: copied(v, change) for k, v in value.items()})
        except TypeError:
            return value
    return value


def _in_our_words(error: RuntimeError, method: Method, once: bool) -> RuntimeError:
    """What autograd's error means here; the error itself where it means nothing special."""
    if "Checkpointing is not compatible with .grad()" in str(error):
        return _unsupported(method, "reentrant checkpointing; call checkpoint with use_reentrant=False")
    if not once and "modified by an inplace operation" in str(error):
        return RuntimeError("the model or its input was changed after it was recorded; record it again")
    return error


def _unsupported(method: Method, part: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(method).__name__} cannot explain this model: it contains {part}")


def _nothing_rectified(method: Method, passed: Pass) -> str:
    names = list(passed.tape.trace.by_hand)
    seen = f"activations written by hand ({', '.join(names)})" if names else "no activation"
    return (
        f"{type(method).__name__} found nothing to rectify between the score and the input: {seen}; its "
        "map would be the plain gradient. Use method 'saliency' for that, or write the activation as relu."
    )
