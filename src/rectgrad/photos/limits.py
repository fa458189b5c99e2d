"""Limits for a file that a decoder reads: a small one can take it hours, or more memory than there is.

The time of the decoder is checked whenever it reads. Pillow keeps every tag of TIFF and EXIF in memory, and
many tags can share their bytes, so what it reads is limited too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import IO, Any

from rectgrad.photos.errors import UnreadableImageError

SECONDS = 10.0  # of computing to read a header
SECONDS_PER_MEGAPIXEL = 2.0  # and for the pixels
HEADER = 2**28  # bytes to read for a header, besides the file itself
PIXELS = 2**30  # and for the pixels: parts of a picture can share their bytes
EXIF = 2**17  # bytes; 100 times as many can be in memory
# Pillow decodes it while all other threads wait.
STALLS, STALL = "JPEG2000", 2_000_000  # pixels where others wait: 0.2 seconds, or a few for a hostile one
TICK = 0.05  # seconds between two checks of the time
COMMENT = re.compile(rb"#[^\r\n]*[\r\n]?")  # of PPM as text
# The kind of an item in AVIF. Its rotation is elsewhere, so that its EXIF data can be ignored.
AVIF_EXIF = re.compile(rb"(infe[\2\3].{3}(?:..|.{4})\0\0)Exif", re.DOTALL)


class Limited:
    """A file with these limits. `tick` is called regularly while it is read, and may raise an exception."""

    def __init__(self, file: IO[bytes], tick: Callable[[], None] | None = None) -> None:
        self._file, self._tick = file, tick
        self._left = HEADER + file.seek(0, 2)
        self._until = time.thread_time() + SECONDS
        self._next = time.monotonic() + TICK
        self._exif = 0
        file.seek(0)

    def allow(self, pixels: int) -> None:
        """Called when the header is known."""
        self._left += PIXELS
        self._until += SECONDS_PER_MEGAPIXEL * pixels / 1e6

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._left -= len(content)
        if content.startswith(b"Exif\0\0"):  # a segment of a JPEG, which is parsed before it can be asked for
            self._exif += len(content)
            check_exif(self._exif)
        if self._left < 0:
            raise UnreadableImageError("takes too much memory to decode")
        if time.monotonic() > self._next:
            if time.thread_time() > self._until:
                raise UnreadableImageError("takes too long to decode")
            if self._tick is not None:
                self._tick()
            self._next = time.monotonic() + TICK
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def check_exif(size: int) -> None:
    if size > EXIF:
        raise UnreadableImageError(f"has more than {EXIF // 1024} KB of EXIF data")
