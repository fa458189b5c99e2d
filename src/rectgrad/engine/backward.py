"""One forward pass, linked, and its one backward pass."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectgrad import kernels, ops
from rectgrad.engine import chains, graph
from rectgrad.engine import target as targets
from rectgrad.engine.memory import out_of_memory
from rectgrad.engine.op import Op
from rectgrad.engine.passes import Maps, Observe, copied
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import LinkedTape, Unlinked, check_intact, linkable

if TYPE_CHECKING:
    from rectgrad.engine.request import Request
    from rectgrad.methods import Method

Arrived = list[Tensor | None]  # at each input; None where nothing did


class LinkedPass:
    """As `Pass`; but what is recorded is used up by the backward pass."""

    def __init__(self, request: Request, tape: LinkedTape) -> None:
        self.n = len(request.inputs[0])
        self.mixes: bool | None = None
        self.lock = threading.RLock()
        self.tape, self._inputs = tape, request.inputs
        tape.current.batch = self.n
        assert request.region is not None
        self.adopt(request.region)
        request.region.begin(linked=True)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                # Copies, so that a model may write into the containers it is given.
                inputs = tuple(
                    x.detach().to(request.device or x.device, copy=True).requires_grad_()
                    for x in request.inputs
                )
                self.entries = tuple(tape.enter(x) for x in inputs)
                args, kwargs = (copied(given, request.given) for given in (request.args, request.kwargs))
                self._start(inputs)
                with tape:
                    self.outputs = request.model(*inputs, *args, **kwargs)
        except BaseException:
            tape.over = True
            raise
        finally:
            request.region.restore()
        self._check()

    def _start(self, inputs: Maps) -> None:
        """The model is about to run on these."""

    def _check(self) -> None:
        """What cannot be linked raises inside the model, which may have caught it."""
        if self.tape.failed:
            raise Unlinked("a call failed")

    def adopt(self, region: Region | None) -> None:
        self.tape.keeper = region.keeper if region is not None else None

    def scores(self, target: targets.Scores) -> Tensor:
        """And, for the way back, where they come from and what arrives there."""
        with torch.inference_mode(False), torch.enable_grad():
            if isinstance(target, targets.Picked):
                made = targets.logits(self.outputs)
                scores, R = target(made.detach()), target.gradient(made)
            else:
                with self.tape:
                    made = scores = target(copied(self.outputs, torch.clone))
                self._check()
                R = torch.ones_like(scores, requires_grad=False)
        self._begin_at(made, R)
        return scores.detach()

    def _begin_at(self, made: Tensor, R: Tensor) -> None:
        """The way back begins with R, which arrives at what the pass made."""
        root = self.tape.op_of(made) if type(made) is Tensor else None
        if root is None:
            raise Unlinked("the score does not depend on the input")
        self._root, self._R = root, R

    def forget(self) -> None:
        """Nothing: there is no second question."""

    def backward(
        self, method: Method, scores: Tensor, once: bool = True, observe: Observe | None = None
    ) -> Maps:
        assert once
        assert observe is None
        current = self.tape.current
        current.rules, current.once = method.rules(), True
        self._prepare(method, self._root)
        with torch.inference_mode(False), torch.no_grad():
            try:
                arrived = self._way_back()
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    raise Unlinked("a record was overwritten") from None
                raise
        self.sums = current.sums
        if method.rectifies and not current.ran & ops.RECTIFIERS:
            raise Unlinked("nothing was rectified")
        return self._maps(arrived)

    def _way_back(self) -> Arrived:
        """What arrives at the inputs."""
        self._root.R = self._R
        for op in reversed(self.tape.ops):
            if op.R is not None:
                pass_on(op)
            op.release()
        return [entry.R for entry in self.entries]

    def _maps(self, arrived: Arrived) -> Maps:
        return tuple(
            torch.zeros_like(x) if R is None else R.detach().to(x)
            for R, x in zip(arrived, self._inputs, strict=True)
        )

    def _prepare(self, method: Method, root: Op) -> None:
        linked, current = self.tape.ops, self.tape.current
        root.readers += 1  # the score is one
        chains.mark_gates(linked)
        if "last" in method.facts:
            graph.mark_last(graph.LinkedGraph(root))
        if not graph.plain_steps(current.rules):
            return
        if current.carries:
            chains.mark_lists(linked)
        else:
            chains.fold_norms(linked)
            if "conv" in current.rules:
                chains.mark_padded(linked)

    def give_up(self, model: Any) -> None:
        """It could not be linked after all."""
        remember_as_unlinkable(model)

    def end(self) -> None:
        """After the answer, or an error."""
        self.tape.over = self.tape.ended = True

    def rectified(self) -> list[Op]:
        return [op for op in self.tape.ops if op.family in ops.RECTIFIERS]


def pass_on(op: Op) -> None:
    """What arrived at an op, by its rule, to the ops before it."""
    R, op.R = op.R, None
    assert R is not None
    if op.versions:
        check_intact(op)
    if "chain" in op.facts:
        grad = _through(op, kernels.dense(R))
        if grad is not None:
            _arrives(op.facts["chain"][0].sources[0], grad)
            return
    if op.step is not None or op.family in op.current.rules:
        grads = op.backward(R)
    else:
        grads = op.vjp(kernels.dense(R))
    for source, grad in zip(op.sources, grads, strict=True):
        if grad is not None:
            _arrives(source, grad)


def _arrives(op: Op | None, R: Tensor) -> None:
    assert op is not None
    op.R = R if op.R is None else kernels.dense(op.R) + kernels.dense(R)


def _through(op: Op, R: Tensor) -> Tensor | None:
    """By a rule and through the convolution before in one call; None where they take a step each."""
    rule: Any = op.current.rules.get(op.family)
    whose, through = getattr(rule, "through", (None, None))
    if through is None or whose != id(rule):  # a rule around it has the attribute too
        return None
    grad: Tensor | None = through(op, R)
    if grad is not None:
        conv, norm = op.facts["chain"]
        op.current.ran.add(op.family)
        op.rule = rule.__name__
        for step in (conv, norm):
            if step is not None:
                step.path = "sparse"
    return grad


def can_be_linked(request: Request) -> bool:
    """As far as can be said before the pass."""
    region = request.region
    return (
        region is not None
        and not any(module.training for module in region.modules)
        and linkable(request.inputs)
        and not _known_as_unlinkable(request.model)
    )


def linked(request: Request, begin: Callable[[], LinkedPass]) -> LinkedPass | None:
    """The forward pass of a request's model, where it can be linked."""
    if not can_be_linked(request):
        return None
    try:
        return begin()
    except Unlinked:
        remember_as_unlinkable(request.model)
    except Exception as error:  # a tape will meet it again, if it was not for the links
        if out_of_memory(error):
            raise
    return None


_unlinkable: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def remember_as_unlinkable(model: Any) -> None:
    """Not to be tried again: to fail costs time."""
    with contextlib.suppress(TypeError):  # not everything that can be called can be remembered
        _unlinkable[model] = True


def _known_as_unlinkable(model: Any) -> bool:
    try:
        return model in _unlinkable
    except TypeError:
        return False
