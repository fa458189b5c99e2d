"""Reads photos, streams folders of them, names results, writes files atomically, and starts Ray."""

from rectgrad.photos.errors import UnreadableImageError
from rectgrad.photos.reading import (
    MAX_PIXELS,
    SUFFIXES,
    decode,
    opened,
    pixels,
    read,
    to_rgb,
    upright_rgb,
)

__all__ = [
    "MAX_PIXELS",
    "SUFFIXES",
    "UnreadableImageError",
    "decode",
    "opened",
    "pixels",
    "read",
    "to_rgb",
    "upright_rgb",
]
