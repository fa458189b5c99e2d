"""One forward pass, kept for any number of backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rectgrad import ops
from rectgrad.engine import graph
from rectgrad.engine import target as targets
from rectgrad.engine.bridge import Tape
from rectgrad.engine.op import Op
from rectgrad.engine.preserve import Region

if TYPE_CHECKING:
    from rectgrad.engine.request import Request
    from rectgrad.methods import Method

Maps = tuple[Tensor, ...]
Observe = Callable[[Op, Tensor], None]


class UnsupportedModelError(RuntimeError):
    """A part of the model that a rule cannot reach: the map would be a plain gradient without saying so."""


class Pass:
    """One forward pass of a request's model on its inputs, recorded on `tape`."""

    def __init__(self, request: Request, tape: Tape) -> None:
        self.n = len(request.inputs[0])
        self.mixes: bool | None = None  # see mixes_samples
        self.lock = threading.RLock()  # held from scores to maps: both leave traces on the tape
        self.tape = tape
        tape.foreign_leaves, tape.current.batch = True, self.n
        self.adopt(request.region)
        if request.region is not None:
            request.region.begin()
        tape.trace.root = request.model if isinstance(request.model, nn.Module) else None
        with torch.inference_mode(False), torch.enable_grad():
            self.leaves = tuple(_leaf(x) for x in request.inputs)
            # Copies, so that a model may write on its input and into the containers it is given.
            inputs = tuple(leaf.to(request.device or leaf.device, copy=True) for leaf in self.leaves)
            args, kwargs = (copied(given, request.given) for given in (request.args, request.kwargs))
            with tape:
                self.outputs = request.model(*inputs, *args, **kwargs)
        if request.region is not None:
            request.region.restore()
        self.length = tape.length()

    def adopt(self, region: Region | None) -> None:
        """What is written from now on is that call's to put back."""
        self.tape.keeper = region.keeper if region is not None else None

    def forget(self) -> None:
        """What a question added to the record, a callable target's calls."""
        self.tape.truncate(self.length)

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
        below, rules = graph.Graph(scores.grad_fn), method.rules()
        for op in self.tape.ops:
            op.facts.clear()
        hidden = graph.hidden_part(below, self.tape.trace) if rules else None
        if hidden:
            raise _unsupported(method, hidden)
        graph.mark_gates(below)
        if "last" in method.facts:
            graph.mark_last(below)
        if "folded" in method.facts:
            graph.mark_constant(below, self.leaves)
            graph.mark_folded(below)
        if observed:
            graph.mark_channels(below)
        elif method.thresholds and graph.plain_steps(rules):
            graph.mark_carrying(below)

    def rectified(self) -> list[Op]:
        return [op for op in self.tape.ops if op.family in ops.RECTIFIERS]


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


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Those in lists, tuples and dicts, however deep."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part, seen)


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
    seen = f"no rectifier, unless one is written by hand ({', '.join(names)})" if names else None
    return (
        f"{type(method).__name__} found nothing to rectify between the score and the input: "
        f"{seen or 'no activation'}; its map would be the plain gradient. Use method 'saliency' for that, or "
        "write the activation as relu."
    )
