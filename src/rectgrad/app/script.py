"""The Python lines that make the maps of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rectgrad.app.ask import Ask
from rectgrad.app.desk import Seen
from rectgrad.engine.target import contrast


def lines(seen: Seen, ask: Ask, loading: str) -> str:
    """A file to run beside the photo; `maps` are those of the page, bit for bit on the same machine.
    loading: the arguments of `load`."""
    target = ask.explained(seen.top)
    said = f"rectgrad.{target!r}" if isinstance(target, contrast) else repr(target)
    calls = [_call(name, ask.changed(name), said) for name in ask.methods]
    found = "\n".join(f"    {name!r}: {call}," for name, call in zip(ask.methods, calls, strict=True))
    return f"""import rectgrad
from rectgrad import photos

model = rectgrad.models.load({loading})
photo = model.crop(photos.read({Path(seen.name).name!r}))
x = model.prepare(photo).unsqueeze(0)
maps = {{
{found}
}}
"""


def _call(name: str, options: dict[str, Any], target: str) -> str:
    extra = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"rectgrad.attribute(model.module, x, {name!r}, target={target}{extra})"
