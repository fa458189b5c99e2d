"""Files in and out: which photos are meant, what their results are called, and writing them whole."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rectgrad.photos import SUFFIXES

_PART = ".part"  # what a file is called until it is complete


class Source(NamedTuple):
    """A photo to explain, and what its results are called (a relative path without suffix)."""

    path: Path
    name: str


def sources(arguments: Iterable[str]) -> list[Source]:
    """Photos named by files, folders (all below them) and patterns; each once, in order."""
    found: dict[Path, Path] = {}  # file -> path its name is taken from
    for argument in arguments:
        for path, named in _meant(argument):
            found.setdefault(path, named)
    names = [_names(path, named) for path, named in found.items()]
    # The shortest kind of name that no two photos share.
    kind = next(k for k in range(4) if len({choices[k] for choices in names}) == len(names))
    return [Source(path, choices[kind]) for path, choices in zip(found, names, strict=True)]


def _names(path: Path, named: Path) -> tuple[str, str, str, str]:
    whole = "_".join(path.absolute().parts[1:])
    return str(named.with_suffix("")), str(named), str(path.parent.name / named), whole


def _meant(argument: str) -> Iterator[tuple[Path, Path]]:
    path = Path(argument)
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not inside:
            raise ValueError(
                f"no images in the folder {argument!r} (looked for {', '.join(sorted(SUFFIXES))})"
            )
        yield from ((p, p.relative_to(path)) for p in inside)
    elif path.exists():
        yield path, Path(path.name)
    else:
        matching = sorted(glob.glob(argument, recursive=True)) if glob.has_magic(argument) else []
        if not matching:
            raise ValueError(f"no such file, folder or pattern: {argument!r}")
        yield from ((Path(p), Path(Path(p).name)) for p in matching if os.path.isfile(p))


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; what was written takes its final name at the end, or goes away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sweep_parts(folder: Path) -> None:
    """Remove what a run that was killed left half-written. Another run's own parts are left alone."""
    for part in folder.rglob(f".*{_PART}"):
        writer = part.name.removesuffix(_PART).rpartition(".")[2]
        if writer.isdigit() and not _alive(int(writer)):
            part.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
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
    with whole(path) as part:
        picture.save(part, format="PNG", compress_level=3)


def save_array(values: np.ndarray, path: Path) -> None:
    with whole(path) as part, open(part, "wb") as stream:
        if path.suffix == ".npz":
            np.savez_compressed(stream, map=values)
        else:
            np.save(stream, values)


def save_text(text: str, path: Path) -> None:
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


def save_json(value: Any, path: Path) -> None:
    save_text(json.dumps(value, ensure_ascii=False) + "\n", path)


def load_json(path: Path) -> Any:
    """What a JSON file says; None where there is none or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sample_photo() -> Path:
    """The built-in photo: the cat that comes with scikit-image."""
    import importlib.util

    spec = importlib.util.find_spec("skimage")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place, "data", "chelsea.png")
        if path.exists():
            return path
    raise ValueError(
        "the sample photo comes with scikit-image: pip install 'rectgrad[imagenet]', or name a photo"
    )
