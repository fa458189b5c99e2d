"""Checks of a method's options: each says which option of which method is wrong, and what would be right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor


def _wrong(method: Any, name: str, wanted: str, kind: Callable[[str], Exception]) -> Exception:
    return kind(f"{type(method).__name__}: {name} must be {wanted}, not {getattr(method, name)!r}")


def number(method: Any, name: str, low: float, high: float = math.inf) -> None:
    """A number from low to high, ends included; an infinite end means no bound, and -inf to allow both."""
    value = getattr(method, name)
    if not isinstance(value, (int, float)) and hasattr(value, "item"):  # numpy's and torch's scalars
        with contextlib.suppress(ValueError, RuntimeError):
            value = value.item()
            object.__setattr__(method, name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(method, name, "a number", TypeError)
    infinite = math.isinf(value) and low > -math.inf
    if math.isnan(value) or infinite or not low <= value <= high:
        wanted = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
        raise _wrong(method, name, "a number" if low == -math.inf else wanted, ValueError)


def integer(method: Any, name: str, low: float = -math.inf) -> None:
    value = getattr(method, name)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong(method, name, "an integer", TypeError)
    object.__setattr__(method, name, value.__index__())
    if value < low:
        raise _wrong(method, name, f"at least {low:g}", ValueError)


# Options that are one of a few words.
CHOICES = {
    "rule": ("PR1", "PR2", "PR3", "PR4", "mod"),
    "interpolation": ("nearest", "linear"),
    "quadrature": ("trapezoid", "right"),
}


def choice(method: Any, name: str) -> None:
    if getattr(method, name) not in CHOICES[name]:
        raise _wrong(method, name, f"one of {', '.join(map(repr, CHOICES[name]))}", ValueError)


def flags(method: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(method, name), bool):
            raise _wrong(method, name, "True or False", TypeError)


def check_baseline(method: Any) -> None:
    values = method.baseline if isinstance(method.baseline, tuple) else (method.baseline,)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise _wrong(method, "baseline", "a number or a tensor", TypeError)
        if not isinstance(value, Tensor) and not math.isfinite(value):
            raise _wrong(method, "baseline", "a finite number or a tensor", ValueError)
