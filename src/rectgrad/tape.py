"""The engine: torch calls of a forward pass are seen, recorded, and given a rule for the way back.

A `TorchFunctionMode` sees every torch call of its thread, so it does not matter how a model spells an op.
Nothing is set, replaced or written on the model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rectgrad import graph, ops
from rectgrad.composite import composite, decompositions
from rectgrad.op import (
    Bridge,
    BridgeInPlace,
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
from rectgrad.preserve import Keeper
from rectgrad.trace import Row, Trace, calling_function, calling_module

_ALL = Keep()
_LOOKS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_STATISTICS = ("running_mean", "running_var")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_SPECIAL = frozenset((*_LOOKS, *_RECURRENT, *ops.BY_HAND))


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
        self.current = Current()
        self.ops: list[Op] = []
        self.trace = Trace()
        self._holders: dict[int, list[Op]] = {}
        self._quick: dict[Any, str] = {}  # see _is_quick
        self._written = graph.Written()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spec = ops.lookup(func)
        if spec.silent:
            return func(*args, **kwargs)
        if spec.name == "__get__":  # a transpose
            self.trace.turned = True
            return func(self._weight(args[0]), *args[1:])
        if torch.is_grad_enabled() and self._is_quick(func, spec, args, kwargs):
            return self._plainly(spec, func, args, kwargs)
        if spec.family is None and (inside := composite(func)) is not None:
            with self:
                return inside(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._without_grad(spec, func, args, kwargs)
        return self._slowly(spec, func, args, kwargs)

    def _slowly(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        data: list[Tensor] = []
        args = tuple([self._prepare(a, data) for a in args])
        kwargs = {k: self._prepare(v, data) for k, v in kwargs.items()} if kwargs else kwargs
        args, kwargs = self._own_statistics(spec, args, kwargs)
        return self._dispatch(spec, func, args, kwargs, data)

    def _is_quick(self, func: Any, spec: ops.Spec, args: tuple, kwargs: dict) -> bool:
        """Whether a call needs no more than to be made: nothing is recorded or written."""
        quick = self._quick.get(func)
        if quick is None:
            quick = self._quick[func] = self._how_quick(func, spec)
        if quick == "batch_norm":
            return not _updates(spec, args, kwargs)
        return self._unconcerned(spec, args, kwargs) if quick == "conv" else quick == "yes"

    def _how_quick(self, func: Any, spec: ops.Spec) -> str:
        """yes, no, or of which kind a function is whose calls differ."""
        if spec.writes or "inplace" in spec.names or spec.name in _SPECIAL:
            return "no"
        if spec.family is None:
            return "no" if composite(func) else "yes"
        if spec.family == "conv" and self.families is not None:
            keep = self.keeps.get("conv")
            return "conv" if keep is not None and keep.concerns is not None else "no"
        if self.families is None or spec.family in self.families or spec.family in self.decompose:
            return "no"
        if spec.name == "batch_norm":
            return "batch_norm"
        return "no" if spec.family in ops.RECTIFIERS | ops.REFINED | {"batch_norm"} else "yes"

    def _unconcerned(self, spec: ops.Spec, args: tuple, kwargs: dict) -> bool:
        """A convolution that the family's rule has no business with."""
        if "transposed" in spec.names:
            return False
        op = Op(spec, "conv", args, kwargs, self.current)
        op.sources = tuple([op_of(a.grad_fn) for a in args[:1] if isinstance(a, Tensor)])
        concerns = self.keeps["conv"].concerns
        return concerns is not None and bool(args) and not concerns(op)

    def _plainly(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
        if "out" in kwargs or not _unsurrounded():
            return self._slowly(spec, func, args, kwargs)
        data: list[Tensor] = []
        args = tuple([self._bare(a, data) for a in args])
        kwargs = {k: self._bare(v, data) for k, v in kwargs.items()} if kwargs else kwargs
        result = func(*args, **kwargs)
        if data:
            self._enter(spec, result, data)
        return result

    def _bare(self, value: Any, data: list[Tensor]) -> Any:
        """As `_prepare`, with the tensors themselves in their places."""
        if isinstance(value, Tensor):
            if value.requires_grad and (value := self._weight(value)).requires_grad:
                data.append(value)
                return value
            return value.clone() if value.is_inference() else value
        if type(value) is tuple or type(value) is list:
            return type(value)([self._bare(v, data) for v in value])
        return value

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

    def _weight(self, x: Tensor) -> Tensor:
        """A weight without its gradient; anything else as it is."""
        weight = x.requires_grad and (isinstance(x, Parameter) or (self.foreign_leaves and x.is_leaf))
        return x.detach() if weight else x

    def _dispatch(self, spec: ops.Spec, func: Any, args: tuple, kwargs: dict, data: list[Tensor]) -> Any:
        args, kwargs, inplace = _out_of_place(spec, args, kwargs)
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
        if self._may_overwrite(op, target, data):
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

    def _may_overwrite(self, op: Op, target: Any, data: list[Tensor]) -> bool:
        """Whether an in-place op can run as it is: nobody asks for its input, and it is all of a tensor."""
        keep = self.keeps.get(op.family)
        alone = len(data) == 1 and target is data[0] and not target._is_view() and not target.is_leaf
        return (
            keep is not None
            and not keep.inputs
            and alone
            and not torch.is_autocast_enabled(target.device.type)
        )

    def _bridge(self, op: Op, data: list[Tensor], in_place: Callable[[], Any] | None = None) -> Any:
        op.module = calling_module(__file__)
        with _NOTHING if _unsurrounded() else identity_hooks():
            if in_place is not None:
                result = bridged(BridgeInPlace, op, in_place, *data)
            else:
                result = bridged(Bridge, op, self.keeps.get(op.family, _ALL), *data)
        if type(result) is tuple and op.result_type not in (tuple, list):
            result = op.result_type(result)
        self.ops.append(op)
        source = op.input_shapes[0]
        self.trace.rows.append(Row(op.name, op.module, op.shape, op.family, len(data), source, op))
        for x in op.held():
            self._holders.setdefault(storage_of(x), []).append(op)
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
        args = fill(args, data)
        kwargs = {k: fill(v, data) for k, v in kwargs.items()} if kwargs else {}
        if inplace:
            kwargs["inplace"] = True
        self._before_write(spec, args, kwargs, inplace)
        if spec.name in _LOOKS and data and data[0].grad_fn is not None:
            graph.mark_hooked(data[0])
        with _surroundings(spec.name, args, data):
            result = func(*args, **kwargs)
        if data:
            self._enter(spec, result, data)
        return result

    def _enter(self, spec: ops.Spec, result: Any, data: list[Tensor]) -> None:
        """A row for a call that is not recorded."""
        if spec.name in ops.BY_HAND:
            self.trace.by_hand[spec.name] = None
        if isinstance(result, (Tensor, tuple, list)) and _differentiable(result):
            output, source = first(result), tuple(data[0].shape)
            module = calling_module(__file__)
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
        self._before_write(spec, args, kwargs, _out_of_place(spec, args, kwargs)[2])
        args, kwargs = self._own_statistics(spec, args, kwargs)
        with _writable(args):
            return func(*args, **kwargs)

    def _own_statistics(self, spec: ops.Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Running statistics as copies: in training mode the layer would update the model's own."""
        if (
            spec.family not in ("batch_norm", "norm")
            or self.keeper is None
            or not _updates(spec, args, kwargs)
        ):
            return args, kwargs
        own = dict.fromkeys(_STATISTICS, _cloned)
        named = zip(spec.names, args, strict=False)
        args = (*(own.get(name, _same)(a) for name, a in named), *args[len(spec.names) :])
        return args, {k: own.get(k, _same)(v) for k, v in kwargs.items()}

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
            if self.keeper is not None:
                self.keeper.before_write(storage)


def _out_of_place(spec: ops.Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The call without its `inplace` flag, and whether it was set."""
    if "inplace" in kwargs:
        inplace = bool(kwargs["inplace"])
        return args, {k: v for k, v in kwargs.items() if k != "inplace"}, inplace
    if "inplace" in spec.names and spec.names.index("inplace") < len(args):
        at = spec.names.index("inplace")
        rest = dict(zip(spec.names[at + 1 :], args[at + 1 :], strict=False))
        return args[:at], {**rest, **kwargs}, bool(args[at])
    return args, kwargs, False


def _differentiable(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        result = result[0] if result else None
    return isinstance(result, Tensor) and result.requires_grad


def _unsurrounded() -> bool:
    """Whether nothing is to be kept from what is saved for the backward pass: see identity_hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _surroundings(name: str, args: tuple, data: list[Tensor]) -> Any:
    """What a call needs around it. Nearly always nothing."""
    needed = [_writable(args), identity_hooks()]
    if name in _RECURRENT and data and data[0].is_cuda:
        # cuDNN's recurrent networks have a backward pass in training mode alone.
        needed.append(torch.backends.cudnn.flags(enabled=False))
    if needed == [_NOTHING, _NOTHING]:
        return _NOTHING
    together = contextlib.ExitStack()
    for each in needed:
        together.enter_context(each)
    return together


_NOTHING = contextlib.nullcontext()


def _writable(args: tuple) -> Any:
    """Tensors made in inference mode are written in inference mode alone."""
    made_there = args and isinstance(args[0], Tensor) and args[0].is_inference()
    return torch.inference_mode() if made_there else _NOTHING


def _updates(spec: ops.Spec, args: tuple, kwargs: dict) -> bool:
    """Whether a normalisation may write its running statistics: `batch_norm` only in training mode."""
    if spec.name != "batch_norm" or "training" not in spec.names:
        return True
    at = spec.names.index("training")
    return bool(kwargs.get("training", args[at] if at < len(args) else False))


def _same(x: Any) -> Any:
    return x


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def identity_hooks() -> Any:
    """Checkpointing saves nothing and runs its function again in the backward pass, out of our sight:
    what is saved under its hooks is saved as it is instead."""
    if _unsurrounded():
        return _NOTHING
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


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
