"""Backends: implementations of unit selection and of linear gradients for each kind of device.

The environment variable RECTGRAD_KERNELS selects one: "reference" is the specification in plain torch,
"portable" needs neither a compiler nor a GPU. By default, the fastest available backend is used.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

import torch
from torch import Tensor

CHOICES = ("fast", "portable", "reference")


class Backend(Protocol):
    """The functions of a backend. `Reference` in reference.py is their specification."""

    name: str

    def smallest(self, score: Tensor, k: int) -> Tensor: ...

    def rectify(
        self,
        a: Tensor,
        R: Tensor,
        rows: int,
        k: int | None,
        tau: float | None,
        rule: str,
        sums: list,
    ) -> Any: ...


def chosen() -> str:
    value = os.environ.get("RECTGRAD_KERNELS") or "fast"
    if value not in CHOICES:
        raise ValueError(f"RECTGRAD_KERNELS is {value!r}; it must be one of {', '.join(CHOICES)}")
    return value


def backend_of(x: Tensor) -> Backend:
    """The backend for tensors like x."""
    return backend_for(x.device.type)


def backend_for(device: str) -> Backend:
    """The backend for a type of device."""
    return _backend(device, chosen())


@functools.lru_cache(maxsize=64)
def _backend(device: str, choice: str) -> Backend:
    from rectgrad.kernels import native
    from rectgrad.kernels.portable import Portable
    from rectgrad.kernels.reference import Reference

    if choice == "reference" or device not in ("cpu", "cuda"):
        return Reference()
    if device == "cuda":
        from rectgrad.kernels import cuda

        return cuda.Cuda() if choice == "fast" and cuda.available() else Reference()
    library = native.load() if choice == "fast" else None
    return Portable() if library is None else native.Native(library)


def is_native(x: Tensor) -> bool:
    """Whether the native kernels are in use for x."""
    return x.is_cpu and x.dtype is torch.float32 and backend_for("cpu").name.startswith("native")


def in_use() -> dict[str, str]:
    """The name of the backend for each kind of device."""
    gpu = _backend("cuda", chosen()).name if torch.cuda.is_available() else "reference"
    return {"cpu": _backend("cpu", chosen()).name, "cuda": gpu}
