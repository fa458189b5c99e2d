"""The recorder: a forward pass whose ops are linked to one another, so that the backward pass walks them.

A `TorchFunctionMode` sees every torch call of its thread, however a model spells an op. The model is not
modified. A tensor that depends on the input refers to the op that made it and requires a gradient, although
no autograd graph is built. So what is computed from it where the mode cannot see it (in scripted parts,
custom autograd.Functions, other threads) has a graph of its own, which is detected when it is used. If a call
cannot be linked, `Unlinked` is raised, and the model runs under the bridge.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rectgrad import ops
from rectgrad.engine import torch_private
from rectgrad.engine.facts import walk
from rectgrad.engine.op import TABLE, Op, Rules, State, storage_id
from rectgrad.engine.preserve import Keeper
from rectgrad.engine.torch_private import autocast_active, dispatch_modes, set_grad_enabled, transform_active
from rectgrad.engine.trace import Row, Trace, calling_modules
from rectgrad.kernels.closed_forms import CLOSED_FORMS, Found, relu_gradient, to_both
from rectgrad.kernels.linear_ops import LINEAR_OPS, LinearOp
from rectgrad.ops.arguments import Slot, out_of_place, updates_statistics
from rectgrad.ops.composite import composite, decompositions

INPUT = ops.Spec("input", "input", lambda x: x, lambda x: x, False)
_ATOMS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, slice)
_CONSTANT = frozenset({*_ATOMS, Parameter})  # types of arguments that do not depend on the input


class Unlinked(Exception):  # noqa: N818 - not an error: the bridge takes over
    """A call cannot be linked; the bridge can run the model."""


class Refused(Unlinked):
    """A call that no rule can reach, not even under the bridge. The message names it."""


class ForwardMode(TorchFunctionMode):
    """Sees every torch call of a forward pass; the base class of both recorders. decompose: families that are
    recorded as their elementary steps. named: store the modules that call each op. record: the list that
    grows during the pass, in which `op.index` is a position."""

    suspended = False  # do not record: another attribution runs inside this one, or the pass has ended
    lost: type[Exception] = Unlinked  # raised if a value that an op needs was overwritten
    _is_entry: Callable[[Any], bool]  # whether an autograd node is an input of the network

    def __init__(self, decompose: Collection[str], named: bool, record: list[Any]) -> None:
        super().__init__()
        self.decompose, self.named, self._record = decompose, named, record
        self.state, self.start = State(), torch_private.next_node_number()
        self.keeper: Keeper | None = None  # restores the model's tensors after writes
        self.by_hand: dict[str, None] = {}  # calls that may belong to a hand-written activation
        self._holders: dict[int, list[Op]] = defaultdict(list)  # the ops that keep a tensor in each storage

    def truncate(self, length: int) -> None:
        """Remove everything after the first `length` ops from the record."""
        del self._record[length:]
        for holders in self._holders.values():
            holders[:] = [op for op in holders if op.index < length]

    def _find_family(self, op: Op) -> None:
        """The family of a call whose arguments are known."""
        first, rounds = op.spec.arguments(("input", "rounding_mode"), op.args, op.kwargs)
        several, constant = op.data_count > 1, isinstance(first, Tensor)
        if (several and op.family in ops.OF_ONE) or (constant and op.family in ops.table.OF_INPUT):
            op.family = ""
        elif op.family in ops.REFINED:
            op.family = ops.refine(op.family, op.name, op.argument)
        elif op.family == "div":
            op.family = "" if rounds else "div" if type(first) is Slot else "unary"
        if op.name in ops.BY_HAND and op.family not in ops.RECTIFIERS:
            self.by_hand[op.name] = None

    def _hold(self, op: Op, tensors: Iterable[Tensor]) -> None:
        """Note that an op needs these tensors unchanged."""
        op.note_versions()
        for x in tensors:
            self._holders[storage_id(x)].append(op)

    def _unshare(self, storage: int) -> None:
        """Give copies to the ops that keep tensors in a storage that is about to be written."""
        for op in self._holders.pop(storage, ()):
            if op.overwritten():
                raise self.lost(f"an unrecorded call modified a value that {op.name} needs")
            self._copy(op, lambda x: x.clone() if storage_id(x) == storage else x)
            op.note_versions()
            if op.linear is not None and op.inputs:
                op.linear = linear_op(op, op.inputs[0])

    def _copy(self, op: Op, own: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensors that an op keeps by what `own` returns, a copy if they are to be written."""
        op.inputs, op.needed = tuple([own(x) for x in op.inputs]), tuple([own(x) for x in op.needed])
        op._output = None if op._output is None else own(op._output)

    @staticmethod
    def _refuse_backward(func: Any, frame: Any) -> None:
        """Refuse a backward pass inside the forward pass. frame: that of the caller of the function."""
        asked = torch_private.asked_by_backward(frame)
        if asked or func in _DIFFERENTIATING:
            name = "backward" if asked else func.__name__
            raise Refused(f"torch.autograd.{name} called in the forward pass")

    def _made_before(self, x: Tensor) -> bool:
        """Whether a tensor with a graph was computed before the pass, as some weights are."""
        if torch_private.node_number(x) >= self.start:
            return False
        nodes = walk([x.grad_fn], lambda node: [following for following, _ in node.next_functions])
        return not any(map(self._is_entry, nodes))


class Recorder(ForwardMode):
    """Records one forward pass. rules: those of the backward pass, which determine what is kept of each op;
    None keeps everything, for any method."""

    def __init__(self, rules: Rules | None, decompose: Collection[str] = (), named: bool = False) -> None:
        self.ops: list[Op] = []
        super().__init__(decompose, named, self.ops)
        self.rules = rules
        reads = {family: rule.reads for family, rule in (rules or {}).items()}
        if reads.get("relu6") == "shapes":
            reads["relu6"] = "output"  # it may be a gate
        # What is kept of the ops of each family.
        self._reads = defaultdict(lambda: "all" if rules is None else "shapes", reads)
        self.failed = False  # a call raised an error, which the model may have caught

    def enter(self, x: Tensor) -> Op:
        """Link an input of the network."""
        op = Op(INPUT, "input", (), {}, self.state)
        self._link(op, x)
        return op

    def op_of(self, x: Tensor) -> Op | None:
        """The op that made a tensor; None for a weight or a constant."""
        op: Op | None = getattr(x, "_rectgrad", None)
        if op is not None and op.state is self.state:
            if op.version != x._version or not x.requires_grad:
                raise Unlinked(f"an unrecorded call modified the result of {op.name}")
            return op
        if not x.requires_grad or (op is None and x.is_leaf) or self._made_before(x):
            return None
        raise Unlinked("an unrecorded call made a tensor")

    def _is_entry(self, node: Any) -> bool:
        op = getattr(getattr(node, "variable", None), "_rectgrad", None)
        return op is not None and op.state is self.state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.suspended:
            return func(*args, **(kwargs or {}))
        handler = _HANDLERS.get(func) or handler_of(func)
        try:
            return handler[0](self, handler[1], func, args, kwargs or {})
        except BaseException:
            self.failed = True
            raise

    def trace(self, root: Any) -> Trace:
        rows = [
            Row(op.name, op.modules, tuple(op.shape), op.family, op.data_count, tuple(op.input_shapes[0]), op)
            for op in self.ops
            if op.family != "input"
        ]
        trace = Trace(rows, root)
        trace.by_hand = self.by_hand
        return trace

    # How calls are handled: one function for each kind of call.

    def _pass(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A query about a tensor: nothing to record. A backward pass starts with some."""
        self._refuse_backward(func, sys._getframe(2))
        return func(*args, **kwargs)

    def _composite(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A composite function of torch: its body runs under the recorder."""
        body: Any = composite(func)
        return torch_private.under_mode(self, lambda: body(*args, **kwargs))

    def _attribute(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """An attribute whose value would differ for a linked tensor, or an assignment to one."""
        if spec.name != "__get__":
            raise Unlinked(str(spec.attribute))
        if spec.attribute == "grad_fn" and getattr(args[0], "_rectgrad", None) is None:
            return func(*args, **kwargs)  # torch 2.4's checkpointing asks this about a tensor it made itself
        if self.op_of(args[0]) is None:
            return self._constant(spec, func, args, kwargs, writes=False)
        if transposed := _TRANSPOSED.get(spec.attribute):
            return torch_private.under_mode(self, lambda: transposed(args[0]))
        raise Unlinked(str(spec.attribute))

    def _call(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """Any other call is recorded if it depends on the input."""
        given, named, inplace = out_of_place(spec, args, kwargs) if spec.has_flag else (args, kwargs, False)
        writes = spec.writes or inplace
        if spec.name in ops.NEW_TENSORS:  # of y, `x.type_as(y)` and its kind take the shape or the type alone
            given = (*given[:1], *[y.detach() if type(y) is Tensor else y for y in given[1:]])
        data: list[Tensor] = []
        slots = tuple([value if type(value) in _CONSTANT else self._slot(value, data) for value in given])
        if named:
            named = {k: v if type(v) in _CONSTANT else self._slot(v, data) for k, v in named.items()}
        if not data:
            return self._constant(spec, func, args, kwargs, writes)
        op = Op(spec, spec.family or "", slots, named, self.state)
        op.data_count, op.input_shapes = len(data), tuple([x.shape for x in data])
        op.sources = tuple([x._rectgrad for x in data])  # type: ignore[attr-defined]
        self._check(op, data, writes)
        if op.family in self.decompose and not writes:
            op.inputs = tuple(data)
            return torch_private.under_mode(self, lambda: decompositions[op.family](op))
        if not self._needs_no_input(op, data):
            return self._computed(op, data, writes)
        if self._reads[op.family] in ("all", "inputs"):
            op.inputs = tuple(_kept(op, data, writes))
        y = _without_graph(func, args, kwargs)
        if type(y) is Tensor:
            return self._link(op, y)
        return (self._link(op, y[0]), *y[1:])  # torch.native_batch_norm gives its statistics too

    def _needs_no_input(self, op: Op, data: list[Tensor]) -> bool:
        """Whether the gradient does not read the op's input, so that the call runs unchanged, also in place.
        True for linear ops, for rectifiers (the rule or the output suffices), and for x + y of one shape."""
        family, name = op.family, op.name
        if family in ops.RECTIFIERS:
            if name == "relu" and (self.rules is None or family not in self.rules):
                op.back = relu_gradient
            return op.back is not None or self.rules is None or family in self.rules
        if name == "add":
            alike = len({(x.shape, x.dtype, x.device) for x in data}) == 1
            if alike and len(data) == len(op.args) == 2 and not op.kwargs:
                op.back, op.passes_sparse = to_both, True
            return op.back is not None
        if name in LINEAR_OPS and len(data) == 1 and op.args and type(op.args[0]) is Slot:
            op.linear = linear_op(op, data[0])
        return op.linear is not None

    def _computed(self, op: Op, data: list[Tensor], writes: bool) -> Any:
        """Run a call whose gradient has a closed form or needs a local autograd graph."""
        if updates_statistics(op.spec, op.args, op.kwargs):
            raise Unlinked(op.name)
        kept = _kept(op, data, writes) if writes else data
        points: Sequence[Tensor] = kept
        found = _without_graph(closed_form, (op, kept), {}) if op.name in CLOSED_FORMS else None
        if found is not None:
            result, op.back, needed = found
            op.needed = tuple([x.detach() for x in needed])
        else:
            op.args, op.kwargs = torch_private.map_tensors(_without_gradient, (op.args, op.kwargs))
            with saving():
                points = op._leaves = tuple([x.detach().requires_grad_() for x in kept])
                result = op.call(*points)
        for x, point in zip(data, points, strict=True):
            if result is point:
                return x
        if isinstance(result, (bool, int, float, str, torch.Size)):
            return result
        if self._reads[op.family] in ("all", "inputs"):
            op.inputs = tuple([x.detach() for x in kept])
        if type(result) is Tensor:
            return self._made(op, result, data[0] if writes else None)
        if not isinstance(result, (tuple, list)) or writes or not all(type(r) is Tensor for r in result):
            raise Unlinked(op.name)
        return type(result)([self._made(op.of_part(i), r, None) for i, r in enumerate(result)])

    def _made(self, op: Op, result: Tensor, target: Tensor | None) -> Tensor:
        """Link one result of a call. target: the tensor that the call overwrites."""
        if op.back is None:
            if not result.requires_grad:
                whole = not (result.is_floating_point() or result.is_complex())
                if whole or op.name in ops.NEW_TENSORS:
                    return result
                raise Unlinked(op.name)
            op._local = result
            result = result.detach()
        if target is not None:
            return self._link(op, _without_graph(target.copy_, (result,), {}))
        return self._link(op, result)

    def _constant(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, writes: bool) -> Any:
        """A call that does not depend on the input, so that its result needs no gradient."""
        wrapped = torch_private.tensors_in((args, kwargs)) if transform_active() else ()
        if any(hasattr(torch_private.unwrapped(x), "_rectgrad") for x in wrapped):
            raise Refused(TRANSFORM)
        reshapes = spec.name != "copy" and (spec.name in ops.ROUTING or spec.name in ops.UNLINKABLE)
        target = args[0] if args else kwargs.get("input")
        if kwargs.get("out") is not None or (writes and (reshapes or not self._writable(target))):
            raise Unlinked(spec.name)
        return _without_graph(func, args, kwargs)

    def _slot(self, value: Any, data: list[Tensor]) -> Any:
        """Replace data tensors by slots and collect them in `data`."""
        kind = type(value)
        if kind is Tensor:
            if self.op_of(value) is None:
                return value
            data.append(value)
            return Slot(len(data) - 1)
        if kind is list or kind is tuple:
            if kind is tuple and _CONSTANT.issuperset(map(type, value)):  # strides, sizes
                return value
            return kind([v if type(v) in _CONSTANT else self._slot(v, data) for v in value])
        if isinstance(value, (Tensor, tuple, list, dict)) and kind is not torch.Size:
            raise Unlinked(f"an argument of type {kind.__name__}")
        return value

    def _check(self, op: Op, data: list[Tensor], writes: bool) -> None:
        """Raise an error for calls that the recorder must not link."""
        name = op.name
        if transform_active():
            raise Refused(TRANSFORM)
        if not torch.is_grad_enabled() or autocast_active() or dispatch_modes():
            raise Unlinked(name)
        if name not in ops.SIMPLE or not op.spec.own or "out" in op.kwargs:
            self._find_family(op)
            hides = not op.spec.family and (name in ops.UNLINKABLE or (writes and name != "masked_fill"))
            trains = updates_statistics(op.spec, op.args, op.kwargs)
            if not op.spec.own or hides or trains or op.kwargs.get("out") is not None:
                raise Unlinked(name)
        if writes:  # other tensors in its memory then have another version: see op_of
            if not op.args or type(op.args[0]) is not Slot or torch_private.is_view(data[0]):
                raise Unlinked("an in-place call on a view, or not on its first argument")
            self._unshare(storage_id(data[0]))

    def _writable(self, target: Any) -> bool:
        """Whether a constant may be written. Tensors of the model and the caller may not: they are restored
        before the backward pass reads them."""
        if type(target) is not Tensor or target.requires_grad or self.keeper is None or target.is_inference():
            return False
        return not self.keeper.owns(storage_id(target))

    def _link(self, op: Op, y: Tensor) -> Tensor:
        """Add an op to the record and keep what its rule and gradient read. y: its result."""
        op.shape, op.index = y.shape, len(self.ops)
        if self._reads[op.family] in ("all", "output"):
            op._output = y.detach()
        if op.back is relu_gradient:
            op.needed = (y.detach(),)
        if op.needed or op._output is not None:
            self._hold(op, op.held())
        if self.named:
            op.modules = calling_modules(__file__)
        y.requires_grad_()
        op.version = y._version
        y._rectgrad = op  # type: ignore[attr-defined]
        self.ops.append(op)
        return y


def linear_op(op: Op, x: Tensor) -> LinearOp | None:
    """The linear op of a call; None if its arguments are unusual."""
    names, make = LINEAR_OPS.get(op.name, ((), None))
    return make(x, *op.spec.arguments(names, op.args, op.kwargs)) if make is not None else None


def closed_form(op: Op, data: list[Tensor]) -> Found:
    """The result of a call and its gradient in closed form; None if its arguments are unusual."""
    names, form = CLOSED_FORMS[op.name]
    if op.kwargs and names != () and not op.kwargs.keys() <= {"input", *(names or ())}:
        return None
    return form(op.call, data, *(op.args if names is None else op.spec.arguments(names, op.args, op.kwargs)))


Handler = Callable[[Recorder, ops.Spec, Any, tuple, dict], Any]
_HANDLERS: dict[Any, tuple[Handler, ops.Spec]] = {}
_DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
TRANSFORM = "a torch.func transform (vmap, grad, vjp, functionalize) in the forward pass"
_TRANSPOSED: Any = {"T": lambda x: x.permute(*range(x.dim())[::-1]), "mT": lambda x: x.transpose(-2, -1)}


def handler_of(func: Any) -> tuple[Handler, ops.Spec]:
    """How the recorder handles calls of a function. Cached for torch's own functions only."""
    spec, handler = TABLE.lookup(func), Recorder._call
    plain = spec.name == "__get__" and spec.attribute in ops.PLAIN_ATTRIBUTES
    if plain or func in _DIFFERENTIATING or (spec.silent and spec.attribute is None):
        handler = Recorder._pass
    elif spec.attribute is not None:
        handler = Recorder._attribute
    elif spec.own and not spec.family and spec.name not in ops.ROUTING and composite(func) is not None:
        handler = Recorder._composite
    if spec.own:
        _HANDLERS[func] = handler, spec
    return handler, spec


def _without_graph(func: Any, args: tuple, kwargs: dict) -> Any:
    enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        set_grad_enabled(enabled)


def _without_gradient(weight: Tensor) -> Tensor:
    weight = weight.detach() if weight.requires_grad else weight
    return weight.clone() if weight.is_inference() else weight


def _kept(op: Op, data: list[Tensor], writes: bool) -> list[Tensor]:
    """The data before an in-place call. The op that made the first tensor has a copy of what it keeps."""
    first = op.sources[0]._output if writes else data[0]
    first = data[0].detach().clone() if first is None else first.detach()
    return [first, *(x.detach() for x in data[1:])]


def saving() -> Any:
    """A context for calls with a local graph. Tensors are saved directly: hooks of checkpointing would
    recompute them unseen. Our hooks check versions, because torch does not do so for packed tensors."""
    if torch_private.saved_tensor_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(x: Tensor) -> tuple[Tensor, int]:
    torch_private.packing.count += 1
    return x.detach(), torch_private.version(x)  # x itself would create a reference cycle with the node


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, before = packed
    if torch_private.version(x) != before:
        raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
    return x
