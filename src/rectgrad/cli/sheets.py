"""Several maps of one photo on one sheet, for compare, sweep and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from PIL import Image

from rectgrad.api import record
from rectgrad.cli.run import Drawn, Json, array, summary_of_several
from rectgrad.explanation import Explanation, Network, Prepared, explain_record
from rectgrad.methods import Method
from rectgrad.methods.catalog import plain_value

Found = dict[str, Explanation]  # the explanations of one photo, by name of the method
CELL = 224  # pixels, about: the height of a map on a sheet
_THUMBNAIL = 720  # pixels


def by_methods(
    network: Network,
    batch: list[Prepared],
    methods: Mapping[str, Method],
    target: int | None,
    specificity: bool | None = None,
) -> list[Found]:
    """Explains each photo with each method, using a single forward pass."""
    inputs = torch.stack([photo.inputs for photo in batch]).to(network.device)
    recorded = record(network.module, inputs)
    found: list[Found] = [{} for _ in batch]
    for name, method in methods.items():
        for own, each in zip(
            found, explain_record(recorded, network, batch, method, target, specificity), strict=True
        ):
            own[name] = each
    return found


def methods_settings(work: Any, command: str) -> Json:
    """The settings of a command with several methods: the options of each method, and the command's own."""
    own = {f.name: getattr(work, f.name) for f in fields(work) if f.name != "methods"}
    options = {
        name: {f.name: plain_value(getattr(method, f.name)) for f in fields(method)}
        for name, method in work.methods.items()
    }
    return {"command": command, "methods": list(work.methods), "options": options, **own}


def drawn(sheet: Image.Image, answer: Found, maps: Any = None) -> Drawn:
    """A sheet with its record. maps: the raw maps to save; default: the map of each method."""
    small = sheet.copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    arrays = {name: array(each) for name, each in answer.items()} if maps is None else maps
    return Drawn(sheet, small, arrays, summary_of_several(answer))


def caution_lines(found: Mapping[str, Explanation]) -> list[str]:
    """The text under a sheet of several maps, by title: which ones have a low specificity or warnings."""
    low = [title for title, each in found.items() if each.caution]
    lines = [f"Low specificity ({_which(low, found)}): {found[low[0]].caution}."] if low else []
    for message in dict.fromkeys(message for each in found.values() for message in each.warnings):
        warned = [title for title, each in found.items() if message in each.warnings]
        lines.append(f"Warning ({_which(warned, found)}): {message}.")
    return lines


def _which(titles: list[str], found: Mapping[str, Explanation]) -> str:
    return "all maps" if len(titles) == len(found) > 1 else ", ".join(titles)
