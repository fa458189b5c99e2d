"""Optional packages, imported only when a model needs them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rectgrad.models.errors import ModelUnavailableError, reason


def imported(module: str, model: str, install: str) -> Any:
    """Imports a module of an optional package; raises an error in one line if it is missing or broken.

    Packages built for another torch may raise any exception on import, so that all are caught.
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
def errors_from(package: str, model: str) -> Iterator[None]:
    """Converts the exceptions of a package into errors in one line."""
    try:
        yield
    except Exception as error:
        raise ModelUnavailableError(f"{model} is not available from {package} ({reason(error)})") from error


def _broken(package: str, model: str, install: str, error: Exception) -> str:
    return (
        f"{model} needs the package {package}, which is installed but cannot be imported ({reason(error)}): "
        f"install a version for this torch with {install}"
    )
