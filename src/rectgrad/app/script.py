"""Generates the Python code that reproduces the maps of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rectgrad.app.query import Query
from rectgrad.app.service import Prediction
from rectgrad.engine.target import contrast


def lines(prediction: Prediction, query: Query, load_arguments: str) -> str:
    """A script to run in the folder of the photo. Its `maps` equal those of the page bit for bit on the same
    machine. `load_arguments` are the arguments of `rectgrad.models.load`."""
    target = query.resolve_target(prediction.top)
    target_code = f"rectgrad.{target!r}" if isinstance(target, contrast) else repr(target)
    calls = [_call(name, query.changed(name), target_code) for name in query.methods]
    entries = "\n".join(f"    {name!r}: {call}," for name, call in zip(query.methods, calls, strict=True))
    return f"""import rectgrad
from rectgrad import photos

model = rectgrad.models.load({load_arguments})
photo = model.crop(photos.read({Path(prediction.name).name!r}))
x = model.prepare(photo).unsqueeze(0)
maps = {{
{entries}
}}
"""


def _call(name: str, options: dict[str, Any], target: str) -> str:
    extra = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"rectgrad.attribute(model.module, x, {name!r}, target={target}{extra})"
