"""What a model calls in a pass, noted once and followed from then on.

A model that is asked again mostly calls the same functions with the same weights and settings on what it has
made of its input. Then nothing needs to be recorded anew: it is enough to look, call by call, that it does,
and to keep what the way back reads. A pass that is not as noted raises `Unlinked`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from rectgrad import ops
from rectgrad.calls import asked, autocasts, undisturbed
from rectgrad.composite import inside
from rectgrad.direct import direct
from rectgrad.linked import LinkedTape, Unlinked, to_both, way_of
from rectgrad.op import Keep, Op, Slot, fill

_ATOMS = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.Size}
)
# A tensor that stands for another one has no answer of its own.
_WHERE_IT_LIES = frozenset({"data_ptr", "storage_offset"})
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_NOTHING: dict[str, Any] = {}
# As `undisturbed` asks them.
_enabled: Callable[[], bool] = torch.is_grad_enabled
_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


class Call:
    """A noted call. In `args` and `kwargs`, tensors that the pass made are slots with their number.

    op: what it was linked as; None where it let its input through. simple: a step or an activation of one
    tensor, and `run` is what it does to it. saves_input, saves_output: its rule reads them. in_closed_form:
    see direct.py. returns: the tensor that it wrote on and gave back, -1 where it made a new one. done:
    tensors that no later call reads.
    """

    def __init__(self, func: Any, args: tuple, kwargs: dict, op: Op | None) -> None:
        self.func, self.args, self.kwargs, self.op = func, args, kwargs, op
        self.names, self.values = list(kwargs), tuple(kwargs.values())
        self.rest = args[1:]
        all_values = list(_flat((args, self.values)))
        self.numbers = [int(value) for value in all_values if type(value) is Slot]
        self.weights = [value for value in all_values if isinstance(value, Tensor)]
        self.of_one = len(self.numbers) == 1 and bool(args) and type(args[0]) is Slot
        self.source = self.numbers[0] if self.of_one else -1
        self.saves_input = op is not None and bool(op.inputs)
        self.saves_output = op is not None and op._output is not None
        self.in_closed_form = op is not None and op.back is not None and op.back is not to_both
        activates = op is not None and op.family in ops.RECTIFIERS
        # Equal tensors of several numbers cannot be taken for the same one.
        told_apart = all(weight.numel() != 1 for weight in self.weights)
        self.simple = self.of_one and op is not None and told_apart and (op.step is not None or activates)
        self.run = _shortcut(func, self.rest, kwargs)
        self.returns = -1
        self.done: tuple[int, ...] = ()

    def again(self, made: list[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Its result on the tensors that were made before it, and what the closed form of its way back reads
        if it has one."""
        if self.in_closed_form:
            return _directly(self, made)
        named = {name: fill(value, made) for name, value in self.kwargs.items()}
        return self.func(*fill(self.args, made), **named), ()


def _directly(call: Call, made: list[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    assert call.op is not None
    found = direct(call.op, [made[number] for number in call.numbers])
    if found is None:
        raise Unlinked("no closed form any more")
    y, _, needed = found
    return y, needed


def _shortcut(func: Any, rest: tuple, named: dict) -> Callable[[Tensor], Any]:
    """What the function does, without asking once more whether somebody wants to know of it."""
    if func is F.relu and not rest and named.keys() == {"inplace"}:
        return torch.relu_ if named["inplace"] else torch.relu
    if func is F.batch_norm and len(rest) == 2 and named.keys() == _NORM and not named["training"]:
        mean, variance, weight, bias = *rest, named["weight"], named["bias"]
        momentum, eps, cudnn = named["momentum"], named["eps"], torch.backends.cudnn.enabled
        norm = torch.batch_norm
        return lambda x: norm(x, weight, bias, mean, variance, False, momentum, eps, cudnn)
    if named:
        return lambda x: func(x, *rest, **named)
    return lambda x: func(x, *rest)


_NORM = {"weight", "bias", "training", "momentum", "eps"}


def _flat(value: Any) -> Iterator[Any]:
    if type(value) is tuple or type(value) is list:
        for each in value:
            yield from _flat(each)
    else:
        yield value


class Noting(LinkedTape):
    """A linked tape that notes its calls. `steady` as long as each of them is one that can be followed."""

    steady = True

    def __init__(self, keeps: Mapping[str, Keep], carries: bool = False) -> None:
        super().__init__(keeps, carries)
        self.calls: list[Call] = []
        self._numbers: dict[int, int] = {}  # of the tensor that an op made, by the op's id

    def enter(self, x: Tensor) -> Op:
        op = super().enter(x)
        self._numbers[id(op)] = len(self._numbers)
        return op

    def number_of(self, op: Op) -> int:
        """Of the tensor that it made."""
        return self._numbers[id(op)]

    def end(self, lasting: Collection[int]) -> None:
        """All calls are noted. lasting: tensors that are read after the last of them."""
        last = dict[int, int]()
        for at, call in enumerate(self.calls):
            last |= dict.fromkeys(call.numbers, at)
            if call.op is not None:
                last.setdefault(self._numbers[id(call.op)], at)
        for at, call in enumerate(self.calls):
            call.done = tuple(n for n in last if last[n] == at and n not in lasting)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            self.steady = False  # it is compiled, with what a linked tape does
            return super().__torch_function__(func, types, args, kwargs)
        way, spec = way_of(func)
        if self.over or way in (asked, inside):
            self.steady &= spec.name not in _WHERE_IT_LIES
            return super().__torch_function__(func, types, args, kwargs)
        noted, named = self._noted(tuple(args)), {k: self._noted(v) for k, v in (kwargs or {}).items()}
        before = len(self.ops)
        result = super().__torch_function__(func, types, args, kwargs)
        made = self.ops[before:]
        if len(made) == 1 and type(result) is Tensor:
            call = Call(func, noted, named, made[0])
            values = _flat((tuple(args), *(kwargs or {}).values()))
            given = zip(_flat((noted, *named.values())), values, strict=True)
            call.returns = next((n for n, x in given if type(n) is Slot and x is result), -1)
            self._numbers[id(made[0])] = len(self._numbers)
            self.steady &= _can_be_followed(call, made[0])
        else:  # it let its input through, as dropout does, or did something else
            call = Call(func, noted, named, None)
            self.steady &= not made and call.of_one and result is args[0]
        self.calls.append(call)
        return result

    def _noted(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is tuple or kind is list:
            noted = kind([self._noted(v) for v in value])
            return value if kind is tuple and all(map(is_, noted, value)) else noted
        if isinstance(value, Tensor):
            op = getattr(value, "_rectgrad", None)
            if op is not None and op.current is self.current:
                return Slot(self._numbers.get(id(op), -1))
            plain = (kind is Tensor or kind is Parameter) and value.layout is torch.strided
            self.steady &= plain and value.is_leaf
            return value
        self.steady = False
        return value

    def _overwrite(self, x: Tensor, source: Op | None) -> None:
        kept = source._output if source is not None else None
        super()._overwrite(x, source)
        if source is not None and source._output is not kept:
            self.steady = False  # a copy had to be kept of it


def _can_be_followed(call: Call, op: Op) -> bool:
    if any(_refers(weight) for weight in call.weights):
        return False
    # What these are depends on their numbers: see ops.refine and chains.mark_gates.
    if op.spec.family in ("clamp", "div", "mul") and any(weight.numel() == 1 for weight in call.weights):
        return False
    if op.step is not None or op.family in ops.RECTIFIERS:
        overwrites = op.spec.writes or any(value is True for value in (*call.rest, *call.values))
        return call.of_one and not (call.saves_input and overwrites)
    return op.back is not None


def _refers(weight: Tensor) -> bool:
    """Whether a weight may hold its model, which would then never go."""
    return bool(vars(weight) or weight._backward_hooks or weight._post_accumulate_grad_hooks)


class Following(LinkedTape):
    """A pass that should be as noted.

    made: its tensors by their numbers, as long as a later call will read them. kept: what the way back reads,
    in the order of `Op.held`.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__({})
        self.made: list[Any] = []
        self.kept: list[Tensor] = []
        self._coming = iter(calls)
        self._call: Call | None = next(self._coming, None)

    def enter(self, x: Tensor) -> Op:
        self.made.append(x)
        return super().enter(x)

    def finished(self) -> bool:
        return self._call is None and not self.failed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # At every call of a model, so it is written out. Equal numbers and the same tensors: where one of
        # several values is another tensor, to compare them raises, and the pass is not as noted either.
        if self.over:
            return func(*args, **(kwargs or _NOTHING))
        call = self._call
        if call is None or call.func is not func or not call.simple:
            return self._unlike(call, func, args, kwargs or {})
        try:
            made, x = self.made, args[0] if args else None
            if (
                x is not made[call.source]
                or args[1:] != call.rest
                or (kwargs or _NOTHING) != call.kwargs
                or not _enabled()
                or autocasts()
                or _hooks(False) is not None
            ):
                raise Unlinked("a call that is not as noted")
            self._call = next(self._coming, None)
            return self._made_of_one(call, x)
        except BaseException:
            self.failed = True
            raise

    def _unlike(self, call: Call | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call that is not one function of one tensor."""
        way, spec = way_of(func)
        if way is asked and spec.name not in _WHERE_IT_LIES:
            return func(*args, **kwargs)
        if way is inside:
            return inside(self, spec, func, args, kwargs)
        try:
            if call is None or call.func is not func or not undisturbed():
                raise Unlinked("another call than noted")
            if not self._same(args, call.args) or list(kwargs) != call.names:
                raise Unlinked("a call that is not as noted")
            if not self._same(tuple(kwargs.values()), call.values):
                raise Unlinked("a call that is not as noted")
            self._call = next(self._coming, None)
            if call.op is None:  # it lets its input through
                return args[0]
            return self._made_of_many(call, args, kwargs)
        except BaseException:
            self.failed = True
            raise

    def _made_of_one(self, call: Call, x: Tensor) -> Tensor:
        _set_grad_enabled(False)
        try:
            return self._kept(call, x, call.run(x))
        finally:
            _set_grad_enabled(True)

    def _made_of_many(self, call: Call, args: tuple, kwargs: dict) -> Tensor:
        _set_grad_enabled(False)
        try:
            if call.in_closed_form:
                y, needed = _directly(call, self.made)
                self.kept += needed
            else:
                y = call.func(*args, **kwargs)
            return self._kept(call, self.made[call.source] if call.of_one else None, y)
        finally:
            _set_grad_enabled(True)

    def _kept(self, call: Call, x: Any, y: Tensor) -> Tensor:
        """What a call made of x: what is read of it later stays, what nobody reads any more goes."""
        if call.saves_input:
            self.kept.append(x)
        if call.saves_output:
            self.kept.append(y)
        self.made.append(y.requires_grad_())
        for number in call.done:
            self.made[number] = None
        return y

    def _same(self, value: Any, noted: Any) -> bool:
        kind = type(noted)
        if kind is Slot:
            return value is self.made[noted]
        if value is noted:
            return True
        if kind is not type(value):
            return False
        if kind is tuple or kind is list:
            return len(value) == len(noted) and all(map(self._same, value, noted))
        return kind in _ATOMS and bool(value == noted)


class Rehearsing(Following):
    """A pass that should be as noted, whose calls are not run: what they make is made elsewhere. Stand-ins
    that lie as it does take its place. A call that would read their values is not a noted one.
    """

    def __init__(self, calls: Sequence[Call], stand_ins: Sequence[Any]) -> None:
        super().__init__(calls)
        self._stand_ins = stand_ins  # by the numbers of the tensors; none for the inputs
        self._given: dict[int, weakref.ref[Tensor]] = {}

    def _made_of_one(self, call: Call, x: Any) -> Tensor:
        if _dispatch_modes():
            raise Unlinked("somebody looks at what torch does")
        made, number = self.made, len(self.made)
        if call.returns >= 0:
            y = made[call.returns]
            self._given[number] = self._given[call.returns]
        else:
            y = self._stand_ins[number].detach().requires_grad_()
            self._given[number] = weakref.ref(y)
        made.append(y)
        for read in call.done:
            made[read] = None
        return y

    def _made_of_many(self, call: Call, args: tuple, kwargs: dict) -> Tensor:
        return self._made_of_one(call, None)

    def held(self) -> dict[int, Tensor]:
        """Stand-ins that are there still, by their numbers."""
        found = ((number, ref()) for number, ref in self._given.items())
        return {number: x for number, x in found if x is not None}

    def give(self, number: int, values: Tensor) -> None:
        """It is no stand-in any more."""
        given = self._given[number]
        x = given()
        if x is not None:
            x.data = values
        self._given = {number: ref for number, ref in self._given.items() if ref is not given}


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
