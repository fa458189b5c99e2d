"""Reading photos, streaming folders of them, naming results, writing files atomically, and running on Ray."""

from rectgrad.photos.reading import (
    MAX_PIXELS,
    SUFFIXES,
    UnreadableImageError,
    decode,
    opened,
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
    "read",
    "to_rgb",
    "upright_rgb",
]
