"""Finds photos, names their results, and writes files atomically."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from rectgrad import image
from rectgrad.photos import SUFFIXES
from rectgrad.photos.names import unique_names

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RECORDS = "explained.jsonl"  # in every folder that a run writes results to
LARGEST = 2**28  # bytes of a file that is read at once
_PART = ".part"  # suffix of a file that is being written


class Source(NamedTuple):
    """A photo, and the name of its results (a relative path without suffix)."""

    path: Path
    name: str


def sources(
    arguments: Sequence[str], exclude: Path | None = None, reserved: Collection[str] = ()
) -> list[Source]:
    """Expands files, folders (searched recursively) and patterns into photos, in order, without duplicates.
    A missing file is an error if it is the only argument; otherwise it is reported when it is read.

    Photos in the folder `exclude` are skipped, because it contains results, and so are results of other
    runs in folders inside a given one. `reserved`: names that results must not use.
    """
    photos: dict[str, tuple[Path, Path]] = {}  # absolute path -> path, path relative to the argument
    results = None if exclude is None else Path(os.path.realpath(exclude))
    several = len(arguments) > 1
    for argument in arguments:
        for path, relative in _found(argument) if several else _expand(argument):
            if results not in Path(os.path.realpath(path)).parents:  # of a loop of links too
                photos.setdefault(os.path.abspath(path), (path, relative))
    named = unique_names(list(photos.values()), reserved)
    return [Source(path, name) for (path, _), name in zip(photos.values(), named, strict=True)]


def _found(argument: str) -> list[tuple[Path, Path]]:
    """The photos of an argument, or the argument itself if there are none."""
    try:
        return list(_expand(argument))
    except ValueError:
        if not argument:
            raise
        return [(Path(argument), Path(Path(argument).name))]


def _expand(argument: str) -> Iterator[tuple[Path, Path]]:
    path = Path(argument)
    if not argument:
        raise ValueError("the name of a photo is empty; expected a file, a folder or a glob pattern")
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if _is_photo(p, path))
        if not inside:
            raise ValueError(f"no images in the folder {argument!r}; looked for {' '.join(sorted(SUFFIXES))}")
        yield from ((p, p.relative_to(path)) for p in inside)
    elif path.exists():
        yield path, Path(path.name)
    else:
        matching = sorted(glob.glob(argument, recursive=True)) if glob.has_magic(argument) else []
        if not matching and "://" in argument:
            raise ValueError(f"{argument!r} is a URL; download it first and pass the path of the file")
        if not matching:
            raise ValueError(f"no such file, folder or pattern: {argument!r}")
        folder = _folder_of(argument)
        yield from ((Path(p), Path(p).relative_to(folder)) for p in matching if os.path.isfile(p))


def _folder_of(pattern: str) -> Path:
    """The part of a pattern before its first wildcard, as a folder."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts[:-1]))


def _is_photo(path: Path, folder: Path) -> bool:
    """Whether the file has the suffix of an image, is not hidden and not a result. Includes dangling links,
    which are reported as unreadable later."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    named = not hidden and path.suffix.lower() in SUFFIXES
    return named and (path.is_file() or path.is_symlink()) and not _is_result(path, folder)


def _is_result(path: Path, folder: Path) -> bool:
    """Whether the file is below a folder for results that is inside `folder`."""
    between = path.parents[: len(path.relative_to(folder).parts) - 1]
    return any((each / RECORDS).exists() for each in between)


def digest(file: IO[bytes]) -> str:
    """SHA-256 of the whole file. The position is at the beginning of the file afterwards."""
    found = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(1 << 20):
        found.update(chunk)
    file.seek(0)
    return found.hexdigest()


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. On success it is synced to the disk and replaces `path`; on an
    error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    part.unlink(missing_ok=True)
    try:
        part.touch(exist_ok=False)  # a new file, so that a planted link is not followed
        yield part
        with open(part, "rb+") as written:  # Windows syncs no file that is open for reading only
            os.fsync(written.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno is None:  # of numpy and Pillow
            reason = f"cannot be written; the disk may be full ({error})"
            raise OSError(errno.EIO, reason, str(path)) from error
        if error.filename in (None, str(part)):  # that of a full disk has no name
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def remove_partial_files(folder: Path, pattern: str = "**/.*") -> None:
    """Removes partial files of processes that were killed; those of running processes are kept."""
    for part in folder.glob(f"{pattern}{_PART}") if folder.is_dir() else ():
        writer = part.name.removesuffix(_PART).rpartition(".")[2]
        if ended(writer):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Creates a folder for results and locks it. Runs that write to one folder take turns, so that no result
    mixes files of two runs. Calls `waits` if another process has the lock. The system releases the lock when
    the process ends. Windows has no locks of folders."""
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    opened = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if opened is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                _lock(opened, waits)
        yield
    finally:
        if opened is not None:
            os.close(opened)
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing was written


def _lock(opened: int, waits: Callable[[], None]) -> None:
    assert fcntl is not None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        fcntl.flock(opened, fcntl.LOCK_EX)


def ended(number: str) -> bool:
    """Whether this is the number of a process that has ended."""
    return number.isascii() and number.isdecimal() and not alive(int(number))


def alive(pid: int) -> bool:
    """Whether a process is running. True for numbers that cannot be checked."""
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def save_picture(picture: Image.Image, path: Path) -> None:
    """Writes a sheet as PNG: see `image.png`."""
    with atomic(path) as part:
        part.write_bytes(image.png(picture))


def save_thumbnail(picture: Image.Image, path: Path) -> None:
    with atomic(path) as part:
        picture.save(part, format="JPEG", quality=80)


def save_array(values: np.ndarray | Mapping[str, np.ndarray], path: Path) -> None:
    """Writes an array, or several arrays by name: .npz keeps the names, .npy stacks the arrays."""
    with atomic(path) as part, open(part, "wb") as stream:
        if path.suffix == ".npz":
            several = dict(values) if isinstance(values, Mapping) else {"map": values}
            np.savez_compressed(stream, **several)  # type: ignore[arg-type]
        else:
            np.save(stream, np.stack(list(values.values())) if isinstance(values, Mapping) else values)


def save_text(text: str, path: Path) -> None:
    """Writes UTF-8. Bytes that are not UTF-8 are escaped, and JSON restores them."""
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def save_json(value: Any, path: Path) -> None:
    save_text(json.dumps(value, ensure_ascii=False) + "\n", path)


def content(path: Path) -> bytes:
    """The content of a regular file: a pipe or a device may never end. Ours are not larger than `LARGEST`."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.stat().st_size > LARGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return path.read_bytes()


def load_record(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, invalid, or holds something else."""
    try:
        found = json.loads(content(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def sample_photo() -> Path:
    """The default photo: the cat from scikit-image."""
    return sample_photos()[0].path


def sample_photos() -> list[Source]:
    """The sample photos from scikit-image: a cat, a cup of coffee, an astronaut and a rocket."""
    import importlib.util

    spec = importlib.util.find_spec("skimage")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = [Path(place, "data", name) for name in _SAMPLES]
        if any(path.exists() for path in found):
            return [Source(path, path.stem) for path in found if path.exists()]
    raise ValueError(
        "the sample photos come with scikit-image: pip install 'rectgrad[imagenet]', or pass a photo"
    )


_SAMPLES = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")
