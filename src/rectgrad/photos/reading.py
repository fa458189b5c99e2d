"""Photos from files: every usual format and orientation to 8-bit RGB, or one sentence about why not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 150_000_000
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .jp2 .avif .ico".split()
)


# One limit: Pillow would warn from a smaller size on. (To set it for one call is not safe with threads.)
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)


class UnreadableImageError(ValueError):
    """A file that is no image we can read; its text names the file and the reason."""


def read(path: str | Path, enough: int | None = None) -> Image.Image:
    """The photo at `path` as RGB, upright. `enough`: a JPEG whose sides are all longer than this many pixels
    may be decoded at a fraction of its size, never below it."""
    try:
        with Image.open(path) as opened:
            return _decoded(opened, enough)
    except UnreadableImageError as error:
        raise UnreadableImageError(f"{path}: {error}") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, KeyError, *_BOMB) as error:
        raise UnreadableImageError(f"{path}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, _BOMB):
        return f"more than {MAX_PIXELS // 1_000_000} megapixels"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    if isinstance(error, UnidentifiedImageError):
        return "not an image that can be read"
    return f"broken ({error or type(error).__name__})"


def _decoded(opened: Image.Image, enough: int | None) -> Image.Image:
    width, height = opened.size
    if width * height > MAX_PIXELS:
        raise UnreadableImageError(
            f"{width} x {height} pixels are more than {MAX_PIXELS // 1_000_000} megapixels"
        )
    if enough is not None and opened.format == "JPEG":
        opened.draft(None, (enough, enough))
    upright = ImageOps.exif_transpose(opened)
    return to_rgb(upright if upright is not None else opened)


def to_rgb(picture: Image.Image) -> Image.Image:
    """8-bit RGB: transparent parts on white, 16-bit values scaled, not cut off."""
    if picture.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(np.asarray(picture))).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        layer: Any = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Integers are 16-bit; floats lie between 0 and 1 or are stretched from their own range."""
    if values.dtype.kind in "iu":
        return (values.clip(0, 65535) / 257).round().astype(np.uint8)
    low, high = (0.0, 1.0) if values.min() >= 0 and values.max() <= 1 else (values.min(), values.max())
    return ((values - low) / max(high - low, 1e-12) * 255).round().astype(np.uint8)
