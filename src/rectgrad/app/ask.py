"""What a person asks of a photo, as a value: the controls make it, everything else answers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from rectgrad.engine.target import contrast
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS, as_method


@dataclass(frozen=True)
class Ask:
    """methods: names. options: for each kind of method (a class's name), its fields as the controls have
    them. target, versus: class indices; None: the top class, and no other."""

    methods: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    target: int | None = None
    versus: int | None = None
    final_threshold: bool = False
    colours: str = "auto"
    overlay: float = 0.0
    dark: bool = False

    def chosen(self) -> dict[str, Method]:
        """The methods by name. A control that stands at its field's default changes nothing: RectGrad PRR
        keeps its own pooling."""
        return {name: as_method(name, self.changed(name)) for name in self.methods}

    def changed(self, name: str) -> dict[str, Any]:
        """The options of a method whose controls were moved."""
        kind = type(as_method(name, {}))
        given = self.options.get(kind.__name__, {})
        return {key: value for key, value in given.items() if value != defaults(kind).get(key, value)}

    def explained(self, top: int) -> Any:
        """The target that a method is given."""
        target = top if self.target is None else self.target
        return target if self.versus is None or self.versus == target else contrast(target, self.versus)


def defaults(kind: type[Method]) -> dict[str, Any]:
    """Of a method's fields; a method as a default is given by its name."""
    return {field.name: _named(field.default) for field in fields(kind) if field.default is not MISSING}


def _named(value: Any) -> Any:
    if not isinstance(value, Method):
        return value
    return next(name for name, listed in METHODS.items() if listed == value)


def kinds() -> Iterator[tuple[type[Method], list[str]]]:
    """Each kind of method that has options, and the names under which it is listed."""
    listed: dict[type[Method], list[str]] = {}
    for name, method in METHODS.items():
        if fields(method):
            listed.setdefault(type(method), []).append(name)
    yield from listed.items()


def thresholded(name: str) -> bool:
    """Whether the final threshold of the paper's comparisons is for this method: RectGrad goes without."""
    return not isinstance(METHODS[name], RectGrad)
