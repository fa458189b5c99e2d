"""Models from a function in a user's file: path/to/file.py:factory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rectgrad.models import weights
from rectgrad.models.errors import ModelUnavailableError, reason
from rectgrad.models.image_model import ImageModel

# The preprocessing of most ImageNet networks; a factory can return an ImageModel with a different one.
DEFAULTS: dict[str, Any] = {
    "size": (224, 224),
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_fraction": 0.875,
}


def from_file(name: str, file: Path | None) -> ImageModel:
    """`name` is FILE.py:FACTORY; factory() returns an nn.Module or an ImageModel."""
    path, _, factory = name.rpartition(":")
    if name.endswith(".py") or not factory:
        raise ValueError(
            f"{name!r} has no factory; use FILE.py:FACTORY, with a function that returns the network"
        )
    model = _call(Path(path), factory)
    if isinstance(model, nn.Module):
        model = ImageModel(name=name, module=model, labels=[], **DEFAULTS)
    if not isinstance(model, ImageModel):
        kind = "None" if model is None else type(model).__name__
        raise TypeError(f"{name}() must return an nn.Module or an ImageModel, not {kind}")
    if file is not None:
        weights.fill(model.module, weights.read(file), file)
    return model


def _call(path: Path, factory: str) -> Any:
    if not path.is_file():
        raise ModelUnavailableError(f"no such file: {str(path)!r}")
    with _importable_neighbours(path):
        try:
            module = _import_file(path)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ModelUnavailableError(f"{path} cannot be imported ({reason(error)})") from error
        make = getattr(module, factory, None)
        if isinstance(make, nn.Module):
            return make
        if not callable(make):
            raise ValueError(
                f"{path} has no function {factory!r}; it has {_functions(module) or 'no functions'}"
            )
        try:
            return make()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ModelUnavailableError(f"{path}: {factory}() failed ({reason(error)})") from error


def _import_file(path: Path) -> ModuleType:
    name = str(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable_neighbours(path: Path) -> Iterator[None]:
    """Lets the file import modules from its own folder, as if Python ran it as a script. A file that changes
    the current folder must not change where photos are looked for and results are written."""
    folder, current = str(path.resolve().parent), os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)
        os.chdir(current)


def _functions(module: ModuleType) -> str:
    own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return ", ".join(key for key in own if not key.startswith("_"))
