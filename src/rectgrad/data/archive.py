"""Reads files of tar archives, which are never unpacked into a folder."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rectgrad.data.dataset import DataUnavailableError

LARGEST = 2**30  # bytes of an uncompressed archive; the largest one has 185 MB
_COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


def members(path: Path, wanted: Callable[[str], bool], largest: int) -> Iterator[tuple[str, bytes]]:
    """Names, without folders, and contents of the regular files whose name is wanted; not of larger files."""
    if not path.is_file():
        raise DataUnavailableError(f"no such file: {str(path)!r}")
    try:
        with (
            open(path, "rb") as file,
            _uncompressed(file) as plain,
            tarfile.open(fileobj=plain, mode="r:") as opened,
        ):
            for member in opened:
                name = Path(member.name).name
                chosen = member.isfile() and member.size <= largest and wanted(name)
                stream = opened.extractfile(member) if chosen else None
                if stream is not None:
                    yield name, stream.read()
    except Exception as error:  # decompressors and tarfile raise many kinds
        why = " ".join(str(error).split())
        raise DataUnavailableError(f"{str(path)!r} is damaged or truncated ({why})") from error


@contextlib.contextmanager
def _uncompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The archive without its compression, in a temporary file: a few bytes can stand for terabytes, which
    tarfile would decompress, and for some entries hold in memory."""
    start = file.read(8)
    file.seek(0)
    decompress = next((each for magic, each in _COMPRESSED.items() if start.startswith(magic)), None)
    if decompress is None:
        yield file
        return
    with contextlib.ExitStack() as closing:
        plain = closing.enter_context(tempfile.TemporaryFile())
        source = closing.enter_context(decompress(file))
        while chunk := source.read(2**20):
            plain.write(chunk)
            if plain.tell() > LARGEST:
                raise ValueError(f"it has more than {LARGEST // 2**20} MB")
        plain.seek(0)
        yield plain
