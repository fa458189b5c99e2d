"""The state of the explorer's controls: which methods, options and classes were chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from rectgrad.engine.target import contrast
from rectgrad.methods import Method
from rectgrad.methods.catalog import METHODS, as_method, name_of
from rectgrad.methods.options import offered


@dataclass(frozen=True)
class Query:
    """Methods by name, and for each class of methods the values of its controls.

    `target` and `versus` are class indices; None means the top class and no second class.
    """

    methods: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    target: int | None = None
    versus: int | None = None
    final_threshold: bool = False
    colours: str = "auto"
    overlay: float = 0.0
    dark: bool = False

    def configured(self) -> dict[str, Method]:
        """The chosen methods by name, with their options."""
        return {name: as_method(name, self.changed(name)) for name in self.methods}

    def changed(self, name: str) -> dict[str, Any]:
        """The options of a method that differ from the defaults of its class.

        Only those are applied, so RectGrad PRR keeps `prr=True` although its control shows the default.
        """
        kind = type(as_method(name, {}))
        default = defaults(kind)
        given = self.options.get(kind.__name__, {})
        return {key: v for key, v in given.items() if v is not default[key] and v != default[key]}

    def resolve_target(self, top: int) -> Any:
        """The target to explain, given the top class."""
        target = top if self.target is None else self.target
        return target if self.versus is None or self.versus == target else contrast(target, self.versus)


def defaults(kind: type[Method]) -> dict[str, Any]:
    """The defaults of the fields of a class of methods. A method is represented by its name."""
    listed = next(method for method in METHODS.values() if type(method) is kind)
    values = {f.name: getattr(listed, f.name) if f.default is MISSING else f.default for f in fields(kind)}
    return {key: name_of(value) if isinstance(value, Method) else value for key, value in values.items()}


def kinds() -> Iterator[tuple[type[Method], list[str]]]:
    """Each class of methods that has options, with the names under which it is listed."""
    listed: dict[type[Method], list[str]] = {}
    for name, method in METHODS.items():
        if offered(method):
            listed.setdefault(type(method), []).append(name)
    yield from listed.items()
