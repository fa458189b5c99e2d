"""A forward pass whose ops are linked to one another, so that its way back needs no graph of autograd's.

Nearly every network is a chain of calls that are all seen and make new tensors, or overwrite one that nobody
else looks at. There the record itself is the graph, at a fraction of the cost. What depends on the input
requires a gradient here too, so that whatever is made of it out of sight has a graph of its own, and is
noticed. A pass that is not so simple raises `Unlinked`; a `Tape` can record it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rectgrad import ops
from rectgrad.engine.calls import asked, autocasts, out_of_place, undisturbed, unsurrounded, updates
from rectgrad.engine.op import Current, Keep, Op, Slot, storage_of
from rectgrad.engine.preserve import Keeper
from rectgrad.engine.trace import Row, Trace
from rectgrad.kernels.linear_ops import LINEAR_STEPS
from rectgrad.ops.composite import composite, inside
from rectgrad.ops.derivatives import DIRECT, Found, direct

_FIRST = Slot(0)
_INPUT = ops.Spec("input", None, lambda x: x, (), False)
_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, slice})
_QUIET = _ATOMS | {tuple, list, Parameter}  # where a step or a rectifier takes them, they hold numbers
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
# Answers that are the same for a linked tensor as for any other.
_ASKED = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_mps is_meta is_quantized is_sparse is_nested is_mkldnn "
    "is_xpu is_sparse_csr itemsize nbytes requires_grad names".split()
)
# To start autograd's engine on a GPU takes as long as some ten ops of ours: with more of these a tape is
# faster.
MOST_LOCAL_GRAPHS = 8
# Nothing but what these say happens to a tensor.
_LINKABLE = ops.ROUTING - frozenset(
    "__setitem__ copy alias lift_fresh detach requires_grad_ data __copy__ numpy_T scatter index_add".split()
)

# Of a tensor's shape and type alone.
_NEW = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full "
    "new_tensor".split()
)

Sources = tuple[Op | None, ...]


class Unlinked(Exception):  # noqa: N818 - no error: another way is taken
    """A call that cannot be linked."""


class LinkedTape(TorchFunctionMode):
    """One forward pass. keeps: what the rule of a family reads of its calls. carries: what passed an
    activation may travel as lists."""

    # The forward pass failed, or all is done: who is interrupted when a mode ends may leave it behind.
    over = ended = False

    def __init__(self, keeps: Mapping[str, Keep], carries: bool = False) -> None:
        super().__init__()
        self.keeps = keeps
        self.current = Current()
        self.current.carries = carries
        self.keeper: Keeper | None = None
        self.ops: list[Op] = []
        self.failed = False  # a call raised: a model that goes on all the same may have taken another way
        self._local_graphs = 0  # on a GPU
        self._shared: set[int] = set()  # storages that several linked tensors lie in

    @functools.cached_property
    def trace(self) -> Trace:
        trace = Trace()
        trace.rows = [
            Row(op.name, None, tuple(op.shape), op.family, op.data_count, tuple(op.input_shapes[0]), op)
            for op in self.ops
        ]
        return trace

    def enter(self, x: Tensor) -> Op:
        """Link an input of the network."""
        op = Op(_INPUT, "input", (), {}, self.current)
        x._rectgrad = op  # type: ignore[attr-defined]
        return op

    def op_of(self, x: Tensor) -> Op | None:
        """The op that made a tensor; None for a weight or a constant."""
        if not x.requires_grad:
            return None
        op: Op | None = getattr(x, "_rectgrad", None)
        if op is not None and op.current is self.current:
            return op
        if op is None and x.is_leaf:
            return None
        raise Unlinked("made out of sight")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            return func(*args, **(kwargs or {}))
        way = _WAYS.get(func) or way_of(func)
        try:
            return way[0](self, way[1], func, args, kwargs or {})
        except BaseException:
            self.failed = True
            raise

    def _refused(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> NoReturn:
        raise Unlinked(spec.name)

    def _attribute(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """What tells a linked tensor from another one."""
        if self.op_of(args[0]) is not None:
            raise Unlinked(func.__self__.__name__)
        return self._constant(spec, func, args, kwargs, writes=False)

    def _step(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A linear step whose one data tensor is its first argument."""
        source = self._source(args, kwargs)
        if source is None:
            return self._any(spec, func, args, kwargs)
        x, family = args[0], spec.family
        assert family is not None
        op = Op(spec, family, (_FIRST, *args[1:]), kwargs, self.current)
        op.step = step = LINEAR_STEPS[family].of(op, x)
        if step is None:
            return self._any(spec, func, args, kwargs)
        _set_grad_enabled(False)
        try:
            y = func(*args, **kwargs)
        finally:
            _set_grad_enabled(True)
        op.input_shapes, op.shape = (x.shape,), y.shape
        if self.current.carries:
            step.made(op, y)
        return self._link(op, (source,), y)

    def _rectifier(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        source = self._source(args, kwargs)
        if source is None:
            return self._any(spec, func, args, kwargs)
        others, named, inplace = (
            out_of_place(spec, args, kwargs) if kwargs or len(args) > 1 else (args, kwargs, False)
        )
        x, family, inplace = args[0], spec.family, inplace or spec.writes
        assert family is not None
        op = Op(spec, family, (_FIRST, *others[1:]), named, self.current)
        if family == "clamp":
            op.family = family = ops.refine("clamp", spec.name, op.argument)
            if family not in ops.RECTIFIERS:
                return self._any(spec, func, args, kwargs)
        keep = self.keeps[family]
        if inplace:
            self._overwrite(x, source)
        if keep.inputs:
            op.inputs = (x.detach().clone() if inplace else x.detach(),)
        _set_grad_enabled(False)
        try:
            y = func(*args, **kwargs)
        finally:
            _set_grad_enabled(True)
        op.shape = y.shape
        op.input_shapes, op._output = (op.shape,), y.detach()
        op.versions = _versions(op) if keep.inputs else (y._version,)
        return self._link(op, (source,), y)

    def _sum(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """x + y of one shape: what arrives goes to both."""
        if kwargs or spec.name != "add" or len(args) != 2 or not _alike(*args) or not undisturbed():
            return self._any(spec, func, args, kwargs)
        x, y = args
        sources = self.op_of(x), self.op_of(y)
        if None in sources:
            return self._any(spec, func, args, kwargs)
        if spec.writes:
            self._overwrite(x, sources[0])
        op = Op(spec, "add", (_FIRST, Slot(1)), kwargs, self.current)
        op.back, op.data_count = to_both, 2
        op.input_shapes, op.shape = (x.shape, y.shape), x.shape
        return self._link(op, sources, _without_graph(func, args, kwargs))

    def _source(self, args: tuple, kwargs: dict) -> Op | None:
        """The op that made the first argument, if that is certainly the only one that is data."""
        x = args[0] if args else None
        op: Op | None = getattr(x, "_rectgrad", None)
        if op is None or op.current is not self.current or type(x) is not Tensor or not undisturbed():
            return None
        for value in args:
            if type(value) not in _QUIET and value is not x and _perhaps_data(value):
                return None
        for value in kwargs.values():
            if type(value) not in _QUIET and _perhaps_data(value):
                return None
        return op

    def _link(self, op: Op, sources: Sources, y: Tensor) -> Tensor:
        op.sources = sources
        for source in sources:
            source.readers += 1  # type: ignore[union-attr]
        y.requires_grad_()
        y._rectgrad = op  # type: ignore[attr-defined]
        self.ops.append(op)
        return y

    def _any(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """Any call that may be linked, by a graph of its own."""
        args_, kwargs_, inplace = out_of_place(spec, args, kwargs)
        data: list[Tensor] = []
        slots = tuple([self._slot(a, data) for a in args_])
        named = {k: self._slot(v, data) for k, v in kwargs_.items()}
        writes = spec.writes or inplace
        if not data:
            return self._constant(spec, func, args, kwargs, writes)
        if spec.family is None and spec.name not in _LINKABLE:
            return self._flat(spec, func, args, kwargs, writes)
        op = Op(spec, spec.family or "", slots, named, self.current)
        op.data_count = len(data)
        _check(op, writes)
        sources = tuple([self.op_of(x) for x in data])
        if not writes and op.family not in self.keeps:
            found = _directly(op, data)
            if found is not None:
                y, op.back, needed = found
                op.needed = tuple([x.detach() for x in needed])
                op.versions = _versions(op) if needed else ()
                op.input_shapes, op.shape = tuple([x.shape for x in data]), y.shape
                self._note_sharing(y, data)
                return self._link(op, sources, y)
        if writes:
            self._overwrite(data[0], sources[0])
        self._local_graphs += data[0].is_cuda
        if self._local_graphs > MOST_LOCAL_GRAPHS:
            raise Unlinked("too many calls without a closed form")
        leaves = tuple([(x.detach().clone() if writes else x.detach()).requires_grad_() for x in data])
        result = op.call(*leaves)
        for x, leaf in zip(data, leaves, strict=True):
            if result is leaf:
                return x
        op.input_shapes, op._leaves = tuple([x.shape for x in data]), leaves
        if type(result) is Tensor:
            return self._local(op, sources, result, data[0] if writes else None)
        if not isinstance(result, (tuple, list)) or writes or not all(type(r) is Tensor for r in result):
            raise Unlinked(spec.name)
        return type(result)([self._local(_another(op), sources, r, None) for r in result])

    def _local(self, op: Op, sources: Sources, result: Tensor, target: Tensor | None) -> Tensor:
        """Link one result of a call that has a graph of its own. target: what it is written on."""
        if not result.requires_grad:
            return result
        op._local, op.shape = result, result.shape
        y = result.detach()
        if target is not None:
            y = _without_graph(target.copy_, (y,), {})
        else:
            self._note_sharing(y, op._leaves)
        if op.family in self.keeps:
            keep = self.keeps[op.family]
            op._output = y.detach() if keep.output else None
            op.inputs = tuple([x.detach() for x in op._leaves]) if keep.inputs else ()
            op.versions = _versions(op)
        return self._link(op, sources, y)

    def _note_sharing(self, y: Tensor, data: Sequence[Tensor]) -> None:
        storage = storage_of(y)
        if any(storage_of(x) == storage for x in data):
            self._shared.add(storage)

    def _flat(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, writes: bool) -> Any:
        """A call that has no gradient: its result is an answer, whole numbers, or new values."""
        if writes or "out" in kwargs:
            raise Unlinked(spec.name)
        result = _without_graph(func, args, kwargs)
        whole = type(result) is Tensor and not (result.is_floating_point() or result.is_complex())
        if whole or spec.name in _NEW or type(result) in (bool, int, float, str):
            return result
        raise Unlinked(spec.name)

    def _slot(self, value: Any, data: list[Tensor]) -> Any:
        """Data tensors become slots, weights lose their gradient."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is Tensor or kind is Parameter:
            if self.op_of(value) is None:
                return value.detach() if value.requires_grad else value
            data.append(value)
            return Slot(len(data) - 1)
        if kind is list or kind is tuple:
            return kind([self._slot(v, data) for v in value])
        if isinstance(value, (Tensor, tuple, list, dict)) and kind is not torch.Size:
            raise Unlinked(f"an argument of type {kind.__name__}")
        return value

    def _constant(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, writes: bool) -> Any:
        """A call that does not depend on the input, so that its result asks for no gradient."""
        if "out" in kwargs or (writes and not self._writable(args[0] if args else kwargs.get("input"))):
            raise Unlinked(spec.name)
        return _without_graph(func, args, kwargs)

    def _writable(self, target: Any) -> bool:
        """Not so the model's and the caller's tensors: a tape keeps copies of them."""
        plain = type(target) is Tensor and not target.requires_grad and self.keeper is not None
        return plain and not self.keeper.owns(storage_of(target))  # type: ignore[union-attr]

    def _overwrite(self, x: Tensor, source: Op | None) -> None:
        """Before a linked tensor is written: nobody else may see it, and its maker's record keeps a copy."""
        storage = storage_of(x)
        if source is None or source.family == "input" or x._is_view() or storage in self._shared:
            raise Unlinked("an in-place call on shared values")
        if source._output is not None and storage_of(source._output) == storage:
            check_intact(source)
            source._output = source._output.clone()
            source.versions = _versions(source)


Way = Callable[[LinkedTape, ops.Spec, Any, tuple, dict], Any]
_WAYS: dict[Any, tuple[Way, ops.Spec]] = {}


def way_of(func: Any) -> tuple[Way, ops.Spec]:
    """How a linked tape meets a call of a function."""
    way = _WAYS.get(func)
    if way is None:
        spec = ops.lookup(func)
        way = _WAYS[func] = _way(func, spec), spec
    return way


def _way(func: Any, spec: ops.Spec) -> Way:
    if spec.name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if spec.name == "__get__":
            return asked if name in _ASKED else LinkedTape._attribute
        return LinkedTape._refused
    if spec.silent:
        return asked
    if spec.family is None and composite(func) is not None and spec.name not in _LINKABLE:
        return inside
    if spec.family in LINEAR_STEPS and spec.name not in ("convolution", "_convolution"):
        return LinkedTape._step
    if spec.family in ops.RECTIFIERS or spec.family == "clamp":
        return LinkedTape._rectifier
    return LinkedTape._sum if spec.family == "add" else LinkedTape._any


def _perhaps_data(value: Any) -> bool:
    return value.requires_grad if type(value) is Tensor else isinstance(value, Tensor)


def _without_graph(func: Any, args: tuple, kwargs: dict) -> Any:
    enabled = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        _set_grad_enabled(enabled)


def to_both(R: Tensor) -> tuple[Tensor, Tensor]:
    return R, R


def _alike(x: Any, y: Any) -> bool:
    if type(x) is not Tensor or type(y) is not Tensor:
        return False
    return x.shape == y.shape and x.dtype is y.dtype and x.device == y.device


def _check(op: Op, writes: bool) -> None:
    """No call is linked whose rule would not be that of a tape."""
    if op.family in ops.REFINED:
        op.family = ops.refine(op.family, op.name, op.argument)
    known = op.name in _LINKABLE or op.family in ops.FAMILIES
    trains = op.name == "instance_norm" or (
        op.family == "batch_norm" and updates(op.spec, op.args, op.kwargs)
    )
    unlike = not undisturbed() or "out" in op.kwargs or op.family in ops.RECTIFIERS
    if not known or trains or unlike or (writes and (not op.args or type(op.args[0]) is not Slot)):
        raise Unlinked(op.name)


def _directly(op: Op, data: list[Tensor]) -> Found:
    """The result without a graph, where the way back has a closed form."""
    if op.name not in DIRECT:
        return None
    _set_grad_enabled(False)
    try:
        found = direct(op, data)
    finally:
        _set_grad_enabled(True)
    if found is not None and any(found[0] is x for x in data):
        return None
    return found


def _another(op: Op) -> Op:
    """For each of several results of a call one."""
    other = copy.copy(op)
    other.facts = {}
    return other


def _versions(op: Op) -> tuple[int, ...]:
    return tuple([x._version for x in op.held()])


def check_intact(op: Op) -> None:
    """What a record keeps of a call was not written since."""
    if op.versions and op.versions != _versions(op):
        raise Unlinked("a record was overwritten")


def linkable(inputs: Sequence[Tensor]) -> bool:
    """Whether nothing around a call stands in the way of a linked pass."""
    return (
        all(type(x) is Tensor and x.layout is torch.strided for x in inputs)
        and not autocasts()
        and unsurrounded()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.is_anomaly_enabled()
    )
