"""What a model calls in a pass, noted once and followed from then on.

A model that is asked again mostly calls the same functions with the same weights and settings on what it has
made of its input. Then nothing needs to be recorded anew: it is enough to look, call by call, that it does,
and to keep what the way back reads. A pass that is not as noted raises `Unlinked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rectgrad import ops
from rectgrad.calls import asked, undisturbed
from rectgrad.composite import inside
from rectgrad.direct import DIRECT, direct
from rectgrad.linked import LinkedTape, Unlinked, way_of
from rectgrad.op import Keep, Op, Slot

_ATOMS = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.Size}
)
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_NOTHING: dict[str, Any] = {}


class Call:
    """A noted call. In `args` and `kwargs`, tensors that the pass made are slots with their number.

    op: what it was linked as; None where it let its input through. saves_input, saves_output: its rule reads
    them. in_closed_form: see direct.py.
    """

    def __init__(self, func: Any, args: tuple, kwargs: dict, op: Op | None) -> None:
        self.func, self.args, self.kwargs, self.op = func, args, kwargs, op
        self.names, self.values = list(kwargs), tuple(kwargs.values())
        self.rest = args[1:]
        all_values = list(_flat((args, self.values)))
        self.numbers = [int(value) for value in all_values if type(value) is Slot]
        self.weights = [value for value in all_values if isinstance(value, Tensor)]
        self.simple = len(self.numbers) == 1 and bool(args) and type(args[0]) is Slot
        self.saves_input = op is not None and bool(op.inputs)
        self.saves_output = op is not None and op._output is not None
        self.in_closed_form = op is not None and op.name in DIRECT and op.back is not None
        self.done: tuple[int, ...] = ()  # tensors that no later call reads


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

    def script(self, root: Op) -> tuple[list[Call], int]:
        """The calls, and the number of the tensor that `root` made."""
        number, last = self._numbers[id(root)], dict[int, int]()
        for at, call in enumerate(self.calls):
            last |= dict.fromkeys(call.numbers, at)
            if call.op is not None:
                last.setdefault(self._numbers[id(call.op)], at)
        for at, call in enumerate(self.calls):
            call.done = tuple(n for n in last if last[n] == at and n != number)
        return self.calls, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if way_of(func)[0] in (asked, inside):
            return super().__torch_function__(func, types, args, kwargs)
        noted, named = self._noted(tuple(args)), {k: self._noted(v) for k, v in (kwargs or {}).items()}
        before = len(self.ops)
        result = super().__torch_function__(func, types, args, kwargs)
        made = self.ops[before:]
        if len(made) == 1 and type(result) is Tensor:
            call = Call(func, noted, named, made[0])
            self._numbers[id(made[0])] = len(self._numbers)
            self.steady &= _can_be_followed(call, made[0])
        else:  # it let its input through, as dropout does, or did something else
            call = Call(func, noted, named, None)
            self.steady &= not made and call.simple and result is args[0]
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
            self.steady &= (kind is Tensor or kind is Parameter) and value.is_leaf
            return value
        self.steady = False
        return value

    def _overwrite(self, x: Tensor, source: Op | None) -> None:
        kept = source._output if source is not None else None
        super()._overwrite(x, source)
        if source is not None and source._output is not kept:
            self.steady = False  # a copy had to be kept of it


def _can_be_followed(call: Call, op: Op) -> bool:
    if op.step is not None:
        return call.simple
    if op.family in ops.RECTIFIERS:
        overwrites = op.spec.writes or any(value is True for value in (*call.rest, *call.values))
        return call.simple and not (call.saves_input and overwrites)
    return op.back is not None and (call.in_closed_form or op.family == "add")


class Following(LinkedTape):
    """A pass that should be as noted. `save` takes what the way back reads, in the order of `Op.held`.

    made: its tensors by their numbers, as long as a later call will read them.
    """

    def __init__(self, calls: Sequence[Call], save: Callable[[Tensor], None]) -> None:
        super().__init__({})
        self.made: list[Any] = []
        self._calls, self._at, self._save = calls, 0, save

    def enter(self, x: Tensor) -> Op:
        self.made.append(x)
        return super().enter(x)

    def finished(self) -> bool:
        return self._at == len(self._calls) and not self.failed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if self._at < len(self._calls):
                call = self._calls[self._at]
                if call.func is func:
                    self._at += 1
                    return self._followed(call, args, kwargs or _NOTHING)
            way, spec = way_of(func)
            if way is asked or way is inside:
                return way(self, spec, func, args, kwargs or {})
            raise Unlinked("another call than noted")
        except BaseException:
            self.failed = True
            raise

    def _followed(self, call: Call, args: tuple, kwargs: dict) -> Any:
        if not self._as_noted(call, args, kwargs) or not undisturbed():
            raise Unlinked("a call that is not as noted")
        op, made = call.op, self.made
        if op is None:
            return args[0]
        _set_grad_enabled(False)
        try:
            if call.in_closed_form:
                y = self._directly(op, [made[number] for number in call.numbers])
            else:
                y = call.func(*args, **kwargs)
            if call.saves_input:
                self._save(args[0])
            if call.saves_output:
                self._save(y)
        finally:
            _set_grad_enabled(True)
        made.append(y.requires_grad_())
        for number in call.done:
            made[number] = None
        return y

    def _directly(self, op: Op, data: list[Tensor]) -> Tensor:
        found = direct(op, data)
        if found is None:
            raise Unlinked("no closed form any more")
        y, _, needed = found
        for x in needed:
            self._save(x)
        return y

    def _as_noted(self, call: Call, args: tuple, kwargs: dict) -> bool:
        if call.simple:
            if not args or args[0] is not self.made[call.numbers[0]]:
                return False
            rest = args[1:]
            if len(rest) != len(call.rest):
                return False
            if not all(map(is_, rest, call.rest)) and not self._same(rest, call.rest):
                return False
        elif not self._same(args, call.args):
            return False
        if not kwargs:
            return not call.names
        values = kwargs.values()
        return list(kwargs) == call.names and (
            all(map(is_, values, call.values)) or self._same(tuple(values), call.values)
        )

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
