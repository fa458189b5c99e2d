"""Errors about models, and helpers for their messages."""

from __future__ import annotations

import socket
import urllib.error


class ModelUnavailableError(RuntimeError):
    """The model exists, but its package, its weights or its file is not available."""


def reason(error: BaseException) -> str:
    """An exception from another package as one line."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {text[:200]}{'…' if len(text) > 200 else ''}" if text else kind


def unreachable(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, means that a server cannot be reached."""
    while error is not None:
        if isinstance(error, _NO_NETWORK) or type(error).__name__ in _NO_NETWORK_NAMES:
            return True
        error = error.__cause__ or error.__context__
    return False


_NO_NETWORK = (ConnectionError, TimeoutError, socket.gaierror, urllib.error.URLError)
_NO_NETWORK_NAMES = ("ConnectError", "ConnectTimeout", "LocalEntryNotFoundError", "OfflineModeIsEnabled")


def first(items: list[str], count: int) -> str:
    """The first items of a list, and the number of the others."""
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")
