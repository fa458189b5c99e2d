"""The engine: torch calls of a forward pass are seen, recorded, and given a rule for the way back.

A `TorchFunctionMode` sees every torch call of its thread, so it does not matter how a model spells an op.
Nothing is set, replaced or written on the model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rectgrad import ops
from rectgrad.engine import graph
from rectgrad.engine.calls import (
    NOTHING,
    RECURRENT,
    asked,
    autocasts,
    cloned,
    differentiable,
    identity_hooks,
    out_of_place,
    same,
    surroundings,
    undisturbed,
    unsurrounded,
    updates,
    writable,
)
from rectgrad.engine.op import (
    Bridge,
    BridgeInPlace,
    BridgeStep,
    Current,
    Keep,
    Op,
    Overwrite,
    Rules,
    Slot,
    bridged,
    fill,
    first,
    op_of,
    storage_of,
)
from rectgrad.engine.preserve import Keeper
from rectgrad.engine.trace import Row, Trace, calling_function, calling_module
from rectgrad.kernels.linear_ops import LINEAR_STEPS
from rectgrad.ops.composite import composite, decompositions, inside

_ALL = Keep()
_LOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_STATISTICS = ("running_mean", "running_var")
_SPECIAL = frozenset((*_LOOKS, *RECURRENT, "instance_norm", "convolution", "_convolution"))
_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_FIRST = Slot(0)
_VALUELESS = ops.ROUTING | set(_LOOKS)  # their gradient asks for no values, and some are views


class Tape(TorchFunctionMode):
    """One forward pass. `families`: what to record (None: all); `keeps`: what of a family's calls its rule
    reads, where that is not all; `decompose`: families to see the inside of."""

    def __init__(
        self,
        families: Collection[str] | None = None,
        keeps: Mapping[str, Keep] | None = None,
        decompose: Collection[str] = ("attention", "glu"),
    ) -> None:
        super().__init__()
        self.families, self.keeps, self.decompose = families, keeps or {}, decompose
        self.keeper: Keeper | None = None  # of the model's tensors, where they are to stay as they were
        self.foreign_leaves = False  # leaves that require gradients are weights: the input is none of them
        self.named = True  # whether anybody will ask in which layer a call was
        self.current = Current()
        self.ops: list[Op] = []
        self.trace = Trace()
        self._holders: dict[int, list[Op]] = {}
        self._written = graph.Written()
        self._borrowed: set[int] = set()  # storages of the model's that were written, and will be put back
        # Shared by all tapes of a kind, so no method of one.
        seen = None if families is None else frozenset(families)
        self._ways = _WAYS.setdefault((seen, frozenset(decompose)), {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way = self._ways.get(func)
        if way is None:
            spec = ops.lookup(func)
            way = self._ways[func] = self._way(func, spec), spec
        return way[0](self, way[1], func, args, kwargs or {})

    def _way(self, func: Any, spec: ops.Spec) -> Way:
        """How calls of a function are met. The quick ways are for what is plain to see; what is not, they
        hand over to `_slowly`."""
        if spec.silent:
            return asked
        if spec.name == "__get__":
            return Tape._transposed
        if spec.family is None and composite(func) is not None:
            return inside
        if spec.name in _SPECIAL or spec.family in self.decompose:
            return Tape._slowly
        recorded = self.families is None or spec.family in self.families
        if recorded and spec.family in LINEAR_STEPS:
            return Tape._step
        if spec.family in ops.RECTIFIERS or spec.family == "clamp":
            return Tape._rectifier
        writes = spec.writes or "inplace" in spec.names
        return Tape._slowly if writes or (recorded and spec.family is not None) else Tape._plainly

    def _transposed(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        self.trace.turned = True
        return func(self._weight(args[0]), *args[1:])

    def _step(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A linear step whose one data tensor is its first argument: nearly all are."""
        if not (args and _is_data(args[0]) and undisturbed()) or self._borrowed or _has_data(args, kwargs):
            return self._slowly(spec, func, args, kwargs)
        x, family = args[0], spec.family
        assert family is not None
        op = Op(spec, family, (_FIRST, *args[1:]), kwargs, self.current)
        if family == "conv":
            op.sources = (op_of(x.grad_fn),)
            if not self._wanted(op):
                return self._plainly(spec, func, args, kwargs)
        step = LINEAR_STEPS[family].of(op, x)
        if step is None:
            return self._slowly(spec, func, args, kwargs)
        result = bridged(BridgeStep, op, step, self.keeps.get(family, _ALL), x)
        self._note(op, x.shape)
        return result

    def _rectifier(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """The same for rectifiers."""
        if not (args and _is_data(args[0]) and undisturbed()) or self._borrowed or _has_data(args, kwargs):
            return self._slowly(spec, func, args, kwargs)
        x, named, inplace = args[0], kwargs, spec.writes
        if "inplace" in kwargs:
            named = {k: v for k, v in kwargs.items() if k != "inplace"}
            inplace = kwargs["inplace"] or inplace
        assert spec.family is not None
        op = Op(spec, spec.family, (_FIRST, *args[1:]), named, self.current)
        if spec.family == "clamp":
            op.family = ops.refine("clamp", spec.name, op.argument)
        if len(args) > spec.at.get("inplace", 99):
            return self._slowly(spec, func, args, kwargs)
        if not self._wanted(op):
            if inplace and (spec.name not in ops.SAME_IN_PLACE or x._is_view()):
                return self._slowly(spec, func, args, kwargs)
            if inplace:
                self._protect(x)
            result = func(*args, **kwargs)
            self._enter(spec, result, [x])
            return result
        if not inplace:
            result = bridged(Bridge, op, self.keeps.get(op.family, _ALL), x)
        elif self._may_overwrite(op, x):
            self._protect(x)
            result = bridged(BridgeInPlace, op, lambda: func(*args, **kwargs), x)
        else:
            return self._slowly(spec, func, args, kwargs)
        self._note(op, x.shape)
        return result

    def _plainly(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call that needs no more than to be made: nothing is recorded or written."""
        if not torch.is_grad_enabled() or not unsurrounded() or "out" in kwargs or self._borrowed:
            return self._slowly(spec, func, args, kwargs)
        if spec.family == "batch_norm" and updates(spec, args, kwargs):
            return self._slowly(spec, func, args, kwargs)
        data: list[Tensor] = []
        args = tuple([a if type(a) in _ATOMS else self._bare(a, data) for a in args])
        if kwargs:
            kwargs = {k: v if type(v) in _ATOMS else self._bare(v, data) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        if data:
            self._enter(spec, result, data)
        return result

    def _slowly(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """Any call."""
        if not torch.is_grad_enabled():
            return self._without_grad(spec, func, args, kwargs)
        if self._borrowed and spec.name not in _VALUELESS:
            written = spec.writes or "inplace" in spec.names
            args = (*args[:written], *(self._own(a) for a in args[written:]))
            kwargs = {k: v if k == "out" else self._own(v) for k, v in kwargs.items()}
        data: list[Tensor] = []
        args = tuple([self._prepare(a, data) for a in args])
        kwargs = {k: self._prepare(v, data) for k, v in kwargs.items()} if kwargs else kwargs
        args, kwargs = self._own_statistics(spec, args, kwargs)
        return self._dispatch(spec, func, args, kwargs, data)

    def _bare(self, value: Any, data: list[Tensor]) -> Any:
        """As `_prepare`, with the tensors themselves in their places."""
        kind = type(value)
        if kind is tuple or kind is list:
            if _ATOMS.issuperset(map(type, value)):
                return value
            return kind([self._bare(v, data) for v in value])
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad and (value := self._weight(value)).requires_grad:
            data.append(value)
            return value
        return value.clone() if value.is_inference() else value

    def _prepare(self, value: Any, data: list[Tensor]) -> Any:
        """Data tensors become slots; weights lose their gradient, so that to require one means to depend on
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
        """Copies of what lies in a storage that will be put back before the gradient is taken."""
        if isinstance(value, Tensor):
            return value.clone() if storage_of(value) in self._borrowed else value
        if type(value) in (list, tuple):
            return type(value)([self._own(v) for v in value])
        return value

    def _weight(self, x: Tensor) -> Tensor:
        """A weight without its gradient; anything else as it is."""
        if not x.requires_grad or not x.is_leaf:  # a parameter is a leaf, wherever it can be
            return x
        return x.detach() if self.foreign_leaves or isinstance(x, Parameter) else x

    def _dispatch(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, data: list[Tensor]) -> Any:
        args, kwargs, inplace = out_of_place(spec, args, kwargs)
        op = self._op(spec, args, kwargs, data, inplace or spec.writes)
        if op is None:
            return self._native(spec, func, args, kwargs, data, inplace)
        if op.family in self.decompose:
            op.inputs = tuple(data)
            with self:
                return decompositions[op.family](op)
        if not (spec.writes or inplace):
            return self._bridge(op, data)
        target = fill(args[0] if args else kwargs["input"], data)
        alone = len(data) == 1 and target is data[0] and not torch.is_autocast_enabled(target.device.type)
        if alone and self._may_overwrite(op, target):
            self._protect(target)
            whole, named = fill(args, data), {"inplace": True} if inplace else {}
            return self._bridge(op, data, lambda: func(*whole, **kwargs, **named))
        result = self._bridge(op, data)
        self._protect(target)
        written = Overwrite.apply(target, result)
        if written._is_view():
            self._written.note(written)
        return written

    def _op(self, spec: ops.Spec, args: tuple, kwargs: dict, data: list[Tensor], writes: bool) -> Op | None:
        """The record of this call, if it depends on the input and its family is wanted. In-place rectifiers
        nearly always are: torch derives some of them from their output, with other last bits."""
        if not data or spec.family is None or "out" in kwargs:
            return None
        op = Op(spec, spec.family, args, kwargs, self.current)
        if spec.family in ops.REFINED:
            op.family = ops.refine(spec.family, spec.name, op.argument)
        if len(data) > 1 and op.family in ops.OF_ONE:
            return None
        op.data_count = len(data)
        if op.family == "conv":
            op.sources = tuple([op_of(x.grad_fn) for x in data])
        if writes and op.family in ops.RECTIFIERS:
            whole = spec.name in ops.SAME_IN_PLACE and not data[0]._is_view()
            return op if not whole or self._wanted(op) else None
        return op if self._wanted(op) else None

    def _wanted(self, op: Op) -> bool:
        if self.families is not None and op.family not in self.families:
            return op.family in self.decompose
        keep = self.keeps.get(op.family)
        return keep is None or keep.concerns is None or keep.concerns(op)

    def _may_overwrite(self, op: Op, target: Tensor) -> bool:
        """Whether an in-place op can run as it is: nobody asks for its input, and it is all of a tensor."""
        keep = self.keeps.get(op.family)
        return keep is not None and not keep.inputs and not target._is_view() and not target.is_leaf

    def _bridge(self, op: Op, data: Sequence[Tensor], in_place: Callable[[], Any] | None = None) -> Any:
        keep, kind = self.keeps.get(op.family, _ALL), LINEAR_STEPS.get(op.family)
        step = kind.of(op, data[0]) if kind is not None and in_place is None and _is_step(op) else None
        with NOTHING if unsurrounded() else identity_hooks():
            if in_place is not None:
                result = bridged(BridgeInPlace, op, in_place, *data)
            elif step is not None:
                result = bridged(BridgeStep, op, step, keep, *data)
            else:
                result = bridged(Bridge, op, keep, *data)
        if type(result) is tuple and op.result_type not in (tuple, list):
            result = op.result_type(result)
        self._note(op, op.input_shapes[0])
        return result

    def _note(self, op: Op, source: tuple[int, ...]) -> None:
        """Enter an op that ran."""
        if self.named:
            op.module = calling_module(__file__)
        self.ops.append(op)
        self.trace.rows.append(Row(op.name, op.module, op.shape, op.family, op.data_count, source, op))
        for x in op.held():
            self._holders.setdefault(storage_of(x), []).append(op)

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
        args = fill(args, data)
        kwargs = {k: fill(v, data) for k, v in kwargs.items()} if kwargs else {}
        if inplace:
            kwargs["inplace"] = True
        self._before_write(spec, args, kwargs, inplace)
        if spec.name in _LOOKS and data and data[0].grad_fn is not None:
            graph.mark_hooked(data[0])
        with surroundings(spec.name, args, data):
            result = func(*args, **kwargs)
        if data:
            self._enter(spec, result, data)
        return result

    def _enter(self, spec: ops.Spec, result: Any, data: list[Tensor]) -> None:
        """A row for a call that is not recorded."""
        if spec.name in ops.BY_HAND:
            self.trace.by_hand[spec.name] = None
        if isinstance(result, (Tensor, tuple, list)) and differentiable(result):
            output, source = first(result), tuple(data[0].shape)
            module = calling_module(__file__) if self.named else None
            self.trace.rows.append(
                Row(spec.name, module, tuple(output.shape), spec.family, len(data), source)
            )
            if spec.family in ops.RECTIFIERS or spec.family == "clamp":
                output.register_hook(self.current.look)  # its zeros may hide an infinity

    def _without_grad(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call while gradients are off. An activation here is one whose rule will never run."""
        if function := calling_function():
            row = Row(spec.name, calling_module(), (), spec.family, 0, function=function)
            self.trace.hidden.append(row)
        self._before_write(spec, args, kwargs, out_of_place(spec, args, kwargs)[2])
        args, kwargs = self._own_statistics(spec, args, kwargs)
        with writable(args):
            return func(*args, **kwargs)

    def _own_statistics(self, spec: ops.Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Running statistics as copies: in training mode the layer would update the model's own."""
        if (
            spec.family not in ("batch_norm", "norm")
            or self.keeper is None
            or not updates(spec, args, kwargs)
        ):
            return args, kwargs
        own = dict.fromkeys(_STATISTICS, cloned)
        named = zip(spec.names, args, strict=False)
        args = (*(own.get(name, same)(a) for name, a in named), *args[len(spec.names) :])
        return args, {k: own.get(k, same)(v) for k, v in kwargs.items()}

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
            storage = storage_of(target)
            for op in self._holders.pop(storage, ()):
                op.unshare(storage)
            if target.grad_fn is None:  # no data: perhaps the model's own, or the caller's
                for op in self.ops:
                    op.unshare(storage)
                if self.keeper is not None and self.keeper.before_write(storage):
                    self._borrowed.add(storage)


Way = Callable[[Tape, ops.Spec, Any, tuple, dict], Any]
_WAYS: dict[Any, dict[Any, tuple[Way, ops.Spec]]] = {}


def _is_step(op: Op) -> bool:
    """Whether an op's one data tensor is its first argument, and of the type that its weights are."""
    return op.data_count == 1 and bool(op.args) and type(op.args[0]) is Slot and not autocasts()


def _is_data(x: Any) -> bool:
    """Whether an argument certainly depends on the input."""
    return type(x) is Tensor and x.requires_grad and not x.is_leaf


def _has_data(args: tuple, kwargs: dict) -> bool:
    """Whether a call has data besides its first argument, or what cannot be used as it is."""
    for value in (*args[1:], *kwargs.values()) if kwargs else args[1:]:
        if type(value) is Parameter or type(value) is Tensor:
            if (value.requires_grad and type(value) is Tensor) or value.is_inference():
                return True
        elif type(value) not in _ATOMS and isinstance(value, Tensor):
            return True
    return False


@contextlib.contextmanager
def propagate(rules: Rules) -> Iterator[Trace]:
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
    tape = Tape(families=frozenset(rules))
    tape.current.rules = dict(rules)
    with tape:
        yield tape.trace
    if rules and not tape.ops:
        met = sorted({row.family or row.name for row in tape.trace.rows})
        warnings.warn(
            f"no rule will act: none of {', '.join(rules)} was met, only {', '.join(met) or 'nothing'}",
            stacklevel=3,
        )


def _check(rules: Rules) -> None:
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules must map op families to functions (op, R), not {rules!r}")
    known = (set(ops.FAMILIES) - {"clamp"}) | ops.RECTIFIERS
    unknown = sorted(set(rules) - known)
    if unknown:
        raise ValueError(f"unknown op family {unknown[0]!r}; families are {', '.join(sorted(known))}")
    for family, rule in rules.items():
        if not isinstance(rule, Callable):  # type: ignore[arg-type]
            raise TypeError(f"the rule for {family!r} must be a function (op, R), not {rule!r}")
