"""The model stays as it was found: what a forward pass writes on it is put back, also after an error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rectgrad.op import storage_of

# Held by a call from its first write on a model's tensor until that is put back, so that two threads
# explaining one model in training mode do not keep each other's half-way values.
_writing = threading.RLock()


class Keeper:
    """Copies of the model's (and the caller's) tensors, made just before they are written."""

    def __init__(self, model: Any = None, others: Iterable[Tensor] = ()) -> None:
        self._model, self._others = model, list(others)
        self._owned: dict[int, list[Tensor]] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._lock = contextlib.ExitStack()

    def before_write(self, storage: int) -> None:
        if self._owned is None:
            self._owned = {}
            for x in (*_tensors(self._model), *self._others):
                self._owned.setdefault(storage_of(x), []).append(x)
        for x in self._owned.pop(storage, ()):
            if not self._copies:
                self._lock.enter_context(_writing)
            self._copies.append((x, x.detach().clone()))

    def restore(self) -> None:
        with self._lock, torch.no_grad():
            for x, copy in self._copies:
                x.data.copy_(copy)
            self._copies.clear()


def _tensors(model: Any) -> Iterator[Tensor]:
    if isinstance(model, nn.Module):
        for module in model.modules():
            for values in (vars(module), module._buffers, module._parameters):
                yield from (x for x in values.values() if isinstance(x, Tensor))


@contextlib.contextmanager
def preserved(model: Any, tensors: Iterable[Tensor], device: torch.device) -> Iterator[Keeper]:
    """Attributes, buffers, submodules and the random state as before, whatever happens inside."""
    keeper = Keeper(model, tensors)
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    saved = [(module, _snapshot(module)) for module in modules]
    random = _random_state(device)
    try:
        yield keeper
    finally:
        keeper.restore()
        for module, snapshot in saved:
            _restore(module, snapshot)
        _set_random_state(device, random)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """One level deep: the containers of a module (its buffers, hooks, submodules, a user's list) too."""
    return {k: (v, v.copy() if isinstance(v, (dict, list, set)) else None) for k, v in vars(module).items()}


def _restore(module: nn.Module, snapshot: dict[str, Any]) -> None:
    now = vars(module)
    for key in [key for key in now if key not in snapshot]:
        del now[key]
    for key, (value, content) in snapshot.items():
        if now.get(key, _restore) is not value:
            now[key] = value
        if content is not None and not _unchanged(value, content):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)


def _unchanged(value: Any, content: Any) -> bool:
    """Same members in the same order, compared by identity: tensors do not compare."""
    if len(value) != len(content):
        return False
    pairs = zip(value.items(), content.items(), strict=True) if isinstance(value, dict) else None
    if pairs is not None:
        return all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in zip(value, content, strict=True))


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), accelerator


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    if not torch.equal(torch.get_rng_state(), state[0]):
        torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
