"""Options of methods: a dataclass field with its help text, its range and its choices, and one check for all.

`option(98.0, "Percentile ...", low=0, high=100)` declares a field; `check(method)` raises an error that names
the option, the value given and what would be valid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import Field, field, fields
from typing import Any

from torch import Tensor


def option(
    default: Any, help: str, *, low: float = -math.inf, high: float = math.inf, choices: Sequence[str] = ()
) -> Any:
    """A field of a method. The command line, the explorer and the docs show its help text.

    A number must lie between `low` and `high`, both included; a string is one of `choices`.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": tuple(choices)}
    return field(default=default, metadata=metadata)


def offered(method: Any) -> list[Field[Any]]:
    """The fields whose values can be typed. Tensors can only be passed in Python."""
    return [each for each in fields(method) if "Tensor" not in _declared(each)]


def help_of(method: Any, name: str) -> str:
    return _field(method, name).metadata.get("help", "")


def choices_of(method: Any, name: str) -> tuple[str, ...]:
    return _field(method, name).metadata.get("choices", ())


def _field(method: Any, name: str) -> Any:
    return next(each for each in fields(method) if each.name == name)


# A baseline or a bound: a number or a tensor, or several of them.
Value = float | Tensor | Sequence[float | Tensor]
_TYPES = {"float": float, "int": int, "bool": bool, "Value": float}


def type_of(field: Field[Any]) -> type:
    """The type of a field's values when typed: a number, a flag, or otherwise a string."""
    return _TYPES.get(_declared(field).removesuffix(" | None"), str)


def _declared(field: Field[Any]) -> str:
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def check(method: Any) -> None:
    """Check every field against its declared type, range and choices."""
    for each in fields(method):
        declared, value = _declared(each), getattr(method, each.name)
        kind = declared.removesuffix(" | None")
        if value is None and kind != declared:
            continue
        if kind in ("int", "float"):
            value = _plain(value, kind)
            object.__setattr__(method, each.name, value)
        if wrong := _wrong(value, kind, each.metadata):
            raise wrong_option(method, each.name, *wrong)


def _plain(value: Any, kind: str) -> Any:
    """A scalar of numpy or torch as a Python number; other values unchanged."""
    if not isinstance(value, bool):
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            return value.__index__() if kind == "int" else value.item()
    return value


def _wrong(value: Any, kind: str, declared: Any) -> tuple[type[Exception], str] | None:
    """The kind of error and what would be valid; None if the value is valid."""
    choices, low, high = map(declared.get, ("choices", "low", "high"), ((), -math.inf, math.inf))
    if kind == "bool" and not isinstance(value, bool):
        return TypeError, "True or False"
    if kind == "str" and choices and value not in choices:
        return ValueError, f"one of {', '.join(map(repr, choices))}"
    if kind == "Method" and not hasattr(value, "maps"):
        return TypeError, "a method or its name"
    if kind not in ("int", "float"):
        return (TypeError, "a string") if kind == "str" and not isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else (int, float)):
        return TypeError, "an integer" if kind == "int" else "a number"
    if low <= value <= high and (low == -math.inf or value < math.inf):
        return None
    wanted = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
    return ValueError, wanted if low > -math.inf else "a number"


def check_baseline(method: Any) -> None:
    """A finite number or a tensor, or a tuple with one of them for each input."""
    values = method.baseline if isinstance(method.baseline, tuple) else (method.baseline,)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise wrong_option(method, "baseline", TypeError, "a number or a tensor")
        if not isinstance(value, Tensor) and not math.isfinite(value):
            raise wrong_option(method, "baseline", ValueError, "a finite number or a tensor")


def wrong_option(method: Any, name: str, kind: type[Exception], wanted: str) -> Exception:
    return kind(f"{type(method).__name__}: {name} must be {wanted}, not {getattr(method, name)!r:.60}")
