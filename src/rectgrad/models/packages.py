"""Optional packages: imported when a model asks for them, never before."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rectgrad.models.errors import ModelUnavailableError, reason


def imported(module: str, model: str, install: str) -> Any:
    """A module of an optional package; one sentence where it is missing or broken.

    Packages built for another torch fail on import with anything at all, so every exception counts.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ModelUnavailableError(_broken(package, model, install, error)) from error
        raise ModelUnavailableError(f"{model} needs the package {package}: {install}") from None
    except Exception as error:
        raise ModelUnavailableError(_broken(package, model, install, error)) from error


@contextmanager
def asking(package: str, model: str) -> Iterator[None]:
    """Whatever a package raises while it makes a model, as one sentence."""
    try:
        yield
    except Exception as error:
        raise ModelUnavailableError(f"{model} was not to be had from {package} ({reason(error)})") from error


def _broken(package: str, model: str, install: str, error: Exception) -> str:
    return (
        f"{model} needs the package {package}, which is installed but does not import ({reason(error)}): "
        f"install a version that fits this torch, with {install}"
    )
