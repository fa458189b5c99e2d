"""Describes the methods and their options to the page, and parses the values that it sends back.

Everything is derived from the fields of the methods, so a new method needs no change here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rectgrad.app import query
from rectgrad.methods import Method
from rectgrad.methods.catalog import METHODS, name_of, title_of
from rectgrad.methods.options import choices_of, help_of, offered, type_of

EVALUATIONS = 10_000  # limit per map, so that no visitor can keep the server busy for hours
CELLS = 32  # limit of the side of a grid, of which there may be as many: their memory


def methods() -> list[dict[str, Any]]:
    """Each method: its name, title, one line of help, class, and whether it needs many passes."""
    return [
        {
            "name": name,
            "title": title_of(name),
            "help": _help(method),
            "kind": type(method).__name__,
            "slow": is_slow(method),
        }
        for name, method in METHODS.items()
        if method.ready
    ]


def _help(method: Method) -> str:
    """The first line of the class's docstring; for a variant, the help of the options that it changes."""
    default = query.defaults(type(method))
    varied = [field.name for field in fields(method) if getattr(method, field.name) != default[field.name]]
    varied = [name for name in varied if not isinstance(getattr(method, name), Method)]
    if varied:
        return " ".join(help_of(method, name) for name in varied)
    return (type(method).__doc__ or "").strip().partition("\n")[0]


def options() -> dict[str, list[dict[str, Any]]]:
    """For each class of methods, its options: name, label, help, type of control, default, range, choices."""
    return {kind.__name__: _described(kind) for kind, _ in query.kinds()}


def _described(kind: type[Method]) -> list[dict[str, Any]]:
    default = query.defaults(kind)
    described = []
    for field in offered(kind):
        low, high = (field.metadata.get(end, math.inf) for end in ("low", "high"))
        control, choices = _control(kind, field.name, default[field.name])
        described.append(
            {
                "name": field.name,
                "label": field.name.replace("_", " "),
                "help": help_of(kind, field.name),
                "control": control,
                "default": default[field.name],
                "low": low if math.isfinite(low) else None,
                "high": high if math.isfinite(high) else None,
                "choices": choices,
            }
        )
    return described


def _control(kind: type[Method], name: str, default: Any) -> tuple[str, list[dict[str, Any]]]:
    """The type of control for a field, and its choices if it is a list."""
    if isinstance(default, bool):
        return "checkbox", []
    if choices := choices_of(kind, name):
        empty = [{"value": None, "label": "none"}] if default is None else []
        return "list", [*empty, *({"value": choice, "label": choice} for choice in choices)]
    if name == "over":
        inner = [each for each, method in METHODS.items() if not is_slow(method)]
        return "list", [{"value": each, "label": title_of(each)} for each in inner]
    if isinstance(default, (int, float)):
        return "integer" if isinstance(default, int) else "number", []
    return "text", []


def parse(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options that a page sent, by class of methods and name, with the types of the fields."""
    listed = {kind.__name__: kind for kind, _ in query.kinds()}
    for group in given:
        if group not in listed:
            raise ValueError(f"unknown class of methods {group!r}; classes are {', '.join(listed)}")
    return {
        group: {name: _value(listed[group], name, v) for name, v in values.items()}
        for group, values in given.items()
    }


def _value(kind: type[Method], name: str, value: Any) -> Any:
    field = next((each for each in offered(kind) if each.name == name), None)
    if field is None:
        raise ValueError(f"{kind.__name__} has no option {name!r}")
    if isinstance(value, str):
        return _from_text(name, value.strip(), type_of(field), query.defaults(kind)[name])
    if type_of(field) is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # JavaScript has a single number type
    return value


def _from_text(name: str, text: str, kind: type, default: Any) -> Any:
    """The value of a text box: the default if it was not changed, None if it is empty."""
    if text == ("" if default is None else str(default)):
        return default
    if not text or kind is str:
        return text or None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or empty, not {text!r}") from None


def is_slow(method: Method) -> bool:
    """Whether a map needs many passes."""
    return method.runs_model and not method.one_backward


def evaluations(method: Method) -> int | None:
    """How many inputs a method with many passes evaluates; None if that is unknown."""
    named = (getattr(method, name, None) for name in ("samples", "steps", "masks"))
    return next((count for count in named if isinstance(count, int)), None) if is_slow(method) else None


def check(method: Method) -> None:
    """Raises an error for settings that take too much time or memory. The page does not offer them, but any
    client can send them."""
    check_count(evaluations(method))
    over, cells = getattr(method, "over", None), getattr(method, "cells", 0)
    if isinstance(over, Method) and is_slow(over):
        raise ValueError(f"the explorer does not combine {name_of(method)} with {name_of(over)}")
    if cells > CELLS:
        raise ValueError(f"the explorer allows at most {CELLS} cells, not {cells}")


def check_count(count: int | None) -> None:
    if count is not None and count > EVALUATIONS:
        raise ValueError(f"the explorer evaluates at most {EVALUATIONS} inputs for one map, not {count}")
