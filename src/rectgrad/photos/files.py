"""Finds photos, names their results, and writes files atomically."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rectgrad.photos import SUFFIXES

_PART = ".part"  # suffix of a file that is being written


class Source(NamedTuple):
    """A photo, and the name of its results (a relative path without suffix)."""

    path: Path
    name: str


def sources(arguments: Iterable[str], exclude: Path | None = None) -> list[Source]:
    """Expands files, folders (searched recursively) and patterns into photos, in order, without duplicates.

    Photos in the folder `exclude` are skipped: it holds our own results.
    """
    photos: dict[str, tuple[Path, Path]] = {}  # absolute path -> path, path relative to the argument
    for argument in arguments:
        for path, relative in _expand(argument):
            if exclude is None or exclude.resolve() not in path.resolve().parents:
                photos.setdefault(os.path.abspath(path), (path, relative))
    candidates = [_candidate_names(path, relative) for path, relative in photos.values()]
    counts = [Counter(names[kind] for names in candidates) for kind in range(4)]
    paths = [path for path, _ in photos.values()]
    return [Source(path, _unique_name(names, counts)) for path, names in zip(paths, candidates, strict=True)]


def _unique_name(candidates: tuple[str, ...], counts: list[Counter[str]]) -> str:
    """The shortest candidate that no other photo shares."""
    return next((name for kind, name in enumerate(candidates) if counts[kind][name] == 1), candidates[-1])


def _candidate_names(path: Path, relative: Path) -> tuple[str, ...]:
    absolute = Path(os.path.abspath(path))  # resolves "..", which would leave the results folder
    full = "_".join(absolute.parts[1:])
    return str(relative.with_suffix("")), str(relative), str(absolute.parent.name / relative), full


def _expand(argument: str) -> Iterator[tuple[Path, Path]]:
    path = Path(argument)
    if not argument:
        raise ValueError("the name of a photo is empty; expected a file, a folder or a pattern")
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if _is_photo(p, path))
        if not inside:
            raise ValueError(f"no images in the folder {argument!r}; looked for {' '.join(sorted(SUFFIXES))}")
        yield from ((p, p.relative_to(path)) for p in inside)
    elif path.exists():
        yield path, Path(path.name)
    else:
        matching = sorted(glob.glob(argument, recursive=True)) if glob.has_magic(argument) else []
        if not matching:
            raise ValueError(f"no such file, folder or pattern: {argument!r}")
        yield from ((Path(p), Path(Path(p).name)) for p in matching if os.path.isfile(p))


def _is_photo(path: Path, folder: Path) -> bool:
    """Whether the suffix is that of an image and the file is not hidden. Dangling links count: they are
    reported as unreadable later."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.suffix.lower() in SUFFIXES and (path.is_file() or path.is_symlink())


def fingerprint(path: Path) -> list[int]:
    """Size and modification time of a file."""
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. It replaces `path` on success and is removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Removes partial files of processes that were killed; those of running processes are kept."""
    for part in folder.rglob(f".*{_PART}") if folder.is_dir() else ():
        writer = part.name.removesuffix(_PART).rpartition(".")[2]
        if writer.isdigit() and not alive(int(writer)):
            part.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process is running."""
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def save_picture(picture: Image.Image, path: Path) -> None:
    with atomic(path) as part:
        picture.save(part, format="PNG", compress_level=3)


def save_array(values: np.ndarray, path: Path) -> None:
    with atomic(path) as part, open(part, "wb") as stream:
        if path.suffix == ".npz":
            np.savez_compressed(stream, map=values)
        else:
            np.save(stream, values)


def save_text(text: str, path: Path) -> None:
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")


def save_json(value: Any, path: Path) -> None:
    save_text(json.dumps(value, ensure_ascii=False) + "\n", path)


def load_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sample_photo() -> Path:
    """The default photo: the cat of scikit-image."""
    return sample_photos()[0].path


def sample_photos() -> list[Source]:
    """The sample photos of scikit-image: a cat, a cup of coffee, an astronaut and a rocket."""
    import importlib.util

    spec = importlib.util.find_spec("skimage")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = [Path(place, "data", name) for name in _SAMPLES]
        if any(path.exists() for path in found):
            return [Source(path, path.stem) for path in found if path.exists()]
    raise ValueError(
        "the sample photos come with scikit-image: pip install 'rectgrad[imagenet]', or give a photo"
    )


_SAMPLES = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")
