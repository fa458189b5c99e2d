"""The rows of a verdict: methods, controls that do not depend on the network, and their digests."""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad.engine.request import Request
from rectgrad.methods import Method, RandomMap
from rectgrad.methods.averages import SmoothGrad
from rectgrad.methods.catalog import as_method, every_name
from rectgrad.methods.gradients import Saliency
from rectgrad.methods.method import Maps
from rectgrad.metrics import controls
from rectgrad.verdict.presets import Preset

_CONTROLS = {"edges": controls.edges, "centre": controls.centre, "brightness": controls.brightness}


@dataclass(frozen=True)
class Control(Method):
    """A map that is computed from the photo alone."""

    kind: str = "edges"
    one_backward: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False

    def raw(self, request: Request) -> Maps:
        return tuple(_CONTROLS[self.kind](x.detach()) for x in request.inputs)


@dataclass(frozen=True, eq=False)
class Row:
    """A method or a control under the name that the verdict uses."""

    name: str
    method: Method
    control: bool = False

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self.method)


def rows_of(methods: str | Sequence[str] | Mapping[str, Method], preset: Preset, seed: int) -> list[Row]:
    """The rows of a verdict, methods first. `random` is always among the controls."""
    known = {"random": RandomMap(seed), **{kind: Control(kind) for kind in _CONTROLS}}
    rows = [Row(name, method) for name, method in _methods(methods, preset).items()]
    if not rows:
        raise ValueError("no methods to judge; pass names, or a mapping from names to methods")
    for taken in {row.name for row in rows} & set(known):
        raise ValueError(f"methods: {taken!r} is the name of a control, which is always judged; rename it")
    return rows + [Row(name, each, control=True) for name, each in known.items()]


def _methods(given: str | Sequence[str] | Mapping[str, Method], preset: Preset) -> dict[str, Method]:
    if isinstance(given, Mapping):
        return {str(name): as_method(method, {}) for name, method in given.items()}
    if isinstance(given, str):
        given = every_name() if given == "all" else [name.strip() for name in given.split(",")]
    if isinstance(given, Method) or not all(isinstance(name, str) for name in given):
        wanted = 'names, "all", or a mapping from names to methods, such as {"mine": rectgrad.Saliency()}'
        raise TypeError(f"methods must be {wanted}, not {given!r}")
    found = {name: as_method(name, {}) for name in given if name != "random"}
    unready = [name for name, method in found.items() if not method.ready]
    if unready:
        raise ValueError(
            f"methods={', '.join(unready)}: needs further options; pass a mapping from names to methods"
        )
    return {name: preset.configured(method) for name, method in found.items()}


def is_gradient(method: Method) -> bool:
    """Whether a map holds rates of change, so that it is multiplied by a change to give an effect."""
    if isinstance(method, SmoothGrad):
        return is_gradient(method.over)
    return type(method) is Saliency or getattr(method, "multiply_by_input", True) is False


def digest_of(value: Any) -> str:
    """A short hash of a method: its class, its options and, if it is not one of ours, the file that it is
    in, because a method may call functions beside it."""
    found = hashlib.sha256(f"{type(value).__module__}.{type(value).__qualname__}".encode())
    if not type(value).__module__.startswith("rectgrad."):
        found.update(_file_of(type(value)) or source_of(type(value)))
    for each in fields(value):
        found.update(f"{each.name}={_digest_of_option(getattr(value, each.name))}".encode())
    return found.hexdigest()[:16]


def _file_of(kind: type) -> bytes:
    """The content of the file of a class; empty if there is none, as in a notebook."""
    try:
        return Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):
        return b""


def source_of(kind: type) -> bytes:
    """The source of a class; where it cannot be read, the compiled functions of the class."""
    try:
        return inspect.getsource(kind).encode()
    except (OSError, TypeError):
        functions = (each for each in vars(kind).values() if inspect.isfunction(each))
        return b"".join(marshal.dumps(each.__code__) for each in functions)


def _digest_of_option(value: Any) -> str:
    if isinstance(value, Method):
        return digest_of(value)
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, (tuple, list)):
        return str([_digest_of_option(each) for each in value])
    return repr(value)


def tensor_digest(values: Tensor) -> str:
    plain = values.detach().cpu().contiguous()
    found = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]
