"""What is said when a model cannot be had."""

from __future__ import annotations


class ModelUnavailableError(RuntimeError):
    """The model exists, but its package, its weights or its file cannot be had here."""


def reason(error: BaseException) -> str:
    """Somebody else's exception in one line."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {text[:200]}{'…' if len(text) > 200 else ''}" if text else kind


def first(items: list[str], count: int) -> str:
    """The first few of a list, and how many more there are."""
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")
