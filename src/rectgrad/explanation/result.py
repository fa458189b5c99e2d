"""The explanation of one picture: its map, what the network said, and how far to trust the map."""

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

    map: (C, H, W), on the CPU. outputs: the network's raw outputs, (classes,). target: the class that is
    explained; None for a `contrast` or callable target. top: the five most probable classes, most probable
    first. photo: the crop that the network saw; None if a tensor was given to a model of your own. trace: the
    ops of the pass and the rule each one used. warnings: sentences. specificity: from 0 (the map is the same
    for any class) to 1; None where it is not defined or was not asked for. specificity_note: the reason, or a
    caution, in words.
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
    question: str  # what is explained, in words

    @property
    def caption(self) -> str:
        """The explained class and its probability."""
        return named(self.target) if self.target is not None else self.question

    @property
    def notes(self) -> tuple[str, ...]:
        """What belongs under every picture of this map: its specificity, a caution, the warnings."""
        note = f": {self.specificity_note}" if self.specificity_note else ""
        return (
            f"Specificity {value_of(self)}{note}.",
            *(f"Warning: {sentence}." for sentence in self.warnings),
        )

    @property
    def caution(self) -> str:
        """What to tell the reader of a map whose specificity is low; empty if it is not."""
        return self.specificity_note if self.specificity is not None and self.specificity < LOW else ""

    @property
    def settings(self) -> dict[str, object]:
        """The model, method and options that made the map, as JSON can hold them."""
        options = {f.name: plain_value(getattr(self.method, f.name)) for f in fields(self.method)}
        return {"model": self.model, "method": name_of(self.method), "options": options}

    def show(self, *, dark: bool = False, only: str | None = None, smooth: bool = False) -> Image.Image:
        """Photo, map and overlay side by side, under the class and above the specificity and the warnings.

        only: "map" or "overlay" draws one of them. smooth: blurs the map of the overlay, for slides.
        A notebook displays the picture if the call is the last line of a cell; in a script, call
        `.show().show()` to open it, or `save`.
        """
        flat = image.plane(self.map)
        tall = (self.photo or image.colour(flat)).height
        height = tall * max(1, round(448 / tall))  # a small map is enlarged by an integer factor
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
        row = panels.get(only or "all", panels["map"])
        return image.sheet([row], self.caption, cell=height, dark=dark, notes=self.notes)

    def overlay(self, *, dark: bool = False, smooth: bool = False) -> Image.Image:
        """The map over a pale copy of the photo, and nothing else; the map alone without a photo."""
        flat = image.plane(self.map)
        scheme = image.scheme_of(flat, dark)
        if self.photo is None:
            return image.colour(flat, scheme)
        return image.overlay(self.photo, image.blurred(flat) if smooth else flat, name=scheme)

    def save(self, path: str | Path) -> Path:
        """Writes the picture (.png), or the data (.npz: map, outputs, target, settings as JSON).

        Returns the path. The file appears complete or not at all.
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
        data = base64.b64encode(image.png(self.show())).decode()
        guesses = ", ".join(escape(named(guess)) for guess in self.top)
        alt = escape(" ".join((self.caption, *self.notes)), quote=True)
        return (
            f'<figure><img alt="{alt}" src="data:image/png;base64,{data}" style="max-width:100%">'
            f"<figcaption>Top classes: {guesses}</figcaption></figure>"
        )


def value_of(explanation: Explanation) -> str:
    """The specificity as it is printed; a dash if there is none."""
    return "–" if explanation.specificity is None else f"{explanation.specificity:.2f}"


def named(guess: Guess) -> str:
    """A class and its probability, where it has one."""
    return guess.label if math.isnan(guess.probability) else f"{guess.label}  {guess.probability:.0%}"


def _array(values: Tensor) -> np.ndarray:
    return (values.float() if values.element_size() < 4 else values).numpy()
