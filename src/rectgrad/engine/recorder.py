"""The recorder: a forward pass whose ops are linked to one another, so that the backward pass walks them.

A `TorchFunctionMode` sees every torch call of its thread, so it does not matter how a model spells an op.
Nothing is set, replaced or written on the model. Tensors that depend on the input carry the op that made them
and require a gradient, although no graph is built: anything made from them out of sight (a scripted part, a
custom autograd.Function, another thread) then has a graph of its own, and is noticed when it comes back. A
pass with something that cannot be linked raises `Unlinked`: the bridge can run it.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rectgrad import kernels, ops
from rectgrad.engine.op import TABLE, Op, Rules, State, storage_id
from rectgrad.engine.preserve import Keeper
from rectgrad.engine.torch_private import (
    asked_by_backward,
    autocast_active,
    dispatch_modes,
    is_view,
    next_node_number,
    node_number,
    packing,
    saved_tensor_hooks,
    set_grad_enabled,
    tensors_in,
    transform_active,
    under_mode,
    unwrapped,
    version,
)
from rectgrad.engine.trace import Row, Trace, calling_module
from rectgrad.kernels.linear_ops import AvgPool, Conv, Linear, LinearOp, Scale
from rectgrad.ops.arguments import Slot, out_of_place, updates_statistics
from rectgrad.ops.composite import composite, decompositions
from rectgrad.ops.derivatives import DIRECT, Found, direct

_FIRST = Slot(0)
_INPUT = ops.Spec("input", "input", lambda x: x, lambda x: x, False)
_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, slice})
_QUIET = _ATOMS | {
    tuple,
    list,
    Parameter,
}  # in a linear op or an activation, no data
_LINEAR = frozenset({"conv", "linear", "batch_norm", "avg_pool"})
# Questions with the same answer for a linked tensor as for any other.
_ASKED = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_mps is_meta is_quantized is_sparse is_nested is_mkldnn "
    "is_xpu is_sparse_csr itemsize nbytes requires_grad names".split()
)
# Calls that do more than compute a result, or hide what they compute.
_UNLINKABLE = frozenset(
    "__setitem__ copy alias lift_fresh detach requires_grad_ requires_grad data __copy__ __deepcopy__ "
    "numpy_T register_hook register_post_accumulate_grad_hook retain_grad set numpy __array__ storage "
    "untyped_storage share_memory apply map resize as_strided lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell bernoulli dequantize quantize_per_tensor quantize_per_channel "
    "fake_quantize_per_tensor_affine to_sparse to_dense to_mkldnn refine_names rename align_to".split()
)
# New tensors from a tensor's shape and type alone.
_NEW = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full "
    "new_tensor".split()
)


class Unlinked(Exception):  # noqa: N818 - not an error: the bridge takes over
    """A call that cannot be linked."""


class Refused(Unlinked):
    """A call that no rule can follow, not even over the bridge; its text names it."""


class Recorder(TorchFunctionMode):
    """One forward pass.

    rules: those that the backward pass will use, which say what to keep of an op; None to keep everything,
    for any method. decompose: families to record by their elementary steps. named: note the layer of each op.
    """

    suspended = False  # calls pass through: another attribution runs inside this one, or this one has ended

    def __init__(self, rules: Rules | None, decompose: Collection[str] = (), named: bool = False) -> None:
        super().__init__()
        self.rules, self.decompose, self.named = rules, decompose, named
        self.state = State()
        self.keeper: Keeper | None = None
        self.ops: list[Op] = []
        self.by_hand: dict[str, None] = {}  # calls of which an activation may have been made
        self.start = next_node_number()
        self.failed = False  # a call raised: a model that catches it may have taken another path
        self.turned = False  # dimensions changed places through an attribute such as `.T`
        self._shared: set[int] = set()  # storages of more than one linked tensor
        self._keeping: dict[int, list[Op]] = {}  # by an op's index, the ops that keep its result

    def enter(self, x: Tensor) -> Op:
        """Link an input of the network."""
        op = Op(_INPUT, "input", (), {}, self.state)
        op.shape, op.index, op.version = x.shape, len(self.ops), version(x)
        x._rectgrad = op  # type: ignore[attr-defined]
        self.ops.append(op)
        return op

    def op_of(self, x: Tensor) -> Op | None:
        """The op that made a tensor; None for a weight or a constant."""
        op: Op | None = getattr(x, "_rectgrad", None)
        if op is not None and op.state is self.state:
            if op.version != x._version or not x.requires_grad:
                raise Unlinked(f"the result of {op.name} was modified out of sight")
            return op
        if not x.requires_grad or (op is None and x.is_leaf):
            return None
        if node_number(x) < self.start and not reaches(x.grad_fn, self._is_entry):
            return None  # a weight that was computed before the pass
        raise Unlinked("a tensor was made out of sight")

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
            Row(op.name, op.module, tuple(op.shape), op.family, op.data_count, tuple(op.input_shapes[0]), op)
            for op in self.ops
            if op.family != "input"
        ]
        trace = Trace(rows, root)
        trace.by_hand, trace.turned = self.by_hand, self.turned
        return trace

    def truncate(self, length: int) -> None:
        """Forget the ops after the first `length`."""
        del self.ops[length:]
        for keeping in self._keeping.values():
            keeping[:] = [op for op in keeping if op.index < length]

    # How calls are handled: one function for each kind of call.

    def _pass(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A question about a tensor: nothing to record."""
        return func(*args, **kwargs)

    def _asked(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """The questions that torch.autograd.backward begins with."""
        if asked_by_backward(sys._getframe(2)):
            raise Refused(BACKWARD)
        return func(*args, **kwargs)

    def _refuse(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> NoReturn:
        raise Unlinked(spec.attribute or spec.name)

    def _unknown(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A function that is not torch's own: linked only if it has nothing to do with the data."""
        if func in _DIFFERENTIATING:
            raise Refused(f"torch.autograd.{func.__name__} called in the forward pass")
        data: list[Tensor] = []
        for value in (*args, *kwargs.values()):
            self._slot(value, data)
        if data:
            raise Unlinked(spec.name)
        return _without_graph(func, args, kwargs)

    def _composite(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """One of torch's own composites: its body runs under the recorder."""
        body = composite(func)
        assert body is not None
        return under_mode(self, lambda: body(*args, **kwargs))

    def _attribute(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """An attribute that differs between a linked tensor and another one."""
        if spec.attribute == "grad_fn" and getattr(args[0], "_rectgrad", None) is None:
            return func(*args, **kwargs)  # torch 2.4's checkpointing asks this about a tensor it made itself
        if self.op_of(args[0]) is None:
            return self._constant(spec, func, args, kwargs, writes=False)
        if spec.attribute in ("T", "mT"):
            self.turned = True
            return self._any(_TRANSPOSE[spec.attribute], func, args, kwargs)
        raise Unlinked(str(spec.attribute))

    def _linear(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A linear op whose one data tensor is its first argument."""
        source = self._source(args, kwargs)
        if source is None:
            return self._any(spec, func, args, kwargs)
        x, family = args[0], spec.family
        assert family is not None
        op = Op(spec, family, (_FIRST, *args[1:]), kwargs, self.state)
        linear = linear_op(op, x)
        if linear is None:
            return self._any(spec, func, args, kwargs)
        set_grad_enabled(False)
        try:
            y = func(*args, **kwargs)
        finally:
            set_grad_enabled(True)
        others: tuple = ()
        if type(y) is not Tensor:  # torch.native_batch_norm gives its statistics too
            y, *others = y
        op.input_shapes, op.shape = (x.shape,), y.shape
        op.linear = linear if linear is not _AVG_POOL else _avg_pool(op, x, y)
        reads = self._reads(op)
        if reads != "shapes":
            op._output = y.detach()
            op.inputs = (x.detach(),) if reads == "all" else ()
            self._hold(op, (source,))
        linked = self._link(op, (source,), y)
        return (linked, *others) if others else linked

    def _rectifier(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A rectified activation: its output is kept, and its input only if the rule reads it."""
        source = self._source(args, kwargs)
        if source is None:
            return self._any(spec, func, args, kwargs)
        others, named, inplace = (
            out_of_place(spec, args, kwargs) if kwargs or len(args) > 1 else (args, kwargs, False)
        )
        x, family, inplace = args[0], spec.family, inplace or spec.writes
        assert family is not None
        op = Op(spec, family, (_FIRST, *others[1:]), named, self.state)
        if family == "clamp":
            op.family = family = ops.refine("clamp", spec.name, op.argument)
        ruled = self.rules is None or family in self.rules
        if family not in ops.RECTIFIERS or not (ruled or spec.name == "relu"):
            return self._any(spec, func, args, kwargs)
        if inplace:
            self._overwrite(x, source)
        if self._reads(op) == "all":
            op.inputs = (x.detach().clone() if inplace else x.detach(),)
        set_grad_enabled(False)
        try:
            y = func(*args, **kwargs)
        finally:
            set_grad_enabled(True)
        op.shape = y.shape
        op.input_shapes, op._output = (op.shape,), y.detach()
        if spec.name == "relu" and (self.rules is None or not ruled):  # the gradient needs no input
            op.back, op.needed = relu_gradient, (op._output,)
        self._hold(op, (source,) if op.inputs else ())
        return self._link(op, (source,), y)

    def _sum(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """x + y of one shape: the gradient goes to both."""
        if kwargs or spec.name != "add" or len(args) != 2 or not _alike(*args) or not self._undisturbed():
            return self._any(spec, func, args, kwargs)
        x, y = args
        first, second = self.op_of(x), self.op_of(y)
        if first is None or second is None:
            return self._any(spec, func, args, kwargs)
        if spec.writes:
            self._overwrite(x, first)
        op = Op(spec, "add", (_FIRST, Slot(1)), kwargs, self.state)
        op.back, op.passes_sparse, op.data_count = to_both, True, 2
        op.input_shapes, op.shape = (x.shape, y.shape), x.shape
        reads = self._reads(op)
        if reads == "all":
            op.inputs = (x.detach().clone() if spec.writes else x.detach(), y.detach())
        total = _without_graph(func, args, kwargs)
        if reads != "shapes":
            op._output = total.detach()
            self._hold(op, (first, second))
        return self._link(op, (first, second), total)

    def _any(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """Any call that may be linked: by a closed form of its gradient, or by a graph of its own."""
        given, named, inplace = out_of_place(spec, args, kwargs)
        data: list[Tensor] = []
        slots = tuple([self._slot(a, data) for a in given])
        options = {k: self._slot(v, data) for k, v in named.items()} if named else named
        writes = spec.writes or inplace
        if not data:
            return self._constant(spec, func, args, kwargs, writes)
        if spec.name in ops.BY_HAND:
            self.by_hand[spec.name] = None
        if spec.family is None and (spec.name in _UNLINKABLE or (writes and spec.name != "masked_fill")):
            raise Unlinked(spec.name)
        op = Op(spec, spec.family or "", slots, options, self.state)
        op.data_count = len(data)
        self._check(op, writes)
        if op.family in self.decompose and not writes:
            op.inputs = tuple(data)
            return under_mode(self, lambda: decompositions[op.family](op))
        sources = tuple([self.op_of(x) for x in data])
        if writes:
            self._overwrite(data[0], sources[0])
            kept = [x.detach().clone() if i == 0 else x.detach() for i, x in enumerate(data)]
        else:
            kept = data
        op.input_shapes = tuple([x.shape for x in data])
        found = self._directly(op, kept)
        if found is not None:
            result, op.back, needed = found
            op.needed = tuple([x.detach() for x in needed])
        else:
            with saving():
                leaves = op._leaves = tuple([x.detach().requires_grad_() for x in kept])
                result = op.call(*leaves)
            for x, leaf in zip(data, leaves, strict=True):
                if result is leaf:
                    return x
        if isinstance(result, (bool, int, float, str, torch.Size)):
            return result
        if type(result) is Tensor:
            return self._made(op, sources, result, kept, data[0] if writes else None)
        if not isinstance(result, (tuple, list)) or writes or not all(type(r) is Tensor for r in result):
            raise Unlinked(spec.name)
        return type(result)([self._made(copy.copy(op), sources, r, kept, None) for r in result])

    def _made(
        self, op: Op, sources: Any, result: Tensor, data: list[Tensor], target: Tensor | None
    ) -> Tensor:
        """Link one result of a call. target: the tensor that it overwrites."""
        if op.back is None:
            if not result.requires_grad:
                whole = not (result.is_floating_point() or result.is_complex())
                if whole or op.name in _NEW:
                    return result
                raise Unlinked(op.name)
            op._local = result
            result = result.detach()
        op.shape, y = result.shape, result
        if target is not None:
            y = _without_graph(target.copy_, (result,), {})
        else:
            storage = storage_id(y)
            if any(storage_id(x) == storage for x in data):
                self._shared.add(storage)
        reads = self._reads(op)
        if reads != "shapes":
            op._output = y.detach()
            op.inputs = tuple([x.detach() for x in data]) if reads == "all" else ()
        if op.needed or op._output is not None:
            self._hold(op, sources)
        return self._link(op, sources, y)

    def _constant(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, writes: bool) -> Any:
        """A call that does not depend on the input, so that its result needs no gradient."""
        if transform_active() and any(map(self._is_wrapped, tensors_in((args, kwargs)))):
            raise Refused(_TRANSFORM)
        reshapes = spec.name != "copy" and (spec.name in ops.ROUTING or spec.name in _UNLINKABLE)
        target = args[0] if args else kwargs.get("input")
        if "out" in kwargs or (writes and (reshapes or not self._writable(target))):
            raise Unlinked(spec.name)
        return _without_graph(func, args, kwargs)

    # Parts of the above.

    def _undisturbed(self) -> bool:
        """Whether a call does no more than it says: gradients are on, autocast and other modes are not."""
        if transform_active():
            raise Refused(_TRANSFORM)
        return torch.is_grad_enabled() and not autocast_active() and not dispatch_modes()

    def _is_wrapped(self, x: Tensor) -> bool:
        """Whether a tensor of a torch.func transform wraps a linked one."""
        return getattr(unwrapped(x), "_rectgrad", None) is not None

    def _source(self, args: tuple, kwargs: dict) -> Op | None:
        """The op that made the first argument, if that is certainly the only data."""
        x = args[0] if args else None
        op = self.op_of(x) if type(x) is Tensor else None
        if op is None or not self._undisturbed():
            return None
        for value in args:
            if type(value) not in _QUIET and value is not x and _perhaps_data(value):
                return None
        for value in kwargs.values():
            if type(value) not in _QUIET and _perhaps_data(value):
                return None
        return op

    def _slot(self, value: Any, data: list[Tensor]) -> Any:
        """Data tensors become slots, weights lose their gradient."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is Tensor or kind is Parameter:
            if self.op_of(value) is None:
                value = value.detach() if value.requires_grad else value
                return value.clone() if value.is_inference() else value
            data.append(value)
            return Slot(len(data) - 1)
        if kind is list or kind is tuple:
            return kind([self._slot(v, data) for v in value])
        if isinstance(value, (Tensor, tuple, list, dict)) and kind is not torch.Size:
            raise Unlinked(f"an argument of type {kind.__name__}")
        return value

    def _check(self, op: Op, writes: bool) -> None:
        """No call is linked whose meaning the bridge would see differently."""
        if op.family in ops.REFINED:
            op.family = ops.refine(op.family, op.name, op.argument)
        if op.data_count > 1 and op.family in ops.OF_ONE:
            op.family = ""
        trains = op.name == "instance_norm" or (
            op.family == "batch_norm" and updates_statistics(op.spec, op.args, op.kwargs)
        )
        unlike = not self._undisturbed() or "out" in op.kwargs
        if trains or unlike or (writes and (not op.args or type(op.args[0]) is not Slot)):
            raise Unlinked(op.name)

    def _directly(self, op: Op, data: list[Tensor]) -> Found:
        """The result without a graph, where the gradient has a closed form."""
        if op.name not in DIRECT:
            return None
        set_grad_enabled(False)
        try:
            found = direct(op, data)
        finally:
            set_grad_enabled(True)
        if found is not None and any(found[0] is x for x in data):
            return None
        return found

    def _reads(self, op: Op) -> str:
        """What is kept of an op for its rule."""
        if self.rules is None:
            return "all"
        rule = self.rules.get(op.family)
        return "shapes" if rule is None else rule.reads

    def _hold(self, op: Op, sources: tuple) -> None:
        """Note the versions of the tensors that an op keeps, and that it keeps its sources' results."""
        op.note_versions()
        if op.inputs or op.needed:
            for source in sources:
                self._keeping.setdefault(source.index, []).append(op)

    def _overwrite(self, x: Tensor, source: Op | None) -> None:
        """Before a linked tensor is written: nobody else may see it, and ops that keep it get a copy."""
        storage = storage_id(x)
        if source is None or source.family == "input" or is_view(x) or storage in self._shared:
            raise Unlinked("an in-place call on shared values")
        for op in (source, *self._keeping.get(source.index, ())):
            if not op.versions:
                continue
            if op.overwritten():
                raise Unlinked(f"a value that {op.name} needs was modified out of sight")
            op.inputs = tuple([_unshared(each, storage) for each in op.inputs])
            op.needed = tuple([_unshared(each, storage) for each in op.needed])
            op._output = None if op._output is None else _unshared(op._output, storage)
            op.note_versions()

    def _writable(self, target: Any) -> bool:
        """Whether a constant may be written: not the model's and the caller's tensors, which are restored
        before the backward walk reads them."""
        if type(target) is not Tensor or target.requires_grad or self.keeper is None or target.is_inference():
            return False
        return not self.keeper.owns(storage_id(target))

    def _link(self, op: Op, sources: Any, y: Tensor) -> Tensor:
        op.sources, op.index = sources, len(self.ops)
        if self.named:
            op.module = calling_module(__file__)
        y.requires_grad_()
        op.version = y._version
        y._rectgrad = op  # type: ignore[attr-defined]
        self.ops.append(op)
        return y


def linear_op(op: Op, x: Tensor) -> LinearOp | None:
    """The linear op that a call is; None if it is not of the usual kind."""
    family, args = op.family, op.args
    if family == "conv":
        if len(args) == 7 and not op.kwargs:  # as the modules write it
            weight, given = args[1], args[3:]
        else:
            weight, *rest = (op.argument(n) for n in ("weight", "stride", "padding", "dilation", "groups"))
            given = tuple(rest)
        fits = isinstance(weight, Tensor) and weight.dtype is x.dtype and given[1] != "same"
        return Conv(x, weight, given) if fits and x.dim() == weight.dim() > 2 else None
    if family == "linear":
        weight = op.argument("weight")
        fits = isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype is x.dtype
        return Linear(x, weight) if fits else None
    if family == "batch_norm":
        if len(args) == 8 and op.spec.spelling is F.batch_norm:  # as the modules write it
            variance, weight, trains, eps = args[2], args[3], args[5], args[7]
        else:
            variance, weight, eps = (op.argument(name) for name in ("running_var", "weight", "eps"))
            trains = op.argument("training") or op.name == "instance_norm"
        if not isinstance(variance, Tensor) or trains or x.dim() < 2:
            return None
        return Scale(variance, weight, 1e-5 if eps is None else eps, x.dtype)
    usual = op.name == "avg_pool2d" and not op.argument("ceil_mode", False) and x.dim() == 4
    fits = usual and op.argument("divisor_override") is None and kernels.is_native(x) and x.is_contiguous()
    return _AVG_POOL if fits else None


_AVG_POOL: Any = object()  # one that is made when its output is known


def _avg_pool(op: Op, x: Tensor, y: Tensor) -> AvgPool:
    kernel, stride, padding = (op.argument(name, 0) for name in ("kernel_size", "stride", "padding"))
    return AvgPool(x, y, kernel, stride, padding, bool(op.argument("count_include_pad", True)))


Handler = Callable[[Recorder, ops.Spec, Any, tuple, dict], Any]
_HANDLERS: dict[Any, tuple[Handler, ops.Spec]] = {}
_DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
BACKWARD = "torch.autograd.backward called in the forward pass"
_TRANSFORM = "a torch.func transform (vmap, grad, vjp, functionalize) in the forward pass"
_TRANSPOSE = {
    "T": ops.Spec("t", None, lambda x: x.permute(*range(x.dim() - 1, -1, -1)), torch.t, False),
    "mT": ops.Spec("t", None, lambda x: x.transpose(-2, -1), torch.t, False),
}


def handler_of(func: Any) -> tuple[Handler, ops.Spec]:
    """How the recorder handles calls of a function. Remembered for torch's own functions alone."""
    spec = TABLE.lookup(func)
    handler = _handler(func, spec), spec
    if spec.own:
        _HANDLERS[func] = handler
    return handler


def _handler(func: Any, spec: ops.Spec) -> Handler:
    if not spec.own or func in _DIFFERENTIATING:
        return Recorder._unknown
    if spec.attribute is not None:
        if spec.name == "__get__":
            if spec.attribute in ("requires_grad", "is_nested"):
                return Recorder._asked
            return Recorder._pass if spec.attribute in _ASKED else Recorder._attribute
        return Recorder._refuse
    if spec.silent:
        return Recorder._pass
    if spec.family is None and spec.name not in ops.ROUTING and composite(func) is not None:
        return Recorder._composite
    if spec.family in _LINEAR and spec.name not in ("convolution", "_convolution"):
        return Recorder._linear
    if spec.family in ops.RECTIFIERS or spec.family == "clamp":
        return Recorder._rectifier
    return Recorder._sum if spec.family == "add" else Recorder._any


def _perhaps_data(value: Any) -> bool:
    return value.requires_grad if type(value) is Tensor else isinstance(value, Tensor)


def _without_graph(func: Any, args: tuple, kwargs: dict) -> Any:
    enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        set_grad_enabled(enabled)


def to_both(R: Any) -> tuple[Any, Any]:
    return R, R


def relu_gradient(R: Tensor, y: Tensor) -> tuple[Tensor]:
    return (torch.ops.aten.threshold_backward.default(R, y, 0),)


def reaches(node: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a wanted node is in the autograd graph below a node."""
    waiting, met = [node], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            if wanted(node):
                return True
            met.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return False


def saving() -> Any:
    """Around a call that autograd records: tensors are saved as they are. Hooks of checkpointing would
    recompute them out of sight. Ours check versions, because torch does not if a hook has packed a tensor."""
    if saved_tensor_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(x: Tensor) -> tuple[Tensor, int]:
    packing.count += 1
    return x.detach(), version(x)  # the tensor itself would refer to the node that saves it


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, before = packed
    if version(x) != before:
        raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
    return x


def _unshared(x: Tensor, storage: int) -> Tensor:
    return x.clone() if storage_id(x) == storage else x


def _alike(x: Any, y: Any) -> bool:
    if type(x) is not Tensor or type(y) is not Tensor:
        return False
    return x.shape == y.shape and x.dtype is y.dtype and x.device == y.device
