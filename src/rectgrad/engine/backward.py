"""A recorded forward pass and its backward walks: in reverse, each op's rule or its ordinary gradient."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rectgrad import kernels, ops
from rectgrad.engine import target as targets
from rectgrad.engine.facts import NO_FACTS, Graph, find_facts, find_merges
from rectgrad.engine.op import Op, UnsupportedModelError
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import Recorder, Refused, Unlinked
from rectgrad.engine.torch_private import (
    active_function_modes,
    autocast_active,
    dispatch_modes,
    map_tensors,
    no_inference_mode,
    out_of_memory,
    transform_active,
    under_mode,
)
from rectgrad.engine.trace import Trace
from rectgrad.kernels.sparse import dense

if TYPE_CHECKING:
    from rectgrad.engine.request import Plan, Request

Maps = tuple[Tensor, ...]
Observe = Callable[[Op, Tensor], None]


class RecordedPass:
    """One forward pass of a request's model on its inputs, on a recorder."""

    _trace: tuple[int, Trace] | None
    sums: list[Tensor | float]

    def __init__(self, request: Request, recorder: Recorder) -> None:
        self.n = len(request.inputs[0])
        self.mixes: bool | None = None  # see request.mixes_samples
        self.lock = threading.RLock()  # held from scores to maps: both leave something on the ops
        self.recorder, self._inputs = recorder, request.inputs
        self._model, self._trace = request.model, None
        self.state = recorder.state
        self.state.batch, device = self.n, request.device or request.inputs[0].device
        self.state.backend = kernels.backend_for(device.type)
        assert request.region is not None
        self.adopt(request.region)
        request.region.begin(linked=True)
        try:
            with no_inference_mode(), torch.enable_grad():
                # Copies, so that a model may write into the containers it is given.
                inputs = tuple(
                    x.detach().to(request.device or x.device, copy=True).requires_grad_()
                    for x in request.inputs
                )
                self.entries = tuple(recorder.enter(x) for x in inputs)
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
            root = self._model if isinstance(self._model, nn.Module) else None
            self._trace = len(self.recorder.ops), self.recorder.trace(root)
        return self._trace[1]

    @property
    def ops(self) -> list[Op]:
        return [op for op in self.recorder.ops if op.family != "input"]

    def _check(self) -> None:
        """A call that cannot be linked raises inside the model, which may have caught it."""
        if self.recorder.failed:
            raise Unlinked("a call failed")

    def adopt(self, region: Region | None) -> None:
        """What is written from now on is restored by that call."""
        self.recorder.keeper = region.keeper if region is not None else None

    def forget(self) -> None:
        """Drop the ops that a callable target added."""
        self.recorder.truncate(self.length)

    def scores(self, target: targets.Scores) -> Tensor:
        """The scores; the backward pass starts from where they come from, with what arrives there."""
        with no_inference_mode(), torch.enable_grad():
            if isinstance(target, targets.Picked):
                made = targets.logits(self.outputs)
                scores, R = target(made.detach()), target.gradient(made)
            else:
                made = scores = under_mode(
                    self.recorder, lambda: target(map_tensors(torch.clone, self.outputs))
                )
                self._check()
                R = torch.ones_like(scores, requires_grad=False)
        root = self.recorder.op_of(made) if type(made) is Tensor else None
        if root is None:
            raise Unlinked("the score does not depend on the input")
        self._root, self._R = root, R
        return scores.detach()

    def backward(self, plan: Plan, scores: Tensor, once: bool = True, observe: Observe | None = None) -> Maps:
        """The gradient of the scores by the plan's rules, one tensor for each input."""
        state = self.state
        with self.lock:
            state.rules, state.once, state.observe = plan.rules, once, observe
            state.ran, state.sums = set(), []
            self._find_facts(plan, observe is not None)
            try:
                with no_inference_mode(), torch.no_grad():
                    arrived = self._walk()
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise self._overwritten("a weight") from None
            finally:
                state.rules, state.observe = {}, None
        self.sums, ran = state.sums, state.ran
        if plan.rectifies and not ran & ops.RECTIFIERS:
            raise UnsupportedModelError(nothing_rectified(plan.name, list(self.recorder.by_hand)))
        return tuple(
            torch.zeros_like(x) if R is None else R.detach().to(x)
            for R, x in zip(arrived, self._inputs, strict=True)
        )

    def _overwritten(self, what: str) -> Exception:
        if self.state.once:
            return Unlinked(f"{what} was modified out of sight")
        return RuntimeError("the model or its input was changed after it was recorded; record it again")

    def _find_facts(self, plan: Plan, observed: bool) -> None:
        recorded, root = self.recorder.ops, self._root
        for op in recorded:
            op.facts = NO_FACTS
        wanted = (*plan.facts, "channels") if observed else plan.facts
        gates = plan.rectifies and any(op.family == "relu6" for op in recorded)
        if wanted or gates:
            graph = Graph.of_ops(root)
            find_facts(graph, ("gate", *wanted) if gates else wanted)
        plain = plan.rules.keys().isdisjoint(("linear", "batch_norm"))
        masks = plan.rules.get("conv")
        merges = plain and not observed and (masks is None or masks.reads == "shapes")
        backend = self.state.backend
        if merges and backend is not None and backend.merges:
            find_merges(recorded, root, plan.rules, backend)

    def _walk(self) -> list[Tensor | None]:
        """The gradients that arrive at the inputs."""
        recorded, once, state = self.recorder.ops, self.state.once, self.state
        rules, observe = state.rules, state.observe
        arrived: list[Any] = [None] * len(recorded)
        arrived[self._root.index] = self._R
        for i in range(self._root.index, len(self.entries) - 1, -1):
            op, R = recorded[i], arrived[i]
            if R is not None:
                arrived[i] = None
                if op.versions and op.overwritten():
                    raise self._overwritten(f"a value that {op.name} needs")
                if observe is not None:
                    observe(op, dense(R))
                ruled = op.family in rules or op.family in ops.RECTIFIERS
                grads = op.backward(R) if ruled else op.vjp(R)
                for source, grad in zip(op.sources, grads, strict=True):
                    if grad is not None:
                        before = arrived[source.index]
                        arrived[source.index] = grad if before is None else dense(before) + dense(grad)
            if once and (op.versions or op._local is not None):
                op.release()
        return [None if R is None else dense(R) for R in arrived[: len(self.entries)]]

    def rectified(self) -> list[Op]:
        return [op for op in self.recorder.ops if op.family in ops.RECTIFIERS]

    def close(self) -> None:
        """After the map, or an error."""
        self.recorder.suspended = True


def nothing_rectified(method: str, by_hand: list[str]) -> str:
    seen = f"no rectifier, unless one is written by hand ({', '.join(by_hand)})" if by_hand else None
    return (
        f"{method} found nothing to rectify between the score and the input: {seen or 'no activation'}; its "
        "map would be the plain gradient. Use method 'saliency' for that, or write the activation as relu."
    )


def recorded_pass(request: Request, plan: Plan, recorder: Recorder) -> RecordedPass | None:
    """The forward pass of a request's model, if it can be recorded; None if it needs the bridge."""
    if not _can_be_recorded(request):
        return None
    try:
        return RecordedPass(request, recorder)
    except Refused as error:
        if plan.rules:
            raise UnsupportedModelError(
                f"{plan.name} cannot explain this model: it contains {error}"
            ) from None
        remember_bridged(request.model)
    except Unlinked:
        remember_bridged(request.model)
    except Exception as error:  # the bridge meets it again, unless the links were the cause
        if out_of_memory(error) or interrupted(error):
            raise
    return None


def _can_be_recorded(request: Request) -> bool:
    """As far as is known before the pass."""
    region = request.region
    return (
        region is not None
        and not region.trains
        and all(type(x) is Tensor and x.layout is torch.strided for x in request.inputs)
        and not autocast_active()
        and not transform_active()
        and not dispatch_modes()
        and not foreign_modes()
        and not torch.is_anomaly_enabled()
        and not _is_bridged(request.model)
    )


def interrupted(error: BaseException) -> bool:
    """Whether an error arose while an interrupt was on its way up."""
    return isinstance(error, KeyboardInterrupt) or (
        error.__context__ is not None and interrupted(error.__context__)
    )


def foreign_modes() -> int:
    """TorchFunctionModes that are active and not recorders of an outer call, which see nothing."""
    return sum(not getattr(mode, "suspended", False) for mode in active_function_modes())


# Models by id. The references have no callback: one that runs Python code could swallow an interrupt.
_bridged: dict[int, weakref.ref[Any]] = {}


def remember_bridged(model: Any) -> None:
    """A model known to need the bridge goes there at once: a failed recording costs time."""
    for key, ref in list(_bridged.items()):
        if ref() is None:
            _bridged.pop(key, None)
    try:
        _bridged[id(model)] = weakref.ref(model)
    except TypeError:  # not every callable can be referenced weakly
        return


def _is_bridged(model: Any) -> bool:
    ref = _bridged.get(id(model))
    return ref is not None and ref() is model
