"""The explanation of one picture: its map, the network's answer, and how specific the map is."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from rectgrad import image
from rectgrad.engine.trace import Trace
from rectgrad.explanation.trust import LOW
from rectgrad.methods import Method
from rectgrad.methods.catalog import describe, name_of, plain_value
from rectgrad.models import Guess
from rectgrad.photos import files

PICTURES = ("map", "overlay")  # what `show` can draw alone


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What a network looked at in one picture. A notebook displays it; `show` and `save` draw it.

    map: (C, H, W), on the CPU. outputs: the network's raw outputs, (classes,). target: the explained class;
    None for a `contrast` or callable target. top: the five most probable classes, most probable first.
    photo: the crop that the network saw; None if you passed a tensor to your own model. trace: the ops of the
    pass and the rule each one used. warnings: their messages. specificity: from 0 (the map is the same for
    any class) to 1; None if it is not defined or was not computed. specificity_note: the reason for that, or
    a caution.
    """

    map: Tensor
    outputs: Tensor
    target: Guess | None
    top: tuple[Guess, ...]
    method: Method
    photo: Image.Image | None
    trace: Trace
    warnings: tuple[str, ...]
    specificity: float | None
    specificity_note: str
    model: str  # its name
    question: str  # a description of what is explained

    @property
    def caption(self) -> str:
        """The explained class and its probability."""
        return named(self.target) if self.target is not None else self.question

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines under every picture of this map: specificity, caution, class layer and warnings."""
        note = f": {self.specificity_note}" if self.specificity_note else ""
        gated = [i for i, row in enumerate(self.trace.rows) if row.rule.endswith("class layer")]
        layers = [self.trace.layers()[i] for i in gated]  # usually none: names are not computed
        return (
            f"Specificity {value_of(self)}{note}.",
            *([f"Class layer: {' and '.join(layers)}."] if layers else []),
            *(f"Warning: {message}." for message in self.warnings),
        )

    @property
    def caution(self) -> str:
        """A caution for readers of the map if its specificity is low; otherwise empty."""
        return self.specificity_note if self.specificity is not None and self.specificity < LOW else ""

    @property
    def settings(self) -> dict[str, object]:
        """The model, method and options that produced the map, as JSON values."""
        options = {f.name: plain_value(getattr(self.method, f.name)) for f in fields(self.method)}
        return {"model": self.model, "method": name_of(self.method), "options": options}

    def show(self, *, dark: bool = False, only: str | None = None, smooth: bool = False) -> Image.Image:
        """Draws photo, map and overlay side by side, with the class above and specificity and warnings below.

        only: "map" or "overlay" draws only that panel. smooth: blurs the map in the overlay, for slides.
        A notebook displays the picture if the call is the last line of a cell; in a script, call
        `.show().show()` to open it, or `save`.
        """
        row, height = self._panels(448, dark, only, smooth)
        return image.sheet([row], self.caption, cell=height, dark=dark, notes=self.notes)

    def _panels(
        self, size: int, dark: bool = False, only: str | None = None, smooth: bool = False
    ) -> tuple[list[image.Panel], int]:
        """What `show` draws side by side, and the height: about `size`."""
        if self.map.dim() not in (2, 3):
            raise ValueError(
                f"a map of shape {tuple(self.map.shape)} cannot be drawn; its values are in `.map`, and "
                "save('map.npz') stores them"
            )
        flat = image.plane(self.map)
        height = image.enlarged((self.photo or image.colour(flat)).height, size)
        scheme = image.scheme_of(flat, dark)
        drawn = image.Panel(image.colour(flat, scheme), describe(self.method))
        bar = image.Panel(image.bar(flat, height, dark, scheme), framed=False)
        panels = {"map": [drawn, bar]}
        if self.photo is not None:
            photo = image.Panel(self.photo, "photo", smooth=True)
            overlay = image.Panel(
                self.overlay(dark=dark, smooth=smooth),
                "overlay, smoothed" if smooth else "overlay",
                smooth=smooth,
            )
            panels |= {"overlay": [overlay], "all": [photo, drawn, overlay, bar]}
        if only not in (None, *PICTURES):
            raise ValueError(f"only must be {' or '.join(map(repr, PICTURES))}, not {only!r}")
        return panels.get(only or "all", panels["map"]), height

    def overlay(self, *, dark: bool = False, smooth: bool = False) -> Image.Image:
        """Draws the map over a pale copy of the photo, or the map alone if there is no photo."""
        flat = image.plane(self.map)
        scheme = image.scheme_of(flat, dark)
        if self.photo is None:
            return image.colour(flat, scheme)
        return image.overlay(self.photo, image.blurred(flat) if smooth else flat, name=scheme)

    def save(self, path: str | Path) -> Path:
        """Writes the picture (.png), or the data (.npz: map, outputs, target, settings as JSON).

        Returns the path. The file is written atomically.
        """
        path = Path(path)
        if path.suffix == ".png":
            files.save_picture(self.show(), path)
        elif path.suffix == ".npz":
            index = -1 if self.target is None else self.target.index
            with files.atomic(path) as part, open(part, "wb") as stream:
                np.savez_compressed(
                    stream,
                    map=_array(self.map),
                    outputs=_array(self.outputs),
                    target=np.array(index),
                    settings=np.array(json.dumps(self.settings, ensure_ascii=False)),
                )
        else:
            raise ValueError(f"save takes a path that ends in .png or .npz, not {str(path)!r}")
        return path

    def __repr__(self) -> str:
        parts = [
            f"{self.caption!r} by {describe(self.method)} of {self.model}",
            f"map {' × '.join(map(str, self.map.shape))}",
            f"specificity {value_of(self)}",
        ]
        if self.warnings:
            parts.append(f"{len(self.warnings)} warning{'s' if len(self.warnings) > 1 else ''}")
        return f"Explanation({', '.join(parts)})"

    def _repr_html_(self) -> str:
        if self.map.dim() not in (2, 3):  # not a picture
            return f"<pre>{escape(repr(self))}</pre>"
        row, height = self._panels(224)
        data = base64.b64encode(image.png(image.sheet([row], cell=height))).decode()
        alt = escape(f"What the network looked at: {self.caption}", quote=True)
        picture = f'<img alt="{alt}" src="data:image/png;base64,{data}" style="max-width:100%">'
        top = f"Top classes: {', '.join(map(named, self.top))}"
        below = "<br>".join(map(escape, (*self.notes, *([top] if self.top else ()))))
        caption = f"<strong>{escape(self.caption)}</strong>"
        return f"<div>{caption}<br>{picture}<br>{below}</div>"


def value_of(explanation: Explanation) -> str:
    """The specificity as text; a dash if there is none."""
    return "–" if explanation.specificity is None else f"{explanation.specificity:.2f}"


def named(guess: Guess) -> str:
    """A class and its probability, if it has one."""
    return guess.label if math.isnan(guess.probability) else f"{guess.label}  {guess.probability:.0%}"


def _array(values: Tensor) -> np.ndarray:
    return (values.float() if values.element_size() < 4 else values).numpy()
