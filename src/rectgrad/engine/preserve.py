"""The model stays as it was found: what a call writes on it is restored, also after an error.

Attributes and the containers in them are copied beforehand, tensors only when they are about to be written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rectgrad.engine.torch_private import is_view, storage_of, tensors_in

LONGEST = 10_000  # members of a container that is looked into; a longer one is data, not state


class Snapshot:
    """What hangs on a model: its attributes, their containers' members, its submodules', its tensors."""

    def __init__(self, root: Any) -> None:
        # Dictionaries, and in one list each the lengths, keys and values of all of them: a copy of each would
        # be thousands of containers, and Python looks through new containers for garbage.
        self._dicts: list[dict] = []
        self._lengths: list[int] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._contents: list[tuple[Any, Any]] = []  # other containers, and copies of them
        self._empty: list[Any] = []  # containers, or what is never anything else than empty
        self._headers: list[Header] = []
        self._tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.lazy = False  # whether a tensor has no values yet
        self._met: set[int] = set()
        values: list[Any] = list(modules_in(root))
        while values:  # level by level: a model has tens of thousands of values, and few are worth a look
            values = self._below(values)

    def _below(self, values: list[Any]) -> list[Any]:
        """Remember what these values hold. Those in them that may hold more."""
        dicts: list[dict] = []
        inside: list[Any] = []
        for value in values:
            if id(value) not in self._met:
                self._met.add(id(value))
                self._take(value, dicts, inside)
        members = list(_all_values(dicts))
        self._dicts += dicts
        self._lengths += map(len, dicts)
        self._keys += itertools.chain.from_iterable(dicts)
        self._values += members
        if max(self._lengths[-len(dicts) :] if dicts else (), default=0) > LONGEST:
            members = list(_all_values(each for each in dicts if len(each) <= LONGEST))
        return self._worth_a_look(members) + self._worth_a_look(inside)

    def _worth_a_look(self, values: list[Any]) -> list[Any]:
        kinds = set(map(type, values))
        if kinds <= _CAN_BE_EMPTY:
            self._empty += itertools.filterfalse(None, values)
            values = list(filter(None, values))
        if not kinds.isdisjoint(_ATOMS):
            values = _without(_ATOMS, values)
        if tuple in kinds:
            inner = itertools.chain.from_iterable([value for value in values if type(value) is tuple])
            values = _without(_TUPLE, values) + self._worth_a_look(list(inner))
        if not kinds.isdisjoint(_SETTLED):
            self._tensors += (value for value in values if type(value) in _SETTLED)
            values = _without(_SETTLED, values)
        return values

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """Those found, each once, and their gradients."""
        found = list({id(x): x for x in self._tensors}.values())
        return found + [x.grad for x in found if x.is_leaf and x.grad is not None]

    def watch_tensors(self) -> None:
        """From now on, also what tensors are besides their values. A linked pass does not touch that."""
        if len(self._headers) != len(self.tensors):
            self._headers = list(map(Header, self.tensors))

    def _take(self, value: Any, dicts: list[dict], inside: list[Any]) -> None:
        """Of one value: the dictionaries to remember, and what is inside other containers."""
        kind = type(value)
        if kind in _DICTS:
            dicts.append(value)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            dicts.append(value.__dict__)
        elif isinstance(value, Tensor):
            if is_lazy(value):
                self.lazy = True
            else:
                self._tensors.append(value)
        elif isinstance(value, dict):
            dicts.append(value)
        elif isinstance(value, _CONTAINERS):
            self._contents.append((value, value.copy()))
            inside += value if len(value) <= LONGEST else ()
        elif isinstance(value, tuple):
            inside += value
        elif isinstance(value, np.ndarray):
            if value.nbytes < LONGEST:
                self._contents.append((value, value.copy()))
        elif _has_attributes(value):
            dicts.append(vars(value))

    def restore(self) -> None:
        if any(self._empty):
            for container in filter(None, self._empty):
                container.clear()
        if not self._same_members():
            members = iter(zip(self._keys, self._values, strict=True))
            for container, length in zip(self._dicts, self._lengths, strict=True):
                content = dict(itertools.islice(members, length))
                if not _unchanged(container, content):
                    _refill(container, content)
        for container, content in self._contents:
            if not _unchanged(container, content):
                _refill(container, content)
        for header in self._headers:
            if header.differs():
                header.restore()

    def _same_members(self) -> bool:
        """Whether all keys and values are the very same objects, in the same order."""
        if list(map(len, self._dicts)) != self._lengths:
            return False
        chain, same = itertools.chain.from_iterable, operator.is_
        return all(map(same, chain(map(_values, self._dicts)), self._values)) and all(
            map(same, chain(self._dicts), self._keys)
        )


_values = operator.methodcaller("values")


class Header:
    """What a tensor is besides its values: where they are stored, and its gradient."""

    __slots__ = ("_asks", "_data", "_place", "grad", "tensor")

    def __init__(self, x: Tensor) -> None:
        self.tensor, self._data, self._asks = x, x.detach(), x.requires_grad
        self.grad = x.grad if x.is_leaf else None
        self._place = _place(x)

    def differs(self) -> bool:
        """Whether the tensor is certainly not what it was in every respect."""
        x = self.tensor
        same = x.requires_grad is self._asks and x.is_leaf and x.grad is self.grad
        return not same or _place(x) != self._place

    def restore(self) -> None:
        x = self.tensor
        if x.grad_fn is not None and not self._asks and not is_view(x):
            x.detach_()  # it was written with values that depend on the input
        if _place(x) != self._place:
            x.data = self._data
        if x.is_leaf and x.requires_grad != self._asks:
            x.requires_grad_(self._asks)
        if x.is_leaf and x.grad is not self.grad:
            x.grad = self.grad


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are stored, and their layout."""
    if x.layout is not torch.strided or x.is_nested:
        return ()
    return x.data_ptr(), x.shape, x.stride()


_SETTLED = frozenset({Tensor, nn.Parameter})  # what these hold is there: they are not lazy
_CONTAINERS = (list, set, deque)
_DICTS = frozenset({dict, OrderedDict})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, type, types.FunctionType, types.MethodType})
_TUPLE = frozenset({tuple})
_CAN_BE_EMPTY = _ATOMS | _DICTS | {set, list, tuple}  # to ask these is quick and does nothing


def _all_values(dicts: Iterable[dict]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_values, dicts))


def _without(kinds: frozenset[type], values: list[Any]) -> list[Any]:
    """Values that are not of these very types."""
    others = dict.fromkeys(kinds, False)
    return list(itertools.compress(values, map(others.get, map(type, values), itertools.repeat(True))))


def _has_attributes(value: Any) -> bool:
    return isinstance(value, types.SimpleNamespace) or (
        is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    )


def modules_in(root: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules that a model given as a function, method or other callable holds."""
    if isinstance(root, nn.Module):
        yield root
    elif depth:
        for inner in _parts(root):
            yield from modules_in(inner, depth - 1)


def _parts(root: Any) -> Iterable[Any]:
    if isinstance(root, functools.partial):
        return (root.func, *root.args, *root.keywords.values())
    if isinstance(root, types.MethodType):
        return (root.__self__,)
    if isinstance(root, types.FunctionType):
        named = (root.__globals__.get(name) for name in root.__code__.co_names)
        cells = (cell.cell_contents for cell in root.__closure__ or () if _filled(cell))
        return (*(value for value in named if isinstance(value, nn.Module)), *cells)
    if isinstance(root, (list, tuple)):
        return root[:LONGEST]
    if isinstance(root, dict):
        return list(root.values())[:LONGEST]
    has_parts = callable(root) and hasattr(root, "__dict__") and not isinstance(root, type)
    return vars(root).values() if has_parts else ()


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _unchanged(container: Any, content: Any) -> bool:
    """Same members in the same order, compared by identity: tensors do not compare."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(map(operator.is_, container.values(), content.values())) and all(
            map(operator.eq, container, content)
        )
    if isinstance(container, np.ndarray):
        return bool((container == content).all())
    if isinstance(container, set):
        return container == content
    return all(map(operator.is_, container, content))


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = content
        return
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(content)


# Held by a call from its first write on a model's tensor until that is restored, so that two threads
# explaining one model in training mode do not keep each other's half-way values.
_writing = threading.RLock()


class Keeper:
    """Copies of the model's and the caller's tensors, made just before they are written. `tensors` says which
    they are, if anybody asks."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._locked = False

    def owns(self, storage: int) -> bool:
        return storage in self._owned

    @functools.cached_property
    def _owned(self) -> dict[int, list[Tensor]]:
        owned: dict[int, list[Tensor]] = {}
        for x in self._tensors():
            owned.setdefault(storage_of(x), []).append(x)
        return owned

    def before_write(self, storage: int) -> bool:
        """Whether a storage that is about to be written is one to be restored."""
        if self.owns(storage) and storage not in self._copies:
            if not self._locked:
                self._locked = True  # before it is: an interrupt in between must not keep it for ever
                _writing.acquire()
            kept = [x.data for x in self._owned[storage]]  # as they lie there now, whatever x becomes
            self._copies[storage] = [(x, x.clone()) for x in kept]
        return self.owns(storage)

    def restore(self) -> None:
        if not self._locked:
            return
        with torch.no_grad():
            for x, copy in (pair for pairs in self._copies.values() for pair in pairs):
                with torch.inference_mode() if x.is_inference() else contextlib.nullcontext():
                    x.copy_(copy)
        self._copies.clear()
        try:  # noqa: SIM105 - `suppress` is Python code, which an interrupt could end before the release
            _writing.release()
        except RuntimeError:  # it was not acquired
            pass
        self._locked = False  # after it was released: an interrupt in between must not keep it for ever


@dataclass
class Shared:
    """A snapshot, and the calls that rely on it. settled: no pass ran since everything was restored."""

    snapshot: Snapshot
    users: set[Region] = field(default_factory=set)
    settled: bool = False


class Region:
    """One call: the snapshot it shares with other threads on the same model, and its own keeper.

    `close` may be called more than once, and whether or not `open` finished: an interrupt can end either.
    """

    _guard = threading.Lock()
    _active: ClassVar[dict[Any, Shared]] = {}

    def __init__(self, model: Any, target: Any, given: Any, device: torch.device) -> None:
        self._model, self._target, self._given, self._device = model, target, given, device
        self._shared: Shared | None = None
        self._own: Snapshot | None = None
        self._random: dict[str, Any] | None = None
        self._begun = False

    def open(self) -> None:
        self._random = _random_state(self._device)
        # Several functions around one module share its state.
        self._key = frozenset(map(id, modules_in(self._model))) or id(self._model)
        with self._guard:
            shared = self._active.get(self._key)
            if shared is None:
                shared = self._active[self._key] = Shared(Snapshot(self._model))
            shared.users.add(self)
            self._shared = shared
        self._own = own = Snapshot(self._target) if callable(self._target) else None
        snapshot, given = shared.snapshot, self._given
        self.modules, self.lazy = snapshot.modules, snapshot.lazy
        self.keeper = Keeper(lambda: [*snapshot.tensors, *(own.tensors if own else ()), *tensors_in(given)])
        self.trains = any(module.training for module in self.modules) and any(map(trains, self.modules))

    def begin(self, linked: bool = False) -> None:
        """Before a pass: attributes as the first one found them, if no other call is in the middle of one."""
        assert self._shared is not None
        if self._begun:
            self.settle()
        if not linked:
            with self._guard:
                self._shared.snapshot.watch_tensors()
            if self._own is not None:
                self._own.watch_tensors()
        self._begun, self._shared.settled = True, False

    def settle(self) -> None:
        """Restore attributes now (a GPU may still be at work), if no other call is inside a pass."""
        assert self._shared is not None
        with self._guard:
            if len(self._shared.users) == 1 and not self._shared.settled:
                self._shared.snapshot.restore()
                self._shared.settled = True

    def restore(self) -> None:
        """After a pass: what it wrote, and the random numbers."""
        if self._own is not None:
            self._own.restore()
        self.keeper.restore()
        if self._random is not None:
            _set_random_state(self._device, self._random)

    def close(self) -> None:
        if self._random is not None:
            _set_random_state(self._device, self._random)
            self._random = None
        with self._guard:
            shared = self._shared or self._active.get(getattr(self, "_key", None))
            if shared is None or self not in shared.users:
                return
            if self._own is not None:
                self._own.restore()
            if hasattr(self, "keeper"):
                self.keeper.restore()
            if len(shared.users) == 1:  # the last one restores everything
                if not shared.settled:
                    shared.snapshot.restore()
                self._active.pop(self._key, None)
            shared.users.discard(self)


def trains(module: nn.Module) -> bool:
    """Whether a module is in training mode and does something else there."""
    if not module.training:
        return False
    if type(module).__module__.startswith("torch."):
        random_parts = getattr(module, "p", 0) or getattr(module, "dropout", 0)
        if isinstance(module, _DROPPING):
            return isinstance(random_parts, (int, float)) and random_parts > 0
        return isinstance(module, _TRAINING)
    return _asks_for_training(type(module))  # type: ignore[arg-type]


_DROPPING = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)
_TRAINING = (nn.modules.batchnorm._NormBase, nn.RReLU)


@functools.lru_cache(maxsize=1024)
def _asks_for_training(kind: type) -> bool:
    """Whether the code of a class reads `training`."""
    own = (each for each in kind.__mro__ if not each.__module__.startswith("torch.") and each is not object)
    functions = (value for each in own for value in vars(each).values() if inspect.isfunction(value))
    return any("training" in function.__code__.co_names for function in functions)


def _random_state(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["numpy"] = np.random.get_state(legacy=True)
    if device.type == "cuda":
        states["cuda"] = _cuda_state(device)
    return states


def _cuda_state(device: torch.device) -> tuple[torch.Generator, int, int]:
    """A generator on a GPU is a seed and how far it is: to ask for all of its state takes longer."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    return generator, generator.initial_seed(), generator.get_offset()


def _set_random_state(device: torch.device, states: dict[str, Any]) -> None:
    """Only what changed: another thread may be drawing numbers of its own."""
    if not torch.equal(torch.get_rng_state(), states["torch"]):
        torch.set_rng_state(states["torch"])
    if random.getstate() != states["python"]:
        random.setstate(states["python"])
    now: Any = np.random.get_state(legacy=True)
    before = states["numpy"]
    if now[2:] != before[2:] or (now[1] != before[1]).any():
        np.random.set_state(before)
    if "cuda" not in states or torch.cuda.is_current_stream_capturing():
        return
    if _cuda_state(device) != states["cuda"]:
        generator, seed, offset = states["cuda"]
        generator.manual_seed(seed)
        generator.set_offset(offset)
