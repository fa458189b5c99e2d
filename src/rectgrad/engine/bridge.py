"""The bridge: rules as autograd functions, for backward passes that autograd runs.

It has two uses: `propagate`, where the user runs the backward pass, and models with a call that the recorder
cannot link (in-place writes on views, training mode, autocast, custom autograd.Functions, other modes). Each
op with a rule becomes a node of autograd's graph. All other calls are recorded by autograd as usual.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from rectgrad import ops
from rectgrad.engine import target as targets
from rectgrad.engine import torch_private
from rectgrad.engine.backward import Pass, Plan
from rectgrad.engine.facts import Graph, find_channels, find_gates, walk
from rectgrad.engine.op import TABLE, Op, State, UnsupportedModelError, no_autocast, storage_id
from rectgrad.engine.recorder import INPUT, TRANSFORM, ForwardMode, Refused, Unlinked, linear_op, saving
from rectgrad.engine.torch_private import map_tensors, tensors_in, under_mode
from rectgrad.engine.trace import Row, Trace, calling_function, calling_modules
from rectgrad.kernels.sparse import dense
from rectgrad.ops.arguments import Slot, fill, out_of_place, with_own_statistics
from rectgrad.ops.composite import composite, decompositions
from rectgrad.ops.hidden import hidden_part

if TYPE_CHECKING:
    from rectgrad.engine.request import Request

# Families with a local graph, so that their gradient does not repeat the forward computation.
_HEAVY = frozenset("conv conv_transpose linear matmul max_pool batch_norm norm avg_pool pad sum".split())
# Calls that need the tensor itself, not a copy: some return views, some change the tensor's gradient.
_VALUELESS = ops.ROUTING | {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
# Keys of an autograd node's metadata.
_COVERED = "rectgrad: all of the base was overwritten"
_SOURCE = "rectgrad: the op that made the tensor"
_UNSEEN = Op(INPUT, "", (), {}, State())  # made a tensor out of sight: it has no sources


class Bridge(torch.autograd.Function):
    """An op whose gradient is computed by the rule that is set when the backward pass runs."""

    @staticmethod
    def forward(ctx: Any, op: Op, whole: bool, *data: Tensor) -> Any:
        """Run the op and keep what its rule may read. Gradients are off. whole: always use a local graph."""
        ctx.op = op
        ctx.set_materialize_grads(False)
        local = op.linear is None and (whole or op.family in _HEAVY)
        leaves = tuple([x.detach().requires_grad_(local) for x in data])
        with torch.set_grad_enabled(local):
            result = op.call(*leaves)
        output = result[0] if isinstance(result, (tuple, list)) else result
        if local:
            op._leaves, op._local = leaves, output
        if whole and op.family in ops.RECTIFIERS:
            # A rule replaces the gradient of torch's function, not of what another mode makes of it.
            with torch_private.without_torch_function():
                if not torch.equal(op.call(*data), output):
                    raise Refused(f"a {op.name} whose result is changed by a TorchFunctionMode")
        op._output, op.shape, op.result_type = output.detach(), output.shape, type(result)
        op.inputs, op.input_shapes = tuple([x.detach() for x in data]), tuple([x.shape for x in data])
        # New tensors, as autograd needs them: not those of a local graph, nor views, nor the input itself.
        if result is output:
            return result.detach()
        results = tuple(r.detach() for r in result)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *R: Tensor | None) -> Any:
        with torch_private.without_torch_function():
            return Bridge._backward(ctx, *R)

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, R: Tensor | None, *_: Any) -> Any:
        op: Op = ctx.op
        if R is None:
            return (None,) * len(ctx.needs_input_grad)
        with no_autocast(R.device.type):
            if op.overwritten():
                raise UnsupportedModelError(f"an unrecorded call modified a value that {op.name} needs")
            if op.state.observe is not None:
                op.state.observe(op, R)
            grads = [None if grad is None else dense(grad) for grad in op.backward(R)]
            if op.state.once:
                op.release()
        return (None, None, *grads)


def op_of(node: Any) -> Op | None:
    """The op that an autograd node belongs to, if it is a bridged one."""
    return node.op if getattr(node, "_forward_cls", None) is Bridge else None


def _source(x: Tensor, made: Op = _UNSEEN) -> Op:
    """The op that made a tensor, bridged or not. It is noted where it is known: `made`."""
    node: Any = x.grad_fn
    op: Op = made if node is None else node.metadata.setdefault(_SOURCE, made)
    return op.of_part(x.output_nr) if x.output_nr else op


@dataclass(eq=False, repr=False)
class BridgeRecorder(ForwardMode):
    """One forward pass."""

    families: Collection[str] | None = None  # to bridge; None: all
    decompose: Collection[str] = ()
    plain: bool = False  # no closed forms, because another mode may change the calls
    transparent: bool = False  # no rules: only the model's tensors are protected
    named: bool = True
    lost = UnsupportedModelError

    def __post_init__(self) -> None:
        self.trace = Trace([], None)
        super().__init__(self.decompose, self.named, self.trace.rows)
        self.refuses = False  # to differentiate inside the forward pass, which no rule can reach
        self.leaves: tuple[Tensor, ...] | None = None  # the inputs; other leaves with a gradient are weights
        self.trace.by_hand = self.by_hand
        self._parts: dict[int, tuple[Tensor, Any, Tensor]] = {}  # see _note_write
        self._borrowed: set[int] = set()  # written storages of the model, which will be restored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spec = TABLE.lookup(func)
        if self.suspended:
            return func(*args, **kwargs)
        if self.refuses:
            self._refuse_backward(func, sys._getframe(1))
        if spec.silent and spec.name != "_set_grad_enabled":
            return func(*args, **kwargs)
        if self.keeper is not None:
            args, kwargs = with_own_statistics(spec, args, kwargs)
        if self.transparent:
            result = self._run(spec, func, args, kwargs)
            shape = () if getattr(result, "is_nested", True) else result.shape
            self.trace.rows.append(Row(spec.name, (), shape, spec.family, 1))
            return result
        if self.refuses and torch_private.transform_active():
            raise Refused(TRANSFORM)
        body = composite(func) if spec.family is None else None
        if body is not None:
            return under_mode(self, lambda: body(*args, **kwargs))
        if spec.attribute is not None and args and isinstance(args[0], Tensor):
            self.trace.turned |= spec.attribute in ops.table.TRANSPOSES
            return func(self._weight(args[0]), *args[1:])
        if torch.is_grad_enabled():
            return self._call(spec, func, args, kwargs)
        if function := calling_function():  # the rule of an activation in here will never run
            self.trace.hidden.setdefault(function, []).append(spec.name)
        return self._constant(spec, func, args, kwargs)

    def _call(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        data: list[Tensor] = []
        itself = spec.writes or "inplace" in spec.at or spec.name in _VALUELESS
        args = tuple([self._prepare(a, data, i > 0 or not itself) for i, a in enumerate(args)])
        kwargs = {k: self._prepare(v, data, k != "out") for k, v in kwargs.items()}
        if not data:
            return self._constant(spec, func, args, kwargs)
        written = fill(_written(spec, args, kwargs), data)
        op, wanted = self._op(spec, args, kwargs, data, written is not None)
        if not wanted:
            args, kwargs = fill(args, data), {k: fill(v, data) for k, v in kwargs.items()}
            return self._native(op, func, args, kwargs, data)
        if op.family in self.decompose:
            op.inputs = tuple(data)
            return under_mode(self, lambda: decompositions[op.family](op))
        result = self._bridge(op, data)
        if written is None:
            return result
        self._protect(written)
        _source(written.copy_(result), op)
        if torch_private.is_view(written):
            self._note_write(written)
        return written

    def _prepare(self, value: Any, data: list[Tensor], copy: bool) -> Any:
        """Replace data tensors by slots and detach weights, so that a tensor requires a gradient only if it
        depends on the network's input. copy: copy tensors that the backward pass could not use, such as
        inference tensors and those in a storage that will be restored before."""
        if isinstance(value, Tensor):
            value = self._weight(value)
            if copy and (value.is_inference() or (self._borrowed and storage_id(value) in self._borrowed)):
                value = value.clone()
            if not value.requires_grad:
                return value
            data.append(value)
            return Slot(len(data) - 1)
        if type(value) in (list, tuple):
            return type(value)([self._prepare(v, data, copy) for v in value])
        return value

    def _weight(self, x: Tensor) -> Tensor:
        """x, detached if it is a weight."""
        if not x.requires_grad:
            return x
        known = self.leaves is not None
        weight = known or isinstance(x, Parameter) if x.is_leaf else known and self._made_before(x)
        return x.detach() if weight else x

    def _is_entry(self, node: Any) -> bool:
        return any(getattr(node, "variable", None) is leaf for leaf in self.leaves or ())

    def _op(self, spec: ops.Spec, args: tuple, kwargs: dict, data: list, writes: bool) -> tuple[Op, bool]:
        """The op of this call, and whether its family is wanted. In-place activations always are: autograd
        computes the gradient of some from their output, which a write to another part would invalidate."""
        op = Op(spec, spec.family or "", *out_of_place(spec, args, kwargs)[:2], self.state)
        op.data_count, op.sources = len(data), tuple(map(_source, data))
        self._find_family(op)
        if not op.family or kwargs.get("out") is not None:
            return op, False
        wanted = self.families is None or op.family in self.families or op.family in self.decompose
        if op.family == "batch_norm":  # always in closed form: torch's gradient can be wrong (see Scale)
            usual = len(data) == 1 and type(spec.argument("input", op.args, op.kwargs)) is Slot
            if usual and not self._whole() and not torch_private.autocast_active():
                op.linear = linear_op(op, data[0])
            wanted = wanted or op.linear is not None
        return op, wanted or (writes and op.family in ops.RECTIFIERS)

    def _whole(self) -> bool:
        """Whether ops run with a local graph, because another mode may change what they compute."""
        return self.plain or torch_private.dispatch_modes() > 0

    def _bridge(self, op: Op, data: list[Tensor]) -> Any:
        with saving():
            result = Bridge.apply(op, self._whole(), *data)
        _source(result[0] if type(result) is tuple else result, op)
        result = op.result_type(result) if type(result) is tuple else result
        op.index, op.modules = len(self.trace.rows), self._enter(op.name, op.family, op.shape, data, op)
        self._hold(op, (*op.held(), *tensors_in((op.args, op.kwargs))))
        return result

    def _copy(self, op: Op, own: Any) -> None:
        super()._copy(op, own)
        op.args, op.kwargs = map_tensors(own, (op.args, op.kwargs))

    def _enter(self, name: str, family: str | None, shape: Any, data: list[Tensor], op: Any = None) -> Any:
        """Add a row to the trace; returns the calling modules."""
        modules = calling_modules(__file__) if self.named else ()
        self.trace.rows.append(Row(name, modules, shape, family, len(data), data[0].shape, op))
        return modules

    def _native(self, op: Op, func: Any, args: tuple, kwargs: dict, data: list[Tensor]) -> Any:
        """Run a call without a rule, which autograd records."""
        spec = op.spec
        # cuDNN's recurrent networks have a backward pass in training mode only.
        by_cudnn = spec.name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and data[0].is_cuda
        with saving(), torch.backends.cudnn.flags(enabled=False) if by_cudnn else contextlib.nullcontext():
            result = self._run(spec, func, args, kwargs)
        output = next(tensors_in(result), None)
        if output is not None and output.requires_grad:
            if output.is_nested and output.layout is torch.strided:
                raise Refused("a nested tensor, which has no shape")
            self._enter(spec.name, op.family, output.shape, data)
            _source(output, op)
            if spec.family in ops.RECTIFIERS or spec.family == "clamp":
                output.register_hook(self.state.report)  # its zeros may hide an infinity
        return result

    def _constant(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a call that does not depend on the input."""
        made_there = args and isinstance(args[0], Tensor) and args[0].is_inference()
        with torch.inference_mode() if made_there else contextlib.nullcontext():  # else not writable
            return self._run(spec, func, args, kwargs)

    def _run(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run the call after protecting the tensors that it writes."""
        for target in (_written(spec, args, kwargs), kwargs.get("out")):
            if target is not None:
                self._protect(target)
        return func(*args, **kwargs)

    def _protect(self, target: Any) -> None:
        """Before tensors are written, save what ops and the model keep in their storages."""
        for x in tensors_in(target):
            storage = storage_id(x)
            self._unshare(storage)
            # A constant may be a tensor of the model or the caller.
            if x.grad_fn is None and self.keeper is not None and self.keeper.before_write(storage):
                self._borrowed.add(storage)

    def _note_write(self, view: Tensor) -> None:
        """Note an in-place op on a view, to find out whether such ops have overwritten the whole base."""
        base, storage = torch_private.base_of(view), storage_id(view)
        if view.numel() == base.numel():  # this write alone covers the base
            self._parts.pop(storage, None)
        size = base.untyped_storage().nbytes() // base.element_size()
        # Written elements, the node of the first write, and the base, which keeps its address in use.
        fresh = torch.zeros(size, dtype=torch.bool, device=base.device), base.grad_fn, base
        written, first_node, _ = self._parts.setdefault(storage, fresh)
        written.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        if bool(written.as_strided(base.shape, base.stride(), base.storage_offset()).all()):
            first_node.metadata[_COVERED] = True
            del self._parts[storage]


def _written(spec: ops.Spec, args: tuple, kwargs: dict) -> Any:
    """The tensor that an in-place call writes; None for other calls."""
    if not (spec.writes or out_of_place(spec, args, kwargs)[2]):
        return None
    return args[0] if args else kwargs.get("input")


def _following(node: Any) -> list[Any]:
    """The autograd nodes that receive a gradient; overwritten values do not."""
    overwritten = type(node).name(node).endswith("CopyBackwards") or node.metadata.get(_COVERED)
    return [following for following, _ in node.next_functions[1 if overwritten else 0 :]]


class BridgedPass(Pass):
    """A pass on a BridgeRecorder, with autograd's backward pass."""

    def __init__(self, request: Request, recorder: BridgeRecorder, differentiable: bool = True) -> None:
        super().__init__(request, recorder)
        self.trace.root, self.differentiable = self.root, differentiable
        assert request.region is not None
        request.region.begin()
        with torch_private.no_inference_mode(), torch.set_grad_enabled(differentiable):
            ours = [x.detach().clone() if x.is_inference() else x.detach() for x in request.inputs]
            self.leaves = recorder.leaves = tuple(x.requires_grad_() for x in ours)
            # Copies, so that a model may modify its input and the containers that it receives.
            inputs = tuple(leaf.to(request.device or leaf.device, copy=True) for leaf in self.leaves)
            for x in inputs if differentiable else ():
                _source(x, Op(INPUT, "input", (), {}, self.state)).shape = x.shape
            args, kwargs = map_tensors(request.given, (request.args, request.kwargs))
            recorder.refuses = not recorder.transparent
            self.outputs = under_mode(recorder, lambda: request.model(*inputs, *args, **kwargs))
            recorder.refuses = False
        request.region.restore()
        self.length = len(self.trace.rows)

    @property
    def ops(self) -> list[Op]:
        return [row.op for row in self.trace.rows if row.op is not None]

    def scores(self, target: targets.Scores) -> Tensor:
        with torch_private.no_inference_mode(), torch.set_grad_enabled(self.differentiable):
            picked = isinstance(target, targets.Picked)
            scores = target(self.outputs) if picked else self._target_scores(target)
        if self.differentiable and not scores.requires_grad:
            raise ValueError(
                "the score to explain does not depend on the input: the forward pass detaches it, runs under "
                "no_grad, or leaves torch; explain a model that is differentiable from input to output"
            )
        return scores

    def _find_facts(self, method: Plan, scores: Tensor, observed: bool) -> None:
        if not self.state.rules and not observed:
            return
        graph = self._graph(scores.grad_fn)
        if self.state.rules:
            kinds = {node: graph.kind(node) for node in graph.below if node not in graph.ops}
            calls = {row.name for row in self.trace.rows}
            if hidden := hidden_part(kinds, calls, self.trace.hidden, torch_private.saved):
                raise unsupported(type(method).__name__, hidden)
        wanted = (find_gates, *method.facts) if method.rectifies else method.facts
        for find in (*wanted, find_channels) if observed else wanted:
            find(graph)

    def _graph(self, root: Any) -> Graph:
        """The autograd nodes below a score, with the ops that are bridged."""
        below = {node: _following(node) for node in walk([root], _following)}
        found = {node: op for node in below if (op := op_of(node)) is not None}
        return Graph(root, below, found, set(filter(self.recorder._is_entry, below)))

    def _gradients(self, scores: Tensor) -> Sequence[Tensor | None]:
        ones, keep = torch.ones_like(scores), not self.state.once
        return under_mode(  # a backward hook may modify the model
            self.recorder,
            lambda: torch.autograd.grad(scores, self.leaves, ones, retain_graph=keep, allow_unused=True),
        )

    def _translated(self, error: RuntimeError, method: str) -> Exception:
        if "heckpoint" in str(error) and ".grad()" in str(error):
            return unsupported(method, "reentrant checkpointing; call checkpoint with use_reentrant=False")
        meant = super()._translated(error, method)
        if not isinstance(meant, Unlinked):
            return meant
        return unsupported(method, "a tensor that is modified in place although its gradient needs it")


def unsupported(method: str, part: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{method} cannot explain this model: it contains {part}")
