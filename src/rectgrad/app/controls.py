"""Controls for the options of the methods, generated from the fields of the methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import gradio as gr

from rectgrad.app import query
from rectgrad.app.service import QS
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS, title_of
from rectgrad.methods.options import choices_of, help_of, type_of

Key = tuple[str, str]  # class name of a method, field name


class Controls:
    """One group per class of methods, visible while a method of that class is chosen.

    Must be created inside a `gr.Blocks` context.
    """

    def __init__(self, chosen: list[str]) -> None:
        self.groups: dict[str, gr.Accordion] = {}
        self.fields: dict[Key, Any] = {}
        self._kinds: dict[str, type[Method]] = {}
        self._names: dict[str, list[str]] = {}
        for kind, names in query.kinds():
            group = kind.__name__
            self._kinds[group], self._names[group] = kind, names
            visible = bool(set(names) & set(chosen))
            title = f"Options of {title_of(names[0])}"
            with gr.Accordion(title, open=kind is RectGrad, visible=visible) as box:
                for name, default in query.defaults(kind).items():
                    self.fields[group, name] = control(kind, name, default)
            self.groups[group] = box

    def shown(self, chosen: list[str]) -> list[Any]:
        """Updates that show the groups of the chosen methods and hide the others."""
        return [gr.update(visible=bool(set(names) & set(chosen))) for names in self._names.values()]

    def options(self, values: list[Any]) -> dict[str, dict[str, Any]]:
        """Converts the values of `fields`, in order, to options by class of methods."""
        options: dict[str, dict[str, Any]] = {}
        for (group, name), value in zip(self.fields, values, strict=True):
            text = isinstance(self.fields[group, name], gr.Textbox)
            converted = parse(self._kinds[group], name, value) if text else value
            options.setdefault(group, {})[name] = converted
        return options


def control(kind: type[Method], name: str, default: Any) -> Any:
    """A control that suits the field: slider, checkbox, list, number or text."""
    label, info = name.replace("_", " "), help_of(kind, name).replace("*", r"\*")
    if kind is RectGrad and name == "q":
        slider = gr.Slider(0, 100, default, step=0.5, label=label, info=info, elem_id="q", buttons=[])
        gr.HTML(_ticks(), elem_id="q-marks")
        return slider
    if isinstance(default, bool):
        return gr.Checkbox(default, label=label, info=info)
    if choices := choices_of(kind, name):
        listed: list[Any] = [*([("none", None)] if default is None else []), *((c, c) for c in choices)]
        return gr.Dropdown(listed, value=default, label=label, info=info)
    if name == "over":
        inner = [(title_of(each), each) for each, method in METHODS.items() if "over" not in _names(method)]
        return gr.Dropdown(inner, value=default, label=label, info=info)
    if isinstance(default, (int, float)):
        return gr.Number(default, label=label, info=info, precision=0 if isinstance(default, int) else None)
    # A number box cannot be empty: it would turn None into 0.
    return gr.Textbox(_text(default), label=label, info=info, placeholder="none", max_lines=1)


def parse(kind: type[Method], name: str, text: str | None) -> Any:
    """The value of a text box: the default if it was not changed, None if it is empty."""
    text = (text or "").strip()
    default = query.defaults(kind)[name]
    if text == _text(default):
        return default
    if not text or type_of(next(field for field in fields(kind) if field.name == name)) is str:
        return text or None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or empty, not {text!r}") from None


def _text(default: Any) -> str:
    return "" if default is None else str(default)


def _names(method: Method) -> list[str]:
    return [field.name for field in fields(method)]


def _ticks() -> str:
    """The paper's values of q below the slider."""
    ticks = "".join(f'<i style="left:{q}%">{"" if q in (95, 99) else q}</i>' for q in QS)
    return f'<div class="marks" aria-hidden="true" title="values in the paper">{ticks}</div>'
