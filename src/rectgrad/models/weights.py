"""Reads weight files without running code, and loads them into a network."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from rectgrad.models.errors import ModelUnavailableError, first, reason

COUNTER = "num_batches_tracked"  # of BatchNorm: not used in evaluation mode, and missing from older files

PICKLES = b"\x80", b"P"  # first byte of a pickle and of a torch archive
# SHA-256 of the weights of EfficientNet-Lite0 to Lite2 as published: known not to contain code.
KNOWN = {
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


def build(make: Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """Builds a network with the weights of a file, without initialising random weights first."""
    state = read(path)
    with torch.device("meta"):
        module = make()
    fill(module.to_empty(device="cpu"), state, path)
    return module


def fill(module: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Loads a state dict into a network; all keys and shapes must match."""
    own = module.state_dict()
    missing = [key for key in own if key not in state and not key.endswith(COUNTER)]
    unexpected = [key for key in state if key not in own and not key.endswith(COUNTER)]
    reshaped = [key for key in own if key in state and own[key].shape != state[key].shape]
    if missing or unexpected or reshaped:
        shapes = [f"{key} is {_shape(state[key])} for {_shape(own[key])}" for key in reshaped]
        lists = {"missing": missing, "unexpected": unexpected, "different shape": shapes}
        parts = [f"{what}: {first(keys, 3)}" for what, keys in lists.items() if keys]
        raise ValueError(f"weights={str(path)!r} do not match {type(module).__name__}; {'; '.join(parts)}")
    counters = {key: torch.zeros_like(value) for key, value in own.items() if key.endswith(COUNTER)}
    module.load_state_dict({**counters, **{key: state[key] for key in own if key in state}})


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pt/.pth file that contains only data."""
    path = Path(path)
    if not path.is_file():
        raise ModelUnavailableError(f"weights={str(path)!r}: no such file")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        _check_pickle(path)
        content = torch.load(_safe(path), map_location="cpu", weights_only=True)
    except ModelUnavailableError as error:
        raise ModelUnavailableError(f"weights={str(path)!r} was rejected: {error}") from None
    except Exception as error:
        raise ModelUnavailableError(_unreadable(path, error)) from error
    return _state_dict(content, path)


def _safe(path: Path) -> Path | io.BytesIO:
    """What torch may load. Before torch 2.6, a file could run code although `weights_only` was set
    (CVE-2025-32434). There, only known files are loaded, from the bytes that were verified."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
        return path
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() in KNOWN:
        return io.BytesIO(content)
    danger = f"torch {torch.__version__} could run code in a .pt or .pth file"
    raise ModelUnavailableError(f"{danger}; update torch, or save the weights as .safetensors")


def _check_pickle(path: Path) -> None:
    """Rejects a bare pickle that torch.save did not write, for which torch would issue a warning and fail."""
    with path.open("rb") as file:
        start = file.read(2)
    if start[:1] == PICKLES[0] and start[1:] != b"\x02":  # torch.save uses protocol 2
        raise pickle.UnpicklingError


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError) and _first_byte(path) in PICKLES:
        return (
            f"weights={str(path)!r} was rejected: it is a pickle that could run code; save "
            "model.state_dict() instead, preferably as .safetensors"
        )
    if isinstance(error, OSError):
        return f"weights={str(path)!r} cannot be read ({reason(error)})"
    return f"weights={str(path)!r} is damaged, truncated, or not a .safetensors, .pt or .pth file of tensors"


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict itself, or the one inside a training checkpoint."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = isinstance(content, Mapping) and all(isinstance(key, str) for key in content)
    if not named or not all(_is_plain(value) for value in content.values()):
        raise ModelUnavailableError(
            f"weights={str(path)!r} does not contain a state dict as returned by model.state_dict()"
        )
    parallel = all(key.startswith("module.") for key in content)  # the prefix of DataParallel
    return {key.removeprefix("module.") if parallel else key: value for key, value in content.items()}


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor of real numbers that can be copied into a parameter."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return dense and not value.is_quantized and not value.is_complex()


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1)
