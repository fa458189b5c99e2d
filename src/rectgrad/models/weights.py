"""Files of weights: reading them without running code, and putting them into a network."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from rectgrad.models.errors import ModelUnavailableError, first, reason

COUNTER = "num_batches_tracked"  # BatchNorm's; evaluation never reads it, older files lack it

PICKLES = b"\x80", b"P"  # how a bare pickle and torch's archive of one begin


def build(make: Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """A network with the weights of a file, without drawing the random ones first."""
    state = read(path)
    with torch.device("meta"):
        module = make()
    fill(module.to_empty(device="cpu"), state, path)
    return module


def fill(module: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Put a state dict into a network; every key and shape must fit."""
    own = module.state_dict()
    missing = [key for key in own if key not in state and not key.endswith(COUNTER)]
    unexpected = [key for key in state if key not in own and not key.endswith(COUNTER)]
    reshaped = [key for key in own if key in state and own[key].shape != state[key].shape]
    if missing or unexpected or reshaped:
        shapes = [f"{key} is {_shape(state[key])} for {_shape(own[key])}" for key in reshaped]
        lists = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        parts = [f"{what}: {first(keys, 3)}" for what, keys in lists.items() if keys]
        raise ValueError(f"weights={str(path)!r} do not fit {type(module).__name__}; {'; '.join(parts)}")
    counters = {key: torch.zeros_like(value) for key, value in own.items() if key.endswith(COUNTER)}
    module.load_state_dict({**counters, **{key: state[key] for key in own if key in state}})


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pt/.pth file that holds nothing but data."""
    path = Path(path)
    if not path.is_file():
        raise ModelUnavailableError(f"weights={str(path)!r}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():  # of the pickle's protocol; what matters is said below
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelUnavailableError(_unreadable(path, error)) from error
    return _state_dict(content, path)


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError) and _begins(path) in PICKLES:
        return (
            f"weights={str(path)!r} is refused: it is a pickle that could run code when loaded; save "
            "model.state_dict() instead, best as .safetensors"
        )
    if isinstance(error, OSError):
        return f"weights={str(path)!r} cannot be read ({reason(error)})"
    return f"weights={str(path)!r} is damaged, cut short or no .safetensors, .pt or .pth file of tensors"


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict itself, or the one inside a training checkpoint."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
        raise ModelUnavailableError(
            f"weights={str(path)!r} holds no state dict: names and tensors, as model.state_dict() gives"
        )
    return {key.removeprefix("module."): value for key, value in content.items()}  # DataParallel's prefix


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _begins(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1)
