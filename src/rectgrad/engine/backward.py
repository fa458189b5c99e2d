"""A recorded forward pass and its backward walks: in reverse, each op's rule or its ordinary gradient."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from rectgrad import kernels, ops
from rectgrad.engine import target as targets
from rectgrad.engine import torch_private
from rectgrad.engine.facts import NO_FACTS, Finder, Graph, find_channels, find_gates
from rectgrad.engine.op import Op, Rules, UnsupportedModelError, as_rules
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import Recorder, Refused, Unlinked
from rectgrad.engine.torch_private import map_tensors, no_inference_mode, under_mode
from rectgrad.engine.trace import Trace
from rectgrad.kernels.device import out_of_memory
from rectgrad.kernels.sparse import dense

if TYPE_CHECKING:
    from rectgrad.engine.request import Request

Maps = tuple[Tensor, ...]
Inputs = TypeVar("Inputs", bound=Tensor | Maps)  # a tuple of inputs gives a tuple of maps
Observe = Callable[[Op, Tensor], Any] | None  # a true value ends the walk, but not autograd's backward pass
OVERWRITTEN = "modified by an inplace operation"  # autograd's words


class Plan:
    """What the engine asks of a method. The base class of methods.Method; by itself, the plain gradient."""

    rectifies: ClassVar[bool] = False  # an error if no rule ran: never a silent plain gradient
    thresholds: ClassVar[bool] = False  # warn if a layer passes nothing
    decompose: ClassVar[tuple[str, ...]] = ()  # op families that are recorded by their elementary steps
    facts: ClassVar[tuple[Finder, ...]] = ()  # that its rules read
    per_sample: ClassVar[bool] = False  # a rule compares the units of one sample
    everything: ClassVar[bool] = False  # record every op, with the names of layers
    class_layers: Sequence[Op] = ()  # at which its gate was computed

    def rules(self) -> Rules:
        return {}

    def prepared(self, request: Request, passed: Pass, scores: Tensor) -> Plan:
        """The plan for the backward pass of one particular forward pass."""
        return self

    def result(self, request: Request, passed: Pass, scores: Tensor) -> Maps:
        """The result of the backward pass, one tensor for each input."""
        return passed.backward(self, scores, request.passed is None, request.observe)


class Pass:
    """One forward pass of a request's model, and its backward passes. `RecordedPass` computes these itself;
    `BridgedPass` (bridge.py) uses autograd."""

    outputs: Any
    length: Any  # of the record, without the ops of a callable target
    differentiable = True  # otherwise no activation is kept
    scores: Callable[[targets.Scores], Tensor]  # the explained score of each sample
    _find_facts: Callable[[Plan, Tensor, bool], None]  # True: also those for observers
    _gradients: Callable[[Tensor], Sequence[Tensor | None]]  # the gradients that arrive at the inputs

    def __init__(self, request: Request, recorder: Any) -> None:
        self.n = len(request.inputs[0])
        self.mixes: bool | None = None  # see request.mixes_samples
        self.lock = threading.RLock()  # held from scores to maps, which both modify the ops
        self.recorder, self.state, self._inputs = recorder, recorder.state, request.inputs
        self.state.batch = self.n
        self.root = request.model if isinstance(request.model, nn.Module) else None
        self.adopt(request.region)

    @property
    def trace(self) -> Trace:
        return self.recorder.trace

    @property
    def ops(self) -> list[Op]:
        """The recorded ops, without the inputs."""
        return [op for op in self.recorder.ops if op.family != "input"]

    @property
    def folds(self) -> bool:
        """Whether the first dimension of a rectified activation has other than one row for each sample."""
        return any(op.shape[:1] != (self.n,) for op in self.ops if op.family in ops.RECTIFIERS)

    def adopt(self, region: Region | None) -> None:
        """From now on, writes are restored by that region."""
        self.recorder.keeper = region.keeper if region is not None else None

    def close(self) -> None:
        """After the map, or an error."""
        self.recorder.suspended = True

    def _target_scores(self, target: targets.Scores) -> Tensor:
        """The scores of a callable target, which is part of what is explained: rules apply to its ops too."""
        scores = under_mode(self.recorder, lambda: target(map_tensors(torch.clone, self.outputs)))
        return targets.checked(scores, self.n)

    def backward(
        self, method: Plan, scores: Tensor, once: bool = True, observe: Observe = None, without: str = ""
    ) -> Maps:
        """The scores' gradients by the method's rules, one for each input. without: a family to skip."""
        state = self.state
        with no_inference_mode():
            for op in self.ops:
                op.rule = "plain"
            state.rules = as_rules(method.rules(), without)
            state.once, state.observe, state.ran, state.sums = once, observe, set(), []
            try:
                self._find_facts(method, scores, observe is not None)
                grads = self._gradients(scores)
            except RuntimeError as error:
                raise self._translated(error, type(method).__name__) from None
            finally:
                state.rules, state.observe = {}, None
                for op in self.ops:  # facts refer to other ops: no reference cycles
                    op.facts = NO_FACTS
                for op in method.class_layers:
                    op.rule += ", class layer"
        if method.rectifies and not state.ran & ops.RECTIFIERS:
            raise UnsupportedModelError(nothing_rectified(type(method).__name__, self.trace))
        return tuple(
            torch.zeros_like(x) if R is None else R.detach().to(x)
            for R, x in zip(grads, self._inputs, strict=True)
        )

    def _translated(self, error: RuntimeError, method: str) -> Exception:
        """The error to raise for an error of torch; the error itself if nothing is known about it."""
        if OVERWRITTEN not in str(error):
            return error
        if self.state.once:
            return Unlinked(str(error))
        return RuntimeError("the model or its input was changed after it was recorded; record it again")


class RecordedPass(Pass):
    """A recorded pass. Backward, each op applies its rule or its ordinary gradient, in reverse order."""

    def __init__(self, request: Request, recorder: Recorder) -> None:
        super().__init__(request, recorder)
        self._trace: tuple[int, Trace] | None = None
        device = request.device or request.inputs[0].device
        self.state.backend = kernels.backend_for(device.type)
        assert request.region is not None
        request.region.begin(linked=True)
        try:
            with no_inference_mode(), torch.enable_grad():
                # Copies, because a model may modify the containers that it is given.
                inputs = tuple([x.detach().to(device, copy=True).requires_grad_() for x in request.inputs])
                self.entries = tuple([recorder.enter(x) for x in inputs])
                args, kwargs = map_tensors(request.given, (request.args, request.kwargs))
                self.outputs = under_mode(recorder, lambda: request.model(*inputs, *args, **kwargs))
        except BaseException:
            recorder.suspended = True
            raise
        finally:
            request.region.restore()
        self._check()
        self.length = len(recorder.ops)

    @property
    def trace(self) -> Trace:
        if self._trace is None or self._trace[0] != len(self.recorder.ops):
            self._trace = len(self.recorder.ops), self.recorder.trace(self.root)
        return self._trace[1]

    def _check(self) -> None:
        """Raise an error if a call could not be linked: the model may have caught the first one."""
        if self.recorder.failed:
            raise Unlinked("a call failed")

    def scores(self, target: targets.Scores) -> Tensor:
        """Find the scores. The backward pass starts at the op that made them."""
        with no_inference_mode(), torch.enable_grad():
            if isinstance(target, targets.Picked):
                made = targets.logits(self.outputs)
                scores, R = target(made.detach()), target.gradient(made)
            else:
                made = scores = self._target_scores(target)
                self._check()
                R = torch.ones_like(scores, requires_grad=False)
        root = self.recorder.op_of(made) if type(made) is Tensor else None
        if root is None:
            raise Unlinked("the score does not depend on the input")
        self._root, self._R = root, R
        return scores.detach()

    def _find_facts(self, method: Plan, scores: Tensor, observed: bool) -> None:
        finders = (*method.facts, find_channels) if observed else method.facts
        if method.rectifies and any(op.family == "relu6" for op in self.recorder.ops):
            finders = (find_gates, *finders)
        graph: Any = Graph.of_ops(self._root) if finders else None
        for find in finders:
            find(graph)

    def _gradients(self, scores: Tensor) -> Sequence[Tensor | None]:
        recorded, state = self.recorder.ops, self.state
        once, rules, observe = state.once, state.rules, state.observe
        arrived: list[Any] = [None] * len(recorded)
        arrived[self._root.index] = self._R
        with torch.no_grad():
            for i in range(self._root.index, len(self.entries) - 1, -1):
                op, R = recorded[i], arrived[i]
                if R is not None:
                    arrived[i] = None
                    if op.versions and op.overwritten():
                        raise RuntimeError(f"a value that {op.name} needs was {OVERWRITTEN}")
                    if observe is not None and observe(op, dense(R)):
                        break
                    ruled = op.family in rules or op.family in ops.RECTIFIERS
                    grads = op.backward(R) if ruled else op.vjp(R)
                    for source, grad in zip(op.sources, grads, strict=True):
                        if grad is not None:
                            before = arrived[source.index]
                            arrived[source.index] = grad if before is None else _sum(before, grad, op)
                if once and (op.versions or op._local is not None):
                    op.release()
            return [None if R is None else dense(R) for R in arrived[: len(self.entries)]]


def _sum(before: Any, grad: Any, op: Op) -> Tensor:
    """The sum of two gradients of one tensor. A linear op's gradient has no other user and can be written."""
    before, grad = dense(before), dense(grad)
    own = op.linear is not None and before.dtype is grad.dtype
    return grad.add_(before) if own else before + grad


def nothing_rectified(method: str, trace: Trace) -> str:
    by_hand, unknown = trace.by_hand, trace.unknown()[:3]
    perhaps = [f"one is written by hand ({', '.join(by_hand)})"] if by_hand else []
    perhaps += [f"an unknown call is one ({', '.join(unknown)})"] if unknown else []
    seen = f"no rectifier, unless {' or '.join(perhaps)}" if perhaps else "no activation"
    return (
        f"{method} found nothing to rectify between the score and the input: {seen}; its map would be "
        "the plain gradient. Use method 'saliency' for that, or write the activation as relu."
    )


def recorded_pass(request: Request, recorder: Recorder) -> RecordedPass | None:
    """The forward pass of a request's model, if it can be recorded; None if it needs the bridge."""
    if not _can_be_recorded(request):
        return None
    try:
        return RecordedPass(request, recorder)
    except Refused:
        raise
    except Unlinked:
        remember_bridged(request.model)
    except Exception as error:  # the bridge raises it again, unless recording was the cause
        if out_of_memory(error) or interrupted(error):
            raise
    return None


def _can_be_recorded(request: Request) -> bool:
    """Whether the recorder can be tried."""
    cannot = request.region is None or request.region.trains or _is_bridged(request.model)
    modes = torch_private.transform_active() or torch_private.dispatch_modes() or foreign_modes()
    if cannot or modes or torch_private.autocast_active() or torch.is_anomaly_enabled():
        return False
    return all(type(x) is Tensor and x.layout is torch.strided for x in request.inputs)


def interrupted(error: BaseException) -> bool:
    """Whether an error is an interrupt, or was raised while one was handled."""
    before = error.__context__
    return isinstance(error, KeyboardInterrupt) or (before is not None and interrupted(before))


def foreign_modes() -> int:
    """The number of active TorchFunctionModes that are not suspended recorders of an outer call."""
    return sum(not getattr(mode, "suspended", False) for mode in torch_private.active_function_modes())


# Models by id. The references have no callback, because Python code in one could swallow an interrupt.
_bridged: dict[int, weakref.ref[Any]] = {}


def remember_bridged(model: Any) -> None:
    """Next time, run this model under the bridge at once, without trying the recorder first."""
    for key in [key for key, ref in list(_bridged.items()) if ref() is None]:
        _bridged.pop(key, None)
    with contextlib.suppress(TypeError):  # not every callable can be referenced weakly
        _bridged[id(model)] = weakref.ref(model)


def _is_bridged(model: Any) -> bool:
    return _bridged.get(id(model), lambda: None)() is model
