"""Generates the Python code that reproduces the maps of the page and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rectgrad.app.query import Query
from rectgrad.app.service import Prediction
from rectgrad.engine.target import contrast


def lines(prediction: Prediction, query: Query, load_arguments: str) -> str:
    """A script to run in the folder of the photo. It saves a picture of each map.

    On the same machine, its `maps` equal those of the page bit for bit. `load_arguments` are the arguments of
    `rectgrad.models.load`.
    """
    target = query.resolve_target(prediction.top)
    target_code = f"rectgrad.{target!r}" if isinstance(target, contrast) else repr(target)
    photo = Path(prediction.name).name
    calls = [_call(name, query.changed(name), target_code) for name in query.methods]
    entries = "\n".join(f"    {name!r}: {call}," for name, call in zip(query.methods, calls, strict=True))
    return f"""import rectgrad

photo = {photo!r}
model = rectgrad.models.load({load_arguments})
explained = {{
{entries}
}}
maps = {{name: each.map for name, each in explained.items()}}
for name, each in explained.items():
    print(each)
    print(each.save({Path(photo).stem!r} + f"-{{name}}.png"))
"""


def _call(name: str, options: dict[str, Any], target: str) -> str:
    extra = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"rectgrad.explain(photo, model, {name!r}, target={target}{extra})"
