"""Encodes maps for the page, and draws the picture to download.

The page colours maps itself, using the library's colour tables: when q changes, only a map has to be sent.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from typing import Any

import numpy as np
from PIL import Image

from rectgrad import image
from rectgrad.app.query import Query
from rectgrad.explanation import Explanation
from rectgrad.methods.catalog import METHODS, describe

FULL = 32767  # the largest value of an encoded map


def plane(name: str, values: np.ndarray, query: Query) -> np.ndarray:
    """The map summed over its channels, after the final threshold for baselines if that was chosen."""
    flat = image.plane(values)
    cut = query.final_threshold and not METHODS[name].thresholds
    return image.final_threshold(flat) if cut else flat


def packed(flat: np.ndarray) -> tuple[dict[str, Any], bytes]:
    """Encodes a map: its size, largest value and whether it is signed; and its capped values as little-endian
    16-bit integers, row by row."""
    capped, limit = image.cap(flat)
    scaled = capped / limit if limit > 0 else capped
    described = {
        "height": flat.shape[0],
        "width": flat.shape[1],
        "limit": limit,
        "signed": image.scheme_of(flat).startswith("signed"),
    }
    return described, (scaled * FULL).round().astype("<i2").tobytes()


def message(content: dict[str, Any], data: bytes = b"") -> bytes:
    """One message of a stream: the lengths of its two parts, a JSON object, and binary data."""
    text = json.dumps(content, ensure_ascii=False).encode()
    return struct.pack("<II", len(text), len(data)) + text + data


def colour_tables() -> dict[str, list[list[int]]]:
    """The tables of 256 colours, by name."""
    return {name: image.colours(name).round().astype(int).tolist() for name in image.colour_names()}


def data_url(photo: Image.Image) -> str:
    stream = io.BytesIO()
    photo.save(stream, format="JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()


def picture(flat: np.ndarray, crop: Image.Image, query: Query) -> Image.Image:
    scheme = image.scheme_of(flat, query.dark) if query.colours == "auto" else query.colours
    if query.overlay > 0:
        return image.overlay(crop, flat, query.overlay, scheme)
    return image.colour(flat, scheme)


def sheet(found: list[Explanation], query: Query) -> Image.Image:
    """The picture to download: the explanation's own picture for a single map in default colours, otherwise
    the photo and the maps as the page shows them."""
    if len(found) == 1 and query.colours == "auto" and not query.final_threshold:
        return found[0].show(dark=query.dark)
    crop = found[0].photo
    assert crop is not None
    panels, notes = [image.Panel(crop, "photo", smooth=True)], []
    for name, each in zip(query.methods, found, strict=True):
        drawn = picture(plane(name, each.map.float().numpy(), query), crop, query)
        panels.append(image.Panel(drawn, describe(each.method)))
        notes += [f"{describe(each.method)}: {note}" for note in each.notes]
    height = crop.height * max(1, round(448 / crop.height))
    return image.sheet([panels], found[0].caption, cell=height, dark=query.dark, notes=notes)
