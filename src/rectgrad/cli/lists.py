"""rectgrad methods, rectgrad models"""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Annotated, Any

import typer

from rectgrad.cli import with_option_names
from rectgrad.methods import Method
from rectgrad.methods.catalog import METHODS, name_of
from rectgrad.methods.options import offered
from rectgrad.models import MODELS

methods_app = typer.Typer(add_completion=False, rich_markup_mode=None)
models_app = typer.Typer(add_completion=False, rich_markup_mode=None)

_TIE = "\xa0"  # keeps an option and its value on one line

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@methods_app.command("methods")
def methods(as_json: AsJson = False) -> None:
    """List the methods, what they do, and their options with default values.

    Example: rectgrad methods
    """
    if as_json:
        print(json.dumps({name: _options(method) for name, method in METHODS.items()}, default=str))
        return
    for name, method in METHODS.items():
        usual, own = type(method)(), _options(method)
        if method == usual:
            print(_indented(name, next(iter((method.__doc__ or "").strip().splitlines()), "")))
            if own:
                print(_indented("", "  ".join(_written(key, value) for key, value in own.items())))
        else:
            changed = [_written(key, value) for key, value in own.items() if value != getattr(usual, key)]
            print(_indented(name, f"{name_of(usual)} with {' '.join(changed)}."))


def _indented(name: str, text: str) -> str:
    """The text beside the name, wrapped to the width of the terminal."""
    width, indent = shutil.get_terminal_size((100, 24)).columns, " " * 22
    lines = textwrap.fill(
        text,
        max(width, 60),
        initial_indent=f"{name:22}",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return lines.replace(_TIE, " ")


def _written(key: str, value: Any) -> str:
    """An option with its default value, as it is written on the command line."""
    option = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}{_TIE}{'unset' if value is None else value}"


def _options(method: Method) -> dict[str, Any]:
    values = {field.name: getattr(method, field.name) for field in offered(method)}
    return {key: name_of(v) if isinstance(v, Method) else v for key, v in values.items()}


@models_app.command("models")
def models(as_json: AsJson = False) -> None:
    """List the models and how to obtain them.

    Example: rectgrad models
    """
    if as_json:
        listed = {
            n: {"description": s.description, "how": s.how, "extra": s.extra} for n, s in MODELS.items()
        }
        print(json.dumps(listed, ensure_ascii=False))
        return
    for name, source in MODELS.items():
        print(_indented(name, source.description))
        print(_indented("", with_option_names(source.how)))
