"""Sheets: rows of titled panels on one page, drawn with Pillow (fast enough for thousands)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rectgrad.image.colour import Values, cap, colours, scheme_of

PAGE = {False: "#ffffff", True: "#101114"}
INK = {False: "#1c1d21", True: "#e8e6e1"}
FRAME = {False: "#e3e3e6", True: "#2c2d33"}
FAINT = {False: "#6b6d76", True: "#9a9ca6"}
GAP = 12
LINE = 20  # height of a line of notes
LONGEST = 200  # letters of a caption, which widens the page


class Panel(NamedTuple):
    """A picture with a title and an optional note in a lighter colour above it."""

    picture: Image.Image
    title: str = ""
    note: str = ""
    framed: bool = True
    smooth: bool = False  # interpolate when enlarged: for photos, not for maps


@functools.cache
def font(size: int) -> Any:
    """DejaVu Sans from matplotlib, which covers most alphabets; else the default font of Pillow."""
    spec = importlib.util.find_spec("matplotlib")
    place = Path(spec.origin).parent if spec and spec.origin else Path()
    path = place / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size - 1) if path.exists() else ImageFont.load_default(size=size)


@functools.lru_cache(maxsize=128)  # the sheets of a folder share most texts: a quarter of the time of a sheet
def _mask(text: str, size: int) -> Image.Image:
    *_, right, bottom = font(size).getbbox(text)
    mask = Image.new("L", (int(right), int(bottom)))
    ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=font(size))
    return mask


def _write(page: Image.Image, place: tuple[int, int], text: str, size: int, colour: str) -> None:
    if text:
        page.paste(colour, place, _mask(text, size))


def bar(values: Values, height: int, dark: bool = False, name: str | None = None) -> Image.Image:
    """A colour bar for `colour(values)`, labelled with the limits of the capped map."""
    name = name or scheme_of(values, dark)
    limit = cap(values)[1]
    low = -limit if name.startswith("signed") else 0.0
    picture = Image.new("RGB", (92, height), PAGE[dark])
    strip = np.repeat(colours(name, max(height - 16, 2))[::-1, None], 14, axis=1).round().astype(np.uint8)
    picture.paste(Image.fromarray(strip), (0, 8))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 8, 13, height - 9), outline=FAINT[dark])
    ticks = {8: limit, height - 9: low} | ({height // 2: 0.0} if low else {})
    for y, value in ticks.items():
        draw.text((20, y), _number(value), fill=FAINT[dark], font=font(12), anchor="lm")
    return picture


def _number(value: float) -> str:
    return f"{value:.2g}"


def enlarged(height: int, about: int) -> int:
    """The height at which a small picture is drawn: the multiple that is closest to `about`."""
    return height * max(1, round(about / height))


def sheet(
    rows: Sequence[Sequence[Panel]],
    caption: str = "",
    *,
    labels: Sequence[str] = (),
    cell: int | None = None,
    dark: bool = False,
    notes: Sequence[str] = (),
) -> Image.Image:
    """Draws rows of panels, with `labels` to the left of the rows, `caption` above everything and `notes`
    below. `cell` is the height of the pictures (None: that of the tallest)."""
    height = cell or max(panel.picture.height for row in rows for panel in row)
    scaled = [[_scaled(panel, height) for panel in row] for row in rows]
    left = 0 if not labels else GAP + max(int(font(14).getlength(label)) for label in labels)
    titles = 44 if any(panel.note for row in rows for panel in row) else 24
    top = GAP + (30 if caption else 0)
    widths = _columns(scaled)
    width = left + GAP + sum(w + GAP for w in widths)
    caption = caption if len(caption) <= LONGEST else f"{caption[:LONGEST]}…"
    width = max(width, int(font(18).getlength(caption)) + 2 * GAP)
    lines = [line for note in notes for line in _wrapped(note, width - 2 * GAP)]
    bottom = top + len(rows) * (titles + height + GAP)
    below = len(lines) * LINE + GAP if lines else 0
    page = Image.new("RGB", (width, bottom + below), PAGE[dark])
    draw = ImageDraw.Draw(page)
    _write(page, (GAP, GAP), caption, 18, INK[dark])
    for r, row in enumerate(scaled):
        y = top + r * (titles + height + GAP)
        if labels:
            draw.text((GAP, y + titles + height // 2), labels[r], fill=INK[dark], font=font(14), anchor="lm")
        for panel, x in zip(row, _starts(widths, left + GAP), strict=False):
            _draw(draw, page, panel, x, y, titles, dark)
    for i, line in enumerate(lines):
        _write(page, (GAP, bottom + i * LINE), line, 14, INK[dark])
    return page


@functools.lru_cache(maxsize=256)  # the sheets of a folder have the same few notes
def _wrapped(text: str, width: int) -> tuple[str, ...]:
    """Wraps the text into lines that fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font(14).getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return tuple(lines)


def _scaled(panel: Panel, height: int) -> Panel:
    picture = panel.picture.convert("RGB")
    if picture.height != height:
        width = max(1, round(picture.width * height / picture.height))
        whole_pixels = height > picture.height and not panel.smooth
        kind = Image.Resampling.NEAREST if whole_pixels else Image.Resampling.BICUBIC
        picture = picture.resize((width, height), kind)
    return panel._replace(picture=picture)


def _columns(rows: Sequence[Sequence[Panel]]) -> list[int]:
    """The width of each column: its widest picture or title."""
    count = max(len(row) for row in rows)
    return [max(_width(row[i]) for row in rows if i < len(row)) for i in range(count)]


def _width(panel: Panel) -> int:
    lines = font(14).getlength(panel.title), font(12).getlength(panel.note)
    return max(panel.picture.width, *(int(line) for line in lines))


def _starts(widths: Sequence[int], x: int) -> list[int]:
    starts = []
    for width in widths:
        starts.append(x)
        x += width + GAP
    return starts


def _draw(draw: Any, page: Image.Image, panel: Panel, x: int, y: int, titles: int, dark: bool) -> None:
    _write(page, (x, y), panel.title, 14, INK[dark])
    _write(page, (x, y + 21), panel.note, 12, FAINT[dark])
    page.paste(panel.picture, (x, y + titles))
    if panel.framed:
        box = (x - 1, y + titles - 1, x + panel.picture.width, y + titles + panel.picture.height)
        draw.rectangle(box, outline=FRAME[dark])
