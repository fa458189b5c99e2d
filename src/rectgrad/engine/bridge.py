"""The bridge: rules as autograd functions, for backward passes that autograd runs.

It has two uses: `propagate`, whose backward pass is the user's own, and models with something the recorder
cannot link (in-place writes on views, training mode, autocast, custom autograd.Functions, other modes). Each
op with a rule becomes a node of autograd's graph; everything else is autograd's own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rectgrad import ops
from rectgrad.engine import target as targets
from rectgrad.engine.backward import Maps, Observe, nothing_rectified
from rectgrad.engine.facts import NO_FACTS, Graph, find_facts
from rectgrad.engine.op import (
    TABLE,
    Op,
    State,
    UnsupportedModelError,
    as_rule,
    first,
    no_autocast,
    storage_id,
)
from rectgrad.engine.preserve import Keeper, Region
from rectgrad.engine.recorder import (
    _DIFFERENTIATING,
    _TRANSFORM,
    BACKWARD,
    Refused,
    linear_op,
    reaches,
    saving,
)
from rectgrad.engine.torch_private import (
    asked_by_backward,
    autocast_active,
    base_of,
    dispatch_modes,
    is_view,
    map_tensors,
    next_node_number,
    no_inference_mode,
    node_number,
    saved,
    transform_active,
    under_mode,
    without_torch_function,
)
from rectgrad.engine.trace import Row, Trace, calling_function, calling_module
from rectgrad.kernels.linear_ops import Scale
from rectgrad.kernels.sparse import dense
from rectgrad.ops.arguments import Slot, fill, out_of_place, updates_statistics
from rectgrad.ops.composite import composite, decompositions

if TYPE_CHECKING:
    from rectgrad.engine.request import Plan, Request

# Families worth a graph of their own: their gradient should not pay for the forward computation twice.
_HEAVY = frozenset("conv conv_transpose linear matmul max_pool batch_norm norm avg_pool pad sum".split())
_LOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_RECURRENT = {"lstm": "nn.LSTM", "gru": "nn.GRU", "rnn_tanh": "nn.RNN", "rnn_relu": "nn.RNN"}
_STATISTICS = ("running_mean", "running_var")
_VALUELESS = ops.ROUTING | set(_LOOKS)  # their gradient needs no values, and some are views


class Bridge(torch.autograd.Function):
    """An op whose backward step is the rule in force when the backward pass runs."""

    @staticmethod
    def forward(ctx: Any, op: Op, whole: bool, *data: Tensor) -> Any:
        ctx.op = op
        ctx.set_materialize_grads(False)
        result = _run(op, whole, data)
        if isinstance(result, tuple):
            ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, R: Tensor | None, *_: Any) -> Any:
        if torch.is_grad_enabled():  # somebody asks for second derivatives
            return _once(ctx, R)
        return _backward(ctx, R)


def _run(op: Op, whole: bool, data: Sequence[Tensor]) -> Any:
    """Run the op and keep what its rule may read. Gradients are off. whole: by a graph of its own."""
    op.input_shapes = tuple([x.shape for x in data])
    if op.linear is None and (whole or op.family in _HEAVY):
        op._leaves = tuple([x.detach().requires_grad_() for x in data])
        with torch.enable_grad():
            result = op.call(*op._leaves)
        op._local = first(result)
    else:
        result = op.call(*data)
    if whole and op.family in ops.RECTIFIERS:
        _check_unchanged(op, first(result), data)
    op.shape, op.result_type = first(result).shape, type(result)
    op._output = first(result).detach()
    op.inputs = tuple([x.detach() for x in data])
    # A tensor that autograd can make its own: not one of a local graph, nor a view, nor the input itself.
    return tuple(r.detach() for r in result) if isinstance(result, (tuple, list)) else result.detach()


def _check_unchanged(op: Op, result: Tensor, data: Sequence[Tensor]) -> None:
    """A rule replaces the gradient of what a function does, not of what the caller's mode makes of it."""
    with without_torch_function():
        own = first(op.call(*data))
    if not torch.equal(own, result):
        raise Refused(f"a {op.name} whose result is changed by a TorchFunctionMode")


def _backward(ctx: Any, R: Tensor | None) -> Any:
    op: Op = ctx.op
    if R is None:
        return (None,) * len(ctx.needs_input_grad)
    with without_torch_function(), no_autocast(R.device.type):
        if op.overwritten():
            raise UnsupportedModelError(f"a value that {op.name} needs was modified out of sight")
        if op.state.observe is not None:
            op.state.observe(op, R)
        grads = [None if grad is None else dense(grad) for grad in op.backward(R)]
        if op.state.once:
            op.release()
    return (*(None,) * (len(ctx.needs_input_grad) - op.data_count), *grads)


_once = once_differentiable(_backward)


class Overwrite(torch.autograd.Function):
    """The end of an in-place op: `target` gets the values and the gradient path of `result`."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, result: Tensor) -> Tensor:
        ctx.mark_dirty(target)
        ctx.dtype, ctx.view = result.dtype, is_view(target)
        return target.copy_(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, R: Tensor) -> Any:
        # For a view, autograd takes the gradient of the rest of its base from here too: zeros, not nothing.
        return torch.zeros_like(R) if ctx.view else None, R.to(ctx.dtype)


class BridgeRecorder(TorchFunctionMode):
    """One forward pass. families: those to bridge (None: all). decompose: those to see the inside of.
    plain: closed forms are off, because another mode may change what a call does. transparent: every call is
    autograd's own, and only the model's tensors are protected."""

    suspended = False

    def __init__(
        self,
        families: Collection[str] | None = None,
        decompose: Collection[str] = (),
        *,
        plain: bool = False,
        transparent: bool = False,
        named: bool = True,
    ) -> None:
        super().__init__()
        self.families, self.decompose, self.plain, self.transparent = families, decompose, plain, transparent
        self.refuses = False  # differentiation inside the forward pass, which no rule can follow
        self.keeper: Keeper | None = None  # of the model's tensors, if they are to stay as they were
        self.leaves: tuple[Tensor, ...] | None = None  # the inputs: other leaves that require one are weights
        self.named = named
        self.state, self.start = State(), next_node_number()
        self.ops: list[Op] = []
        self.trace = Trace([], None)
        self._holders: dict[int, list[Op]] = {}
        self._written = Written()
        self._borrowed: set[int] = set()  # storages of the model's that were written, and will be restored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spec = TABLE.lookup(func)
        seen = self.refuses and not self.suspended and not self.transparent
        if seen and spec.attribute is not None and asked_by_backward(sys._getframe(1)):
            raise Refused(BACKWARD)
        if self.suspended or (spec.silent and spec.name != "_set_grad_enabled"):
            return func(*args, **kwargs)
        if self.transparent:
            self._before_write(spec, args, kwargs, out_of_place(spec, args, kwargs)[2])
            args, kwargs = self._own_statistics(spec, args, kwargs)
            return func(*args, **kwargs)
        if self.refuses and func in _DIFFERENTIATING:
            raise Refused(f"torch.autograd.{func.__name__} called in the forward pass")
        if self.refuses and transform_active():
            raise Refused(_TRANSFORM)
        entered = func in _DIFFERENTIATING or (spec.own and spec.family is None)
        if entered and composite(func) is not None:
            return under_mode(self, lambda: composite(func)(*args, **kwargs))  # type: ignore[misc]
        if spec.attribute is not None and args and isinstance(args[0], Tensor):
            self.trace.turned |= spec.attribute in ops.table.TRANSPOSES
            return func(self._weight(args[0]), *args[1:])
        return self._call(spec, func, args, kwargs)

    def _call(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return self._without_grad(spec, func, args, kwargs)
        if self._borrowed and spec.name not in _VALUELESS:
            written = spec.writes or "inplace" in spec.at
            args = (*args[:written], *(self._own(a) for a in args[written:]))
            kwargs = {k: v if k == "out" else self._own(v) for k, v in kwargs.items()}
        data: list[Tensor] = []
        args = tuple([self._prepare(a, data) for a in args])
        kwargs = {k: self._prepare(v, data) for k, v in kwargs.items()} if kwargs else kwargs
        args, kwargs = self._own_statistics(spec, args, kwargs)
        return self._dispatch(spec, func, args, kwargs, data)

    def _prepare(self, value: Any, data: list[Tensor]) -> Any:
        """Data tensors become slots; weights lose their gradient, so that requiring one means depending on
        the network's input; inference tensors become ordinary ones."""
        if isinstance(value, Tensor):
            if value.requires_grad and (value := self._weight(value)).requires_grad:
                data.append(value)
                return Slot(len(data) - 1)
            return value.clone() if value.is_inference() else value
        if type(value) in (list, tuple):
            return type(value)([self._prepare(v, data) for v in value])
        return value

    def _own(self, value: Any) -> Any:
        """Copies of tensors in a storage that will be restored before the gradient is taken."""
        return map_tensors(lambda x: x.clone() if storage_id(x) in self._borrowed else x, value)

    def _weight(self, x: Tensor) -> Tensor:
        """A weight without its gradient; anything else as it is."""
        if not x.requires_grad:
            return x
        if not x.is_leaf:  # a parameter is one, unless a weight was computed from it before the pass
            earlier = self.leaves is not None and node_number(x) < self.start
            return x.detach() if earlier and not reaches(x.grad_fn, self._is_entry) else x
        return x.detach() if self.leaves is not None or isinstance(x, Parameter) else x

    def _is_entry(self, node: Any) -> bool:
        variable = getattr(node, "variable", None)
        return (
            any(variable is leaf for leaf in self.leaves or ())
            or getattr(node, "_forward_cls", None) is Bridge
        )

    def _dispatch(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, data: list[Tensor]) -> Any:
        args, kwargs, inplace = out_of_place(spec, args, kwargs)
        op = self._op(spec, args, kwargs, data, inplace or spec.writes)
        if op is None:
            return self._native(spec, func, args, kwargs, data, inplace)
        if op.family in self.decompose:
            op.inputs = tuple(data)
            return under_mode(self, lambda: decompositions[op.family](op))
        result = self._bridge(op, data)
        if not (spec.writes or inplace):
            return result
        target = fill(args[0] if args else kwargs["input"], data)
        self._protect(target)
        written = Overwrite.apply(target, result)
        if is_view(written):
            self._written.note(written)
        return written

    def _op(self, spec: ops.Spec, args: tuple, kwargs: dict, data: list[Tensor], writes: bool) -> Op | None:
        """The record of this call, if it depends on the input and its family is wanted. In-place activations
        always are: autograd derives some from their output, which a write on another part invalidates."""
        if not data or spec.family is None or "out" in kwargs:
            return None
        op = Op(spec, spec.family, args, kwargs, self.state)
        if spec.family in ops.REFINED:
            op.family = ops.refine(spec.family, spec.name, op.argument)
        if len(data) > 1 and op.family in ops.OF_ONE:
            return None
        op.data_count = len(data)
        wanted = self.families is None or op.family in self.families or op.family in self.decompose
        if op.family == "batch_norm":
            op.linear = self._scale(op, data)
            wanted = wanted or op.linear is not None
        if not wanted and not (writes and op.family in ops.RECTIFIERS):
            return None
        if op.family == "conv":
            op.sources = tuple(source for x in data if (source := op_of(x.grad_fn)) is not None)
        return op

    def _scale(self, op: Op, data: list[Tensor]) -> Any:
        """A batch norm in closed form, always: torch's own gradient of it can be wrong (see Scale)."""
        first = op.args[0] if op.args else op.kwargs.get("input")
        if self.plain or dispatch_modes() or len(data) != 1 or type(first) is not Slot or autocast_active():
            return None
        found = linear_op(op, data[0])
        return found if type(found) is Scale else None

    def _bridge(self, op: Op, data: Sequence[Tensor]) -> Any:
        with saving():
            result = Bridge.apply(op, self.plain or dispatch_modes() > 0, *data)
        if type(result) is tuple and op.result_type not in (tuple, list):
            result = op.result_type(result)
        if self.named:
            op.module = calling_module(__file__)
        self.ops.append(op)
        shape = op.input_shapes[0]
        self.trace.rows.append(Row(op.name, op.module, op.shape, op.family, op.data_count, shape, op))
        op.note_versions()
        for x in op.held():
            self._holders.setdefault(storage_id(x), []).append(op)
        return result

    def length(self) -> tuple[int, int]:
        return len(self.ops), len(self.trace.rows)

    def truncate(self, length: tuple[int, int]) -> None:
        """Forget what was recorded after `length` was taken."""
        late = set(map(id, self.ops[length[0] :]))
        del self.ops[length[0] :], self.trace.rows[length[1] :]
        if late:
            for storage, holding in list(self._holders.items()):
                self._holders[storage] = [op for op in holding if id(op) not in late]

    def _native(
        self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, data: list[Tensor], inplace: bool
    ) -> Any:
        """A call without a rule: autograd's own."""
        args = fill(args, data)
        kwargs = {k: fill(v, data) for k, v in kwargs.items()} if kwargs else {}
        if inplace:
            kwargs["inplace"] = True
        self._before_write(spec, args, kwargs, inplace)
        if data and spec.name in _RECURRENT:
            self.trace.recurrent[spec.name] = _RECURRENT[spec.name]
        with contextlib.ExitStack() as around:
            around.enter_context(saving())
            if args and isinstance(args[0], Tensor) and args[0].is_inference():
                around.enter_context(torch.inference_mode())  # only there they can be written
            if spec.name in _RECURRENT and data and data[0].is_cuda:
                # cuDNN's recurrent networks have a backward pass in training mode only.
                around.enter_context(torch.backends.cudnn.flags(enabled=False))
            result = func(*args, **kwargs)
        if data:
            self._enter(spec, result, data)
        return result

    def _enter(self, spec: ops.Spec, result: Any, data: list[Tensor]) -> None:
        """A row for a call that is not bridged."""
        if spec.name in ops.BY_HAND:
            self.trace.by_hand[spec.name] = None
        output = first(result) if isinstance(result, (tuple, list)) and result else result
        if isinstance(output, Tensor) and output.requires_grad:
            module = calling_module(__file__) if self.named else None
            shapes = tuple(output.shape), tuple(data[0].shape)
            self.trace.rows.append(Row(spec.name, module, shapes[0], spec.family, len(data), shapes[1]))
            if spec.family in ops.RECTIFIERS or spec.family == "clamp":
                output.register_hook(self.state.report)  # its zeros may hide an infinity

    def _without_grad(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call while gradients are off. An activation here is one whose rule will never run."""
        if function := calling_function():
            row = Row(spec.name, calling_module(), (), spec.family, 0, function=function)
            self.trace.hidden.append(row)
        self._before_write(spec, args, kwargs, out_of_place(spec, args, kwargs)[2])
        args, kwargs = self._own_statistics(spec, args, kwargs)
        made_there = args and isinstance(args[0], Tensor) and args[0].is_inference()
        with torch.inference_mode() if made_there else contextlib.nullcontext():
            return func(*args, **kwargs)

    def _own_statistics(self, spec: ops.Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Running statistics as copies: in training mode the layer would update the model's own."""
        normalises = spec.family in ("batch_norm", "norm")
        if not normalises or self.keeper is None or not updates_statistics(spec, args, kwargs):
            return args, kwargs
        named = zip(spec.names, args, strict=False)
        args = (*(_copied(name, a) for name, a in named), *args[len(spec.names) :])
        return args, {k: _copied(k, v) for k, v in kwargs.items()}

    def _before_write(self, spec: ops.Spec, args: tuple, kwargs: dict, inplace: bool) -> None:
        if spec.writes or inplace:
            self._protect(args[0] if args else kwargs.get("input"))
        self._protect(kwargs.get("out"))

    def _protect(self, target: Any) -> None:
        """Before a tensor is written: keep what the records and the model have in its storage."""
        if isinstance(target, (list, tuple)):
            for each in target:
                self._protect(each)
        elif isinstance(target, Tensor):
            storage = storage_id(target)
            for op in self._holders.pop(storage, ()):
                _unshare(op, storage)
            if target.grad_fn is None:  # not data: perhaps the model's own, or the caller's
                for op in self.ops:
                    _unshare(op, storage)
                if self.keeper is not None and self.keeper.before_write(storage):
                    self._borrowed.add(storage)


def _unshare(op: Op, storage: int) -> None:
    """An op keeps copies of what is in a storage that is about to be written."""

    def unshared(x: Tensor) -> Tensor:
        return x.clone() if storage_id(x) == storage else x

    op.inputs, op._output = map_tensors(unshared, (op.inputs, op._output))
    op.args, op.kwargs = map_tensors(unshared, (op.args, op.kwargs))
    op.note_versions()
    if op.linear is not None and any(True for _ in op.args):
        op.linear = linear_op(op, op.inputs[0]) if op.inputs else op.linear


def _copied(name: str, value: Any) -> Any:
    return value.clone() if name in _STATISTICS and isinstance(value, Tensor) else value


def op_of(node: Any) -> Op | None:
    """The op that an autograd node belongs to, if it is a recorded one."""
    return node.op if getattr(node, "_forward_cls", None) is Bridge else None


class Written:
    """In-place ops on views: which of them together wrote all of the tensor they are views of."""

    def __init__(self) -> None:
        # Written elements, the node of the first write, and the base itself, so that its address stays taken.
        self._parts: dict[int, tuple[Tensor, Any, Tensor]] = {}

    def note(self, view: Tensor) -> None:
        base = base_of(view)
        if view.numel() == base.numel():  # this write alone covers it
            base.grad_fn.metadata[_COVERED] = True  # type: ignore[union-attr,index]
            self._parts.pop(storage_id(base), None)
            return
        size = base.untyped_storage().nbytes() // base.element_size()
        fresh = torch.zeros(size, dtype=torch.bool, device=base.device), base.grad_fn, base
        written, first_node, _ = self._parts.setdefault(storage_id(base), fresh)
        written.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        if bool(written.as_strided(base.shape, base.stride(), base.storage_offset()).all()):
            first_node.metadata[_COVERED] = True
            del self._parts[storage_id(base)]


_COVERED = "rectgrad: all of the base was overwritten"


def graph_of(root: Any, leaves: Sequence[Tensor]) -> Graph:
    """The autograd nodes below a score, with the ops that are bridged."""
    below: dict[Any, list[Any]] = {}
    found: dict[Any, Op] = {}
    inputs = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in below:
            continue
        following = [f for f, _ in node.next_functions]
        made_by = getattr(node, "_forward_cls", None)
        if made_by is Bridge:
            found[node] = node.op
        elif made_by is Overwrite or node.metadata.get(_COVERED):
            following = following[1:]  # what an in-place op overwrote gets no gradient
        if any(getattr(node, "variable", None) is leaf for leaf in leaves):
            inputs.add(node)
        below[node] = following
        waiting.extend(following)
    return Graph(root, below, found, inputs)


# Backward nodes of rectifiers. Those with a rule are bridged, so one of these ran where nobody could see it.
_UNSEEN = {
    "relu": "ReLU",
    "leakyrelu": "LeakyReLU",
    "prelukernel": "PReLU",
    "elu": "ELU",
    "silu": "SiLU",
    "gelu": "GELU",
    "mish": "Mish",
    "hardswish": "Hardswish",
    "softplus": "Softplus",
    "rreluwithnoise": "RReLU",
}
_OPAQUE = ("DifferentiableGraphBackward", "CompiledFunctionBackward")
_GENERATED = "GeneratedBackwardFor_"  # the name that torch.library gives to the gradient of a custom op
_HARMLESS = ("BackwardHookFunctionBackward", "OverwriteBackward")


def hidden_part(graph: Graph, trace: Trace) -> str | None:
    """A sentence about the first part of the network whose activations no rule can reach, or None."""
    if "rnn_relu" in trace.recurrent:
        return "an nn.RNN with ReLU, which applies its activations inside one call; write its steps out"
    for node in graph.below:
        if node in graph.ops:
            continue
        name = node.name() if hasattr(node, "name") else type(node).__name__
        if any(opaque in name for opaque in _OPAQUE):
            return "a scripted or compiled part, whose inside cannot be seen; use the original Python code"
        unseen = _unseen(node, graph.kind(node))
        if unseen:
            where = "outside Python (a scripted function, for example)"
            return f"a {unseen} run {where}; use the original Python code"
        if hasattr(node, "_forward_cls") and name not in _HARMLESS:
            sentence = _foreign(name.removesuffix("Backward"), trace)
            if sentence:
                return sentence
    return None


def _unseen(node: Any, kind: str) -> str | None:
    """The rectifier that one of torch's own nodes belongs to."""
    if kind in ("clamp", "clampmin", "hardtanh"):
        low, high = saved(node, "min", "min_val"), saved(node, "max", "max_val")
        return "clamp at 0" if low == 0 and (high is None or high > 1) else None
    return _UNSEEN.get(kind)


def _foreign(name: str, trace: Trace) -> str | None:
    """What is wrong with a custom autograd.Function: only one that is seen to be linear is accepted."""
    if name == "CheckpointFunction":
        return "reentrant checkpointing; call checkpoint with use_reentrant=False or switch it off"
    if name.startswith(_GENERATED):
        return (
            f"the custom op {name.removeprefix(_GENERATED)}, whose inside cannot be seen; write it in torch"
        )
    calls = [row.name for row in trace.hidden if row.function == name]
    activation = next((call for call in calls if call not in ops.LINEAR_CALLS), None)
    if calls and activation is None:
        return None
    inside = f"which hides a {activation}" if activation else "whose inside cannot be seen"
    return f"the custom autograd.Function {name}, {inside}; write what it computes with torch operations"


class BridgedPass:
    """As `RecordedPass`, on a BridgeRecorder, with autograd's backward pass."""

    def __init__(self, request: Request, recorder: BridgeRecorder) -> None:
        self.n = len(request.inputs[0])
        self.mixes: bool | None = None
        self.lock = threading.RLock()
        self.recorder, self.state = recorder, recorder.state
        self.state.batch = self.n
        self.adopt(request.region)
        if request.region is not None:
            request.region.begin()
        self.trace.root = request.model if isinstance(request.model, nn.Module) else None
        with no_inference_mode(), torch.enable_grad():
            self.leaves = recorder.leaves = tuple(_leaf(x) for x in request.inputs)
            # Copies, so that a model may write on its input and into the containers it is given.
            inputs = tuple(leaf.to(request.device or leaf.device, copy=True) for leaf in self.leaves)
            args, kwargs = map_tensors(request.given, (request.args, request.kwargs))
            recorder.refuses = True
            self.outputs = under_mode(recorder, lambda: request.model(*inputs, *args, **kwargs))
            recorder.refuses = False
        if request.region is not None:
            request.region.restore()
        self.length = recorder.length()

    @property
    def trace(self) -> Trace:
        return self.recorder.trace

    @property
    def ops(self) -> list[Op]:
        return self.recorder.ops

    def adopt(self, region: Region | None) -> None:
        self.recorder.keeper = region.keeper if region is not None else None

    def forget(self) -> None:
        self.recorder.truncate(self.length)

    def close(self) -> None:
        self.recorder.suspended = True

    def rectified(self) -> list[Op]:
        return [op for op in self.recorder.ops if op.family in ops.RECTIFIERS]

    def scores(self, target: targets.Scores) -> Tensor:
        with no_inference_mode(), torch.enable_grad():
            if isinstance(target, targets.Picked):
                scores = target(self.outputs)
            else:  # a callable target is part of what is explained: its steps follow the rules too
                outputs = map_tensors(torch.clone, self.outputs)
                scores = under_mode(self.recorder, lambda: target(outputs))
        if not scores.requires_grad:
            raise ValueError(
                "the score to explain does not depend on the input: the forward pass detaches it, runs under "
                "no_grad, or leaves torch; explain a model that is differentiable from input to output"
            )
        return scores

    def backward(self, plan: Plan, scores: Tensor, once: bool, observe: Observe | None = None) -> Maps:
        state = self.state
        with self.lock, no_inference_mode():
            if plan.rules or observe:
                self._prepare(plan, scores, observe is not None)
            state.rules, state.observe, state.once = plan.rules, observe, once
            state.ran, state.sums = set(), []
            ones = torch.ones_like(scores)
            try:
                grads = under_mode(  # a backward hook may write on the model
                    self.recorder,
                    lambda: torch.autograd.grad(
                        scores, self.leaves, ones, retain_graph=not once, allow_unused=True
                    ),
                )
            except RuntimeError as error:
                raise _in_our_words(error, plan.name, once) from None
            finally:
                state.rules, state.observe = {}, None
            self.sums, ran = state.sums, state.ran
        if plan.rectifies and not ran & ops.RECTIFIERS:
            raise UnsupportedModelError(nothing_rectified(plan.name, list(self.trace.by_hand)))
        return tuple(
            torch.zeros_like(x) if g is None else g.detach() for g, x in zip(grads, self.leaves, strict=True)
        )

    def _prepare(self, plan: Plan, scores: Tensor, observed: bool) -> None:
        """The facts that the rules ask for; and no rule for a network with parts out of reach."""
        graph = graph_of(scores.grad_fn, self.leaves)
        for op in self.recorder.ops:
            op.facts = NO_FACTS
        hidden = hidden_part(graph, self.trace) if plan.rules else None
        if hidden:
            raise unsupported(plan.name, hidden)
        wanted = ("gate", *plan.facts) if plan.rectifies else plan.facts
        find_facts(graph, (*wanted, "channels") if observed else wanted)


def _leaf(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.clone() if x.is_inference() else x).requires_grad_()


def unsupported(method: str, part: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{method} cannot explain this model: it contains {part}")


def _in_our_words(error: RuntimeError, method: str, once: bool) -> RuntimeError:
    """What autograd's error means here; the error itself if it means nothing special."""
    if "heckpoint" in str(error) and ".grad()" in str(error):
        return unsupported(method, "reentrant checkpointing; call checkpoint with use_reentrant=False")
    if "modified by an inplace operation" not in str(error):
        return error
    if not once:
        return RuntimeError("the model or its input was changed after it was recorded; record it again")
    return unsupported(method, "a tensor that is modified in place although its gradient needs it")


@contextlib.contextmanager
def propagate(rules: Mapping[str, Callable[[Op, Tensor], Any]]) -> Iterator[Trace]:
    """Run a model with your own backward rules.

    `rules` maps an op family to a function `(op, R) -> gradient` (one, or a tuple with one for each of
    `op.inputs`). Inside the context, calls that depend on a tensor requiring a gradient are recorded; the
    rules act in every backward pass through them, inside the context or after it. Parameters get no
    gradient. Yields the trace; printed, it is a table of the ops and the rule that each one used.

        with rectgrad.propagate({"relu": lambda op, R: R.clamp(min=0)}) as trace:
            model(x)[0, 281].backward()
        print(trace)
    """
    _check(rules)
    recorder = BridgeRecorder(families=frozenset(rules))
    recorder.state.rules = {family: as_rule(rule) for family, rule in rules.items()}
    with recorder:
        yield recorder.trace
    if rules and not any(op.family in rules for op in recorder.ops):
        met = sorted({row.family or row.name for row in recorder.trace.rows})
        warnings.warn(
            f"no rule will act: none of {', '.join(rules)} was met, only {', '.join(met) or 'nothing'}",
            stacklevel=3,
        )


def _check(rules: Any) -> None:
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules must map op families to functions (op, R), not {rules!r}")
    known = (set(ops.FAMILIES) - {"clamp"}) | ops.RECTIFIERS
    unknown = sorted(set(rules) - known)
    if unknown:
        raise ValueError(f"unknown op family {unknown[0]!r}; families are {', '.join(sorted(known))}")
    for family, rule in rules.items():
        if not callable(rule):
            raise TypeError(f"the rule for {family!r} must be a function (op, R), not {rule!r}")
