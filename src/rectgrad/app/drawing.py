"""Draws results as HTML, SVG and PNG. All text from users and files is escaped here."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from rectgrad import image
from rectgrad.app.query import Query
from rectgrad.app.service import Map, Prediction
from rectgrad.methods.catalog import METHODS, describe, title_of


def plane(name: str, values: np.ndarray, query: Query) -> np.ndarray:
    """The map summed over its channels, with the final threshold of the baselines if it was chosen."""
    flat = image.plane(values)
    cut = query.final_threshold and not METHODS[name].thresholds
    return image.final_threshold(flat) if cut else flat


def picture(flat: np.ndarray, crop: Image.Image, query: Query) -> Image.Image:
    scheme = image.scheme_of(flat, query.dark) if query.colours == "auto" else query.colours
    if query.overlay > 0:
        return image.overlay(crop, flat, query.overlay, scheme)
    return image.colour(flat, scheme)


def maps(prediction: Prediction, results: dict[str, Map], query: Query) -> str:
    """The photo and its maps side by side."""
    chosen = query.configured()
    panels = [_panel(prediction.crop, "photo", prediction.name, smooth=True)]
    for name, (values, seconds) in results.items():
        drawn = picture(plane(name, values, query), prediction.crop, query)
        panels.append(_panel(drawn, describe(chosen[name]), f"{seconds * 1000:.0f} ms"))
    return f'<div class="maps">{"".join(panels)}</div>'


def guesses(prediction: Prediction, question: str) -> str:
    """The top classes, below the question that the maps answer."""
    rows = "".join(
        f'<li><span>{escape(g.label)}</span><meter min="0" max="1" value="{g.probability:.4f}" '
        f'aria-label="{escape(g.label)}"></meter><b>{g.probability:.1%}</b></li>'
        for g in prediction.guesses
    )
    return f'<p class="question">{escape(question)}</p><ol class="guesses">{rows}</ol>'


def layers(results: Sequence[tuple[str, np.ndarray]], query: Query) -> str:
    """A strip of layers, from the output to the input."""
    if not results:
        return "<p class='hint'>The chosen methods have no layer attributions.</p>"
    scheme = "signed_dark" if query.dark else "signed"
    cells = [
        _panel(image.colour(values, scheme), name, " × ".join(map(str, values.shape)))
        for name, values in results
    ]
    return f'<div class="layers">{"".join(cells)}</div>'


def curve(points: Sequence[tuple[float, float]], q: float) -> str:
    """Gini index against q as SVG. The q axis is stretched towards 100, where maps change most."""
    place = {value: 40 + 300 * i / (len(points) - 1) for i, (value, _) in enumerate(points)}
    low = min(0.0, *(y for _, y in points))
    at = [(place[x], 120 - 105 * (y - low) / (1 - low)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>q {point[0]:g}: {point[1]:.2f}</title></circle>'
        for (x, y), point in zip(at, points, strict=True)
    )
    ticks = "".join(f'<text x="{place[v]:.1f}" y="136" text-anchor="middle">{v:g}</text>' for v, _ in points)
    here = float(np.interp(q, list(place), list(place.values())))
    description = ", ".join(f"{y:.2f} at {x:g}" for x, y in points)
    return (
        f'<svg class="curve" viewBox="0 0 352 150" role="img" aria-label="sparsity against q: {description}">'
        f'<line class="here" x1="{here:.1f}" x2="{here:.1f}" y1="12" y2="122"/>'
        f'<text x="34" y="18" text-anchor="end">1</text><text x="34" y="124" text-anchor="end">{low:g}</text>'
        f'<polyline points="{line}"/>{dots}{ticks}<text x="346" y="149" text-anchor="end">q</text></svg>'
    )


def sheet(prediction: Prediction, results: dict[str, Map], query: Query, caption: str) -> Image.Image:
    """The picture to download."""
    chosen = query.configured()
    height = prediction.crop.height * max(1, round(448 / prediction.crop.height))
    panels = [image.Panel(prediction.crop, "photo", smooth=True)]
    for name, (values, _) in results.items():
        panels.append(
            image.Panel(picture(plane(name, values, query), prediction.crop, query), describe(chosen[name]))
        )
    return image.sheet([panels], caption, cell=height, dark=query.dark)


def titles() -> list[tuple[str, str]]:
    """Titles and names of the methods, for a list."""
    return [(title_of(name), name) for name in METHODS]


def _panel(drawn: Image.Image, name: str, below: str, smooth: bool = False) -> str:
    kind = ' class="smooth"' if smooth else ""
    return (
        f'<figure><img{kind} src="{_data(drawn)}" alt="{escape(name)}" width="{drawn.width}" '
        f'height="{drawn.height}"><figcaption><b>{escape(name)}</b> <span>{escape(below)}</span>'
        "</figcaption></figure>"
    )


def _data(drawn: Any) -> str:
    stream = io.BytesIO()
    drawn.save(stream, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
