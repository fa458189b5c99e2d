"""rectgrad methods, rectgrad models"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rectgrad.cli import with_option_names
from rectgrad.methods import Method
from rectgrad.methods.catalog import METHODS, name_of
from rectgrad.methods.options import offered
from rectgrad.models import MODELS

methods_app = typer.Typer(add_completion=False, rich_markup_mode=None)
models_app = typer.Typer(add_completion=False, rich_markup_mode=None)

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
        print(f"{name:21} {next(iter((method.__doc__ or '').strip().splitlines()), '')}")
        options = "  ".join(f"--{key.replace('_', '-')} {value}" for key, value in _options(method).items())
        if options:
            print(f"{'':22}{options}")


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
        print(f"{name:22}{source.description}")
        print(f"{'':22}{with_option_names(source.how)}")
