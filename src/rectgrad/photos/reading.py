"""Reads photos of all common formats and orientations as 8-bit RGB.

A file that cannot be read raises `UnreadableImageError` with a one-line reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rectgrad.photos.errors import UnreadableImageError
from rectgrad.photos.limits import AVIF_EXIF, COMMENT, STALL, STALLS, Limited, check_exif
from rectgrad.photos.names import readable

MAX_PIXELS = 150_000_000
SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .jp2 .avif .ico".split()
)
# Pillow's names of those formats. It knows others that start programs, as Ghostscript for PostScript.
FORMATS = frozenset("JPEG MPO PNG WEBP BMP DIB GIF TIFF PPM JPEG2000 AVIF ICO".split())
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def read(path: str | Path, enough: int | None = None, tick: Callable[[], None] | None = None) -> Image.Image:
    """Reads the photo at `path` as RGB and rotates it upright.

    A JPEG may be decoded at a reduced size, but neither side becomes shorter than `enough` pixels. `tick` is
    called regularly meanwhile, for a program in which others wait.
    """
    with opened(path) as file:
        return decode(file, enough, tick)


def pixels(path: str | Path, tick: Callable[[], None] | None = None) -> int:
    """The number of pixels of a photo according to its header; nothing is decoded."""
    with opened(path) as file, _open(file, Limited(file, tick)) as picture:
        return picture.width * picture.height


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes]]:
    """Opens the file of a photo. Errors while it is read or decoded name the file and the reason."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a device or a pipe may never end
            raise UnreadableImageError(
                "is a folder, not a photo" if os.path.isdir(path) else "not a regular file"
            )
        with open(path, "rb") as file:
            yield file
    except UnreadableImageError as error:
        raise UnreadableImageError(f"{readable(path)}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of any kind
        raise UnreadableImageError(f"{readable(path)}: {_reason(error)}") from None


def decode(file: IO[bytes], enough: int | None = None, tick: Callable[[], None] | None = None) -> Image.Image:
    """Like `read`, for a file from `opened`."""
    limited = Limited(file, tick)
    with _open(file, limited) as picture:
        count = picture.width * picture.height
        if tick is not None and picture.format == STALLS and count > STALL:
            raise UnreadableImageError(f"{STALLS} of more than {STALL / 1e6:g} megapixels; save it as JPEG")
        limited.allow(count)
        return upright_rgb(picture, enough)


def _open(file: IO[bytes], limited: Any) -> Image.Image:
    """`Image.open` for our formats and without its pixel limit, which Pillow only lets us change for the
    whole process.

    `upright_rgb` applies our own limit before any pixel is decoded.
    """
    prefix = limited.read(16)
    source: Any = limited
    if prefix[:2] in (b"P1", b"P2", b"P3"):  # Pillow takes minutes for a megabyte of comments
        limited.seek(0)
        source = io.BytesIO(COMMENT.sub(b"", limited.read()))
    elif prefix[4:8] == b"ftyp":
        limited.seek(0)
        source = io.BytesIO(AVIF_EXIF.sub(rb"\1-   ", limited.read()))
    for import_plugins in (Image.preinit, Image.init):  # the common formats first, then all of them
        import_plugins()
        for name in FORMATS.intersection(Image.ID):
            opener, accepts = Image.OPEN[name]
            try:
                accepted = accepts is None or accepts(prefix)
                if accepted and not isinstance(accepted, str):  # a string says why Pillow lacks the format
                    source.seek(0)
                    return opener(source, getattr(file, "name", ""))
            except (SyntaxError, IndexError, TypeError, struct.error):
                continue
    raise UnidentifiedImageError


def _reason(error: BaseException) -> str:
    if isinstance(error, _BOMB):
        return f"exceeds the limit of {MAX_PIXELS // 1_000_000} megapixels"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or not in a supported format"
    return f"cannot be read ({error or type(error).__name__})"


def upright_rgb(opened: Image.Image, enough: int | None = None) -> Image.Image:
    """Converts an opened picture to 8-bit RGB and rotates it by its EXIF orientation."""
    width, height = opened.size
    if width * height > MAX_PIXELS:
        limit = MAX_PIXELS // 1_000_000
        raise UnreadableImageError(f"{width} x {height} pixels exceed the limit of {limit} megapixels")
    if enough is not None and opened.format == "JPEG":
        opened.draft(None, (enough, enough))
    try:
        opened.load()  # there may be EXIF data after the pixels
    except MemoryError:
        raise UnreadableImageError(f"{width} x {height} pixels do not fit into memory") from None
    check_exif(max(len(opened.info.get(kind) or "") for kind in ("exif", "Raw profile type exif")))
    upright = ImageOps.exif_transpose(opened)
    return to_rgb(upright if upright is not None else opened)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Converts to 8-bit RGB: transparency is composited on white, 16-bit values are scaled, not clipped."""
    if picture.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(np.asarray(picture))).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        layer: Any = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Converts values to 8 bits: integers are 16-bit; floats are from 0 to 1, or are scaled to that range."""
    if values.dtype.kind in "iu":
        return (values.clip(0, 65535) / 257).round().astype(np.uint8)
    if not np.isfinite(values).all():
        raise UnreadableImageError("contains NaN or an infinity")
    low, high = (0.0, 1.0) if values.min() >= 0 and values.max() <= 1 else (values.min(), values.max())
    return ((values - low) / max(high - low, 1e-12) * 255).round().astype(np.uint8)
