"""`untouched` compares snapshots of everything that hangs on a model: every attribute of every module down to
the numbers, by identity and by value."""

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rectgrad
from every_method import QUICK

# Fewer units are zeroed: which dropout leaves depends on the version of torch, and no map may be zero.
Q = {name: {"q": 80} for name in ("rectgrad", "rectgrad_prr", "rectgrad_mod", "rectgrad_gated")}
FEW = QUICK | Q
ONE_BACKWARD = [name for name, method in rectgrad.METHODS.items() if method.one_backward]


class Snapshot:
    """A description of some objects, comparable with a later one. It holds what it saw: no id is reused."""

    def __init__(self, *values: Any) -> None:
        self.held: list[Any] = []
        self.facts: dict[str, Any] = {}
        for i, value in enumerate(values):
            self.see(f"[{i}]", value)

    def see(self, path: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            self.facts[path] = value
            return
        met = any(value is other for other in self.held)
        self.held.append(value)
        self.facts[path] = (type(value).__name__, id(value))
        if met:
            return
        if isinstance(value, Tensor):
            self.see_tensor(path, value)
        elif isinstance(value, np.ndarray):
            self.facts[path + ".values"] = value.tobytes()
        elif isinstance(value, dict):
            self.facts[path + ".keys"] = list(value)
            for key, item in value.items():
                self.see(f"{path}[{key!r}]", item)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            self.facts[path + ".len"] = len(value)
            for i, item in enumerate(value):
                self.see(f"{path}[{i}]", item)
        elif isinstance(value, (nn.Module, types.SimpleNamespace)):
            # The order of attributes means nothing, that of a module's containers does.
            for key in sorted(vars(value)):
                self.see(f"{path}.{key}", vars(value)[key])

    def see_tensor(self, path: str, x: Tensor) -> None:
        values = x.detach().cpu().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.facts[path + ".values"] = (tuple(x.shape), x.stride(), x.dtype, values)
        self.facts[path + ".autograd"] = (x.requires_grad, x.is_leaf, x.grad_fn is None)
        if x.is_leaf:
            self.see(path + ".grad", x.grad)

    def differences(self, later: "Snapshot") -> list[str]:
        paths = dict.fromkeys([*self.facts, *later.facts])
        missing = object()
        return [p for p in paths if self.facts.get(p, missing) != later.facts.get(p, missing)]


def surroundings() -> tuple:
    return (
        torch.get_rng_state().numpy().tobytes(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


@contextlib.contextmanager
def untouched(*values: Any) -> Iterator[None]:
    """Everything that hangs on `values`, the random state and torch's modes are the same afterwards."""
    before, around = Snapshot(*values), surroundings()
    yield
    changed = before.differences(Snapshot(*values))
    assert not changed, f"changed: {changed[:6]}"
    assert surroundings() == around, "the random state or a mode of torch changed"


# --- a model that does everything at once ------------------------------------------------------------------


class Eventful(nn.Module):
    """In training mode, with every kind of state that a forward pass may touch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.weighted = parametrizations.weight_norm(nn.Conv2d(6, 6, 3))
        self.spectral = parametrizations.spectral_norm(nn.Linear(24, 30))
        self.head = nn.Linear(30, 4)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))
        self.calls = 0
        self.seen: list = []
        self.cache: dict = {"nested": []}
        self.past = [torch.zeros(2)]
        self.plain = torch.ones(3)
        self.conv.weight.requires_grad_(False)
        self.head.weight.grad = torch.ones_like(self.head.weight)
        self.weighted.parametrizations.weight.original1.grad = torch.ones(6, 6, 3, 3)
        self.hooked: list = []
        self.norm.register_forward_hook(lambda module, inputs, output: self.hooked.append(output.sum()))
        self.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
        self.train()

    def forward(self, x: Tensor, state: Tensor | None = None, trap: Callable = lambda where: None) -> Tensor:
        trap("start")
        self.calls += 1
        x.mul_(0.5)
        x = F.relu(self.conv(x), inplace=True)
        self.last = x.detach()
        self.seen.append(x)
        trap("middle")
        x = self.drop(self.norm(x))
        self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        self.steps += 1
        self.plain.add_(1)
        self.cache["last"] = x
        if state is not None:
            state.add_(1)
        x = F.max_pool2d(self.weighted(x).relu_(), 2)
        self.average = self.average.clone()
        trap("late")
        return self.head(F.relu(self.spectral(x.flatten(1))))


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class FaultError(Exception):
    pass
