"""Options of methods: a dataclass field with its help text, its range and its choices, and one check for all.

`option(98.0, "Percentile ...", low=0, high=100)` declares a field; `check(method)` raises an error that names
the option, the value given and what would be valid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import Any

from torch import Tensor


def option(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: Sequence[str] = (),
) -> Any:
    """A field of a method. The command line, the explorer and the docs take its help text from here.

    A number lies between `low` and `high`, both included; a string is one of `choices`.
    """
    return field(
        default=default, metadata={"help": help, "low": low, "high": high, "choices": tuple(choices)}
    )


def help_of(method: Any, name: str) -> str:
    return _field(method, name).metadata.get("help", "")


def choices_of(method: Any, name: str) -> tuple[str, ...]:
    return _field(method, name).metadata.get("choices", ())


def _field(method: Any, name: str) -> Any:
    return next(each for each in fields(method) if each.name == name)


_TYPES = {"float": float, "int": int, "bool": bool, "Any": float}


def type_of(field: Field[Any]) -> type:
    """The type of a field's values as people type them: what is no number and no flag is a string."""
    return _TYPES.get(_declared(field).removesuffix(" | None"), str)


def _declared(field: Field[Any]) -> str:
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def check(method: Any) -> None:
    """Every field against its declared type, range and choices."""
    for each in fields(method):
        declared = _declared(each)
        kind = declared.removesuffix(" | None")
        if getattr(method, each.name) is None and kind != declared:
            continue
        checker = _CHECKS.get(kind)
        if checker is not None:
            checker(method, each.name, each.metadata)


def _number(method: Any, name: str, declared: Any) -> None:
    low, high = declared.get("low", -math.inf), declared.get("high", math.inf)
    value = getattr(method, name)
    if not isinstance(value, (int, float)) and hasattr(value, "item"):  # numpy's and torch's scalars
        with contextlib.suppress(ValueError, RuntimeError):
            value = value.item()
            object.__setattr__(method, name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(method, name, "a number", TypeError)
    bounded = low > -math.inf
    if math.isnan(value) or (bounded and math.isinf(value)) or not low <= value <= high:
        wanted = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
        raise _wrong(method, name, wanted if bounded else "a number", ValueError)


def _integer(method: Any, name: str, declared: Any) -> None:
    value, low = getattr(method, name), declared.get("low", -math.inf)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong(method, name, "an integer", TypeError)
    object.__setattr__(method, name, value.__index__())
    if value < low:
        raise _wrong(method, name, f"at least {low:g}", ValueError)


def _flag(method: Any, name: str, declared: Any) -> None:
    if not isinstance(getattr(method, name), bool):
        raise _wrong(method, name, "True or False", TypeError)


def _choice(method: Any, name: str, declared: Any) -> None:
    choices = declared.get("choices", ())
    if choices and getattr(method, name) not in choices:
        raise _wrong(method, name, f"one of {', '.join(map(repr, choices))}", ValueError)


_CHECKS: dict[str, Callable[[Any, str, Any], None]] = {
    "float": _number,
    "int": _integer,
    "bool": _flag,
    "str": _choice,
}


def check_baseline(method: Any) -> None:
    """A finite number or a tensor, or a tuple with one of them for each input."""
    values = method.baseline if isinstance(method.baseline, tuple) else (method.baseline,)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise _wrong(method, "baseline", "a number or a tensor", TypeError)
        if not isinstance(value, Tensor) and not math.isfinite(value):
            raise _wrong(method, "baseline", "a finite number or a tensor", ValueError)


def _wrong(method: Any, name: str, wanted: str, kind: Callable[[str], Exception]) -> Exception:
    return kind(f"{type(method).__name__}: {name} must be {wanted}, not {getattr(method, name)!r}")
