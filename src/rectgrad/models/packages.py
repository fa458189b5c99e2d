"""Optional packages, imported only when a model needs them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rectgrad.models.errors import ModelUnavailableError, reason, unreachable


def imported(module: str, model: str, install: str) -> Any:
    """Imports a module of an optional package; raises a one-line error if it is missing or broken.

    Packages built for another version of torch may raise any exception on import, so all are caught.
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
def errors_from(package: str, model: str, offline: str = "") -> Iterator[None]:
    """Converts the exceptions of a package into one-line errors.

    offline: what to do if the weights cannot be downloaded. The hub's log messages about retries are
    suppressed.
    """
    log = logging.getLogger("huggingface_hub.utils._http")
    log.addFilter(_is_no_retry)
    try:
        yield
    except Exception as error:
        if offline and unreachable(error):
            problem = f"the weights of {model} could not be downloaded: the server cannot be reached"
            raise ModelUnavailableError(f"{problem}; {offline}") from error
        raise ModelUnavailableError(f"{model} is not available from {package} ({reason(error)})") from error
    finally:
        log.removeFilter(_is_no_retry)


def _is_no_retry(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not ("thrown while requesting" in text or text.startswith("Retrying in"))


def _broken(package: str, model: str, install: str, error: Exception) -> str:
    return (
        f"{model} needs the package {package}, which is installed but cannot be imported ({reason(error)}): "
        f"install a version for this torch with {install}"
    )
