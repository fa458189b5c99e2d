"""Leaves the model unchanged: whatever a call writes to it is restored, also after an error.

Attributes and the containers in them are saved beforehand, tensors only when they are about to be written.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rectgrad.engine.op import storage_id
from rectgrad.engine.torch_private import is_view, tensors_in
from rectgrad.kernels.device import random_state, restore_random_state

LONGEST = 10_000  # members of a list, bytes of an array: longer ones are data, not state
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, type, FunctionType, MethodType})
_CAN_BE_EMPTY = _ATOMS | {dict, OrderedDict, set, list, tuple}  # their bool() has no side effects

_chain = itertools.chain.from_iterable
_values = operator.methodcaller("values")


class Snapshot:
    """The state of a model and its submodules: attributes, members of containers in them, tensors."""

    def __init__(self, root: Any) -> None:
        # Dictionaries, and one list each for the lengths, keys and values of all of them. Copying each would
        # make thousands of containers, which trigger garbage collection.
        self._dicts: list[dict] = []
        self._values: list[Any] = []
        self._contents: list[tuple[Any, Any]] = []  # other containers and their copies
        self._empty: list[Any] = []  # empty containers, and values such as None
        self._tensors: list[Tensor] = []
        self._headers: list[tuple[Any, ...]] = []  # properties of tensors other than their values
        self.modules: list[nn.Module] = []
        self.lazy = False  # whether a tensor has no values yet
        self.users: set[Region] = set()  # the calls that use this snapshot
        self.settled = False  # whether no pass has run since the last restore
        met: set[int] = set()
        level: Iterable[Any] = modules_in(root)
        while level := [value for value in level if type(value) not in _ATOMS]:
            inside: list[Any] = []
            first = len(self._dicts)
            for value in level:
                if id(value) not in met:
                    met.add(id(value))
                    kind = type(value)
                    if kind is nn.Parameter or kind is Tensor:  # nearly always: fast path
                        self._tensors.append(value)
                    elif kind is dict:
                        self._dicts.append(value)
                    else:
                        inside += self._take(value)
            members = list(_chain(map(_values, self._dicts[first:])))
            self._values += members
            level = members + inside
            # Most members of a module are empty dictionaries. Handling each would take three times as long.
            if _CAN_BE_EMPTY.issuperset(map(type, level)):
                self._empty += itertools.filterfalse(None, level)
                level = filter(None, level)
        self._keys = list(_chain(self._dicts))
        self._lengths = list(map(len, self._dicts))

    def _take(self, value: Any) -> Iterable[Any]:
        """Save one value. Returns its members if it is a container other than a dictionary."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
            self._dicts.append(value.__dict__)
        elif isinstance(value, Tensor):
            if is_lazy(value):
                self.lazy = True
            else:
                self._tensors.append(value)
        elif isinstance(value, tuple):
            return value
        elif isinstance(value, dict):
            self._dicts.append(value)
        elif isinstance(value, (list, set, deque)):
            self._contents.append((value, list(value)))
            return value if len(value) <= LONGEST else ()
        elif isinstance(value, np.ndarray) and value.nbytes < LONGEST:
            self._contents.append((value, value.copy()))
        elif hasattr(value, "__dict__") and (is_dataclass(type(value)) or isinstance(value, SimpleNamespace)):
            self._dicts.append(vars(value))
        return ()

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that were found, and their gradients."""
        return self._tensors + [x.grad for x in self._tensors if x.is_leaf and x.grad is not None]

    def watch_tensors(self) -> None:
        """Also save gradients and where values are stored, which a linked pass cannot change."""
        self._headers = self._headers or [
            (x, x.detach(), _place(x), x.requires_grad, x.grad if x.is_leaf else None) for x in self.tensors
        ]

    def restore(self) -> None:
        for container in filter(None, self._empty):
            container.clear()
        same = list(map(len, self._dicts)) == self._lengths
        same = same and all(map(operator.is_, _chain(map(_values, self._dicts)), self._values))
        if not same or not all(map(operator.is_, _chain(self._dicts), self._keys)):
            members = zip(self._keys, self._values, strict=True)
            for container, length in zip(self._dicts, self._lengths, strict=True):
                _refill(container, dict(itertools.islice(members, length)))
        for container, content in self._contents:
            _refill(container, content)
        for x, data, place, asks, grad in self._headers:
            if x.grad_fn is not None and not asks and not is_view(x):
                x.detach_()  # values that depend on the input were written to it
            if _place(x) != place:
                x.data = data
            if x.is_leaf and x.requires_grad is not asks:
                x.requires_grad_(asks)
            if x.is_leaf and x.grad is not grad:
                x.grad = grad


def _refill(container: Any, content: Any) -> None:
    """Restore a container if it changed. Members are compared by identity, because tensors have no ==."""
    if isinstance(container, np.ndarray):
        if container.tobytes() != content.tobytes():
            container[...] = content
        return
    same = len(container) == len(content) and all(map(operator.is_, container, content))
    if isinstance(container, dict):
        same = same and all(map(operator.is_, container.values(), content.values()))
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def _place(x: Tensor) -> tuple[Any, ...]:
    """The storage of a tensor and its layout."""
    if x.layout is not torch.strided or x.is_nested:
        return ()
    return x.data_ptr(), x.shape, x.stride()


def modules_in(root: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules of a model, which may be a function, a method or another callable that holds them."""
    if isinstance(root, nn.Module):
        yield root
    elif depth:
        for inner in itertools.islice(_parts(root), LONGEST):
            yield from modules_in(inner, depth - 1)


def _parts(root: Any) -> Iterable[Any]:
    if isinstance(root, (list, tuple, dict)):
        return root.values() if isinstance(root, dict) else root
    if isinstance(root, functools.partial):
        return root.func, *root.args, *root.keywords.values()
    if isinstance(root, MethodType):
        return (root.__self__,)
    if isinstance(root, FunctionType):
        named = map(root.__globals__.get, root.__code__.co_names)
        filled = (cell.cell_contents for cell in root.__closure__ or () if cell != CellType())
        return (*(value for value in named if isinstance(value, nn.Module)), *filled)
    has_parts = callable(root) and hasattr(root, "__dict__") and not isinstance(root, type)
    return vars(root).values() if has_parts else ()


# Held from the first write to a model's tensor until its restore: threads must not save each other's values.
_writing = threading.RLock()


class Keeper:
    """Copies of the model's and the caller's tensors (`tensors`), made just before they are written."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._locked = False

    @functools.cached_property
    def _owned(self) -> dict[int, list[Tensor]]:
        owned: dict[int, list[Tensor]] = {}
        for x in self._tensors():
            owned.setdefault(storage_id(x), []).append(x)
        return owned

    def owns(self, storage: int) -> bool:
        return storage in self._owned

    def before_write(self, storage: int) -> bool:
        """Save a storage that is about to be written. Returns whether it will be restored."""
        if self.owns(storage) and storage not in self._copies:
            if not self._locked:
                self._locked = True  # set first: after an interrupt in between, the lock is still released
                _writing.acquire()
            # `data` keeps the present storage, whatever happens to the tensor
            self._copies[storage] = [(x.data, x.data.clone()) for x in self._owned[storage]]
        return self.owns(storage)

    def restore(self) -> None:
        if not self._locked:
            return
        for x, copy in _chain(self._copies.values()):
            with torch.inference_mode() if x.is_inference() else contextlib.nullcontext():
                x.copy_(copy)
        self._copies.clear()
        try:  # noqa: SIM105 - `suppress` is Python code, in which an interrupt could prevent the release
            _writing.release()
        except RuntimeError:  # it was not acquired
            pass
        self._locked = False  # set last, for the same reason


class Region:
    """One call: the snapshot that it shares with other threads on the same model, and its own keeper.

    `close` may be called repeatedly, and even if `open` did not finish, because an interrupt can end both.
    """

    _guard = threading.RLock()
    _active: ClassVar[dict[Any, Snapshot]] = {}

    def __init__(self, model: Any, target: Any, given: Any, device: torch.device) -> None:
        self._model, self._given, self._device = model, given, device
        # Functions that wrap the same module share its state.
        self._key = frozenset(map(id, modules_in(model))) or id(model)
        self._target = Snapshot(target if callable(target) else None)
        self._random: list[tuple[Callable[[Any], Any], Any]] = []
        self._begun = False
        self.keeper = Keeper(tuple)

    def open(self) -> None:
        self._random = random_state(self._device)
        with self._guard:
            shared = self._active.get(self._key) or Snapshot(self._model)
            shared.users.add(self)
            self._active[self._key] = shared
        self.modules, self.lazy = shared.modules, shared.lazy
        self.trains = any(trains(module) for module in self.modules if module.training)
        target, given = self._target, self._given
        self.keeper = Keeper(lambda: [*shared.tensors, *target.tensors, *tensors_in(given)])

    def begin(self, linked: bool = False) -> None:
        """Before a pass: restore what an earlier one changed, if no other call is inside a pass."""
        with self._guard:
            if self._begun:
                self.settle()
            shared = self._active[self._key]
            if not linked:
                shared.watch_tensors()
                self._target.watch_tensors()
            self._begun, shared.settled = True, False

    def settle(self) -> None:
        """Restore attributes now, while a GPU may be busy, if no other call is inside a pass."""
        with self._guard:
            shared = self._active[self._key]
            if len(shared.users) == 1 and not shared.settled:
                shared.restore()
                shared.settled = True

    def restore(self) -> None:
        """After a pass: restore what it wrote, and the random state."""
        self._target.restore()
        self.keeper.restore()
        restore_random_state(self._random, self._device)

    def close(self) -> None:
        self.restore()
        self._random = []
        with self._guard:
            shared = self._active.get(self._key)
            if shared is None or self not in shared.users:
                return
            self.settle()  # the last one restores everything
            if len(shared.users) == 1:
                self._active.pop(self._key, None)
            shared.users.discard(self)


def trains(module: nn.Module) -> bool:
    """Whether a module behaves differently in training mode."""
    if not type(module).__module__.startswith("torch."):
        return _asks_for_training(type(module))  # type: ignore[arg-type]
    if isinstance(module, (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)):
        return (getattr(module, "p", 0) or getattr(module, "dropout", 0)) > 0
    return isinstance(module, (nn.modules.batchnorm._NormBase, nn.RReLU))


@functools.lru_cache(maxsize=1024)
def _asks_for_training(kind: type) -> bool:
    """Whether the code of a class mentions `training`."""
    own = (vars(each).values() for each in kind.__mro__ if not each.__module__.startswith("torch."))
    functions = (value for value in _chain(own) if isinstance(value, FunctionType))
    return any("training" in function.__code__.co_names for function in functions)
