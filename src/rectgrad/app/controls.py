"""Controls for the fields of the methods: there is no second list of options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import gradio as gr

from rectgrad.app import ask
from rectgrad.app.desk import QS
from rectgrad.methods import Method
from rectgrad.methods.catalog import METHODS, title_of
from rectgrad.methods.options import choices_of, help_of

Key = tuple[str, str]  # a kind of method, a field


class Controls:
    """A group for each kind of method, shown when one of the kind is chosen. Made inside a page."""

    def __init__(self, chosen: list[str]) -> None:
        self.groups: dict[str, gr.Accordion] = {}
        self.fields: dict[Key, Any] = {}
        self._names: dict[str, list[str]] = {}
        for kind, names in ask.kinds():
            group = kind.__name__
            self._names[group] = names
            shown = bool(set(names) & set(chosen))
            with gr.Accordion(
                f"Options of {title_of(names[0])}", open=group == "RectGrad", visible=shown
            ) as box:
                for name, default in ask.defaults(kind).items():
                    self.fields[group, name] = control(kind, name, default)
            self.groups[group] = box

    def shown(self, chosen: list[str]) -> list[Any]:
        """Updates of the groups for a choice of methods."""
        return [gr.update(visible=bool(set(names) & set(chosen))) for names in self._names.values()]

    def options(self, values: list[Any]) -> dict[str, dict[str, Any]]:
        """What the controls say, in the order of `fields`."""
        found: dict[str, dict[str, Any]] = {}
        for (group, name), value in zip(self.fields, values, strict=True):
            found.setdefault(group, {})[name] = self._value(group, name, value)
        return found

    def _value(self, group: str, name: str, value: Any) -> Any:
        worded = isinstance(self.fields[group, name], gr.Dropdown)
        return value if worded or not isinstance(value, str) else _number(name, value)


def control(kind: type[Method], name: str, default: Any) -> Any:
    """The control for a method's field, by the type of its values."""
    label, info = name.replace("_", " "), help_of(kind, name).replace("*", r"\*")
    if name == "q":
        slider = gr.Slider(0, 100, default, step=0.5, label=label, info=info, elem_id="q", buttons=[])
        gr.HTML(_marks(), elem_id="q-marks")
        return slider
    if isinstance(default, bool):
        return gr.Checkbox(default, label=label, info=info)
    if choices := choices_of(kind, name):
        return gr.Dropdown(list(choices), value=default, label=label, info=info)
    if name == "over":
        simple = [(title_of(each), each) for each, method in METHODS.items() if "over" not in _fields(method)]
        return gr.Dropdown(simple, value=default, label=label, info=info)
    if default is None:  # a number box would make it 0
        return gr.Textbox("", label=label, info=info, placeholder="none", max_lines=1)
    whole = isinstance(default, int)
    return gr.Number(default, label=label, info=info, precision=0 if whole else None)


def _number(name: str, text: str) -> float | None:
    """The number in an optional number's box; None if it is empty."""
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise ValueError(f"{name} must be a number or empty, not {text!r}") from None


def _fields(method: Method) -> list[str]:
    return [field.name for field in fields(method)]


def _marks() -> str:
    """The paper's values under the slider."""
    ticks = "".join(f'<i style="left:{q}%">{"" if q in (95, 99) else q}</i>' for q in QS)
    return f'<div class="marks" aria-hidden="true" title="the paper\'s values">{ticks}</div>'
