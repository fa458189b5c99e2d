"""Errors of models, and their messages."""

from __future__ import annotations


class ModelUnavailableError(RuntimeError):
    """The model exists, but its package, its weights or its file is not available."""


def reason(error: BaseException) -> str:
    """An exception of another package in one line."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {text[:200]}{'…' if len(text) > 200 else ''}" if text else kind


def first(items: list[str], count: int) -> str:
    """The first items of a list, and the number of the others."""
    more = len(items) - count
    return ", ".join(items[:count]) + (f" and {more} more" if more > 0 else "")
