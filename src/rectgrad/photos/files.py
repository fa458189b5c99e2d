"""Files in and out: which photos are meant, what their results are called, and writing them whole."""

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

_PART = ".part"  # what a file is called until it is complete


class Source(NamedTuple):
    """A photo to explain, and what its results are called (a relative path without suffix)."""

    path: Path
    name: str


def sources(arguments: Iterable[str], but: Path | None = None) -> list[Source]:
    """Photos named by files, folders (all below them) and patterns; each once, in order. What lies in the
    folder `but`, our own results, is not meant."""
    found: dict[str, tuple[Path, Path]] = {}  # place -> file, and the path its name is taken from
    for argument in arguments:
        for path, named in _meant(argument):
            if but is None or but.resolve() not in path.resolve().parents:
                found.setdefault(os.path.abspath(path), (path, named))
    choices = [_names(path, named) for path, named in found.values()]
    taken = [Counter(names[kind] for names in choices) for kind in range(4)]
    paths = [path for path, _ in found.values()]
    return [Source(path, _own_name(names, taken)) for path, names in zip(paths, choices, strict=True)]


def _own_name(names: tuple[str, ...], taken: list[Counter[str]]) -> str:
    """The shortest kind of name that no other photo has."""
    return next((name for kind, name in enumerate(names) if taken[kind][name] == 1), names[-1])


def _names(path: Path, named: Path) -> tuple[str, ...]:
    place = Path(os.path.abspath(path))  # without "..", which would lead out of the results
    whole = "_".join(place.parts[1:])
    return str(named.with_suffix("")), str(named), str(place.parent.name / named), whole


def _meant(argument: str) -> Iterator[tuple[Path, Path]]:
    path = Path(argument)
    if not argument:
        raise ValueError("a photo's name is empty; give a file, a folder or a pattern")
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if _photo(p, path))
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


def _photo(path: Path, folder: Path) -> bool:
    """An image by its name, not hidden. A link that leads nowhere is one too: it is listed as broken."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.suffix.lower() in SUFFIXES and (path.is_file() or path.is_symlink())


def mark(path: Path) -> list[int]:
    """Size and time of a file: they change when it does."""
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


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
    for part in folder.rglob(f".*{_PART}") if folder.is_dir() else ():
        writer = part.name.removesuffix(_PART).rpartition(".")[2]
        if writer.isdigit() and not alive(int(writer)):
            part.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process runs."""
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
    return sample_photos()[0].path


def sample_photos() -> list[Source]:
    """The built-in photos: a cat, a cup of coffee, an astronaut, a rocket; they come with scikit-image."""
    import importlib.util

    spec = importlib.util.find_spec("skimage")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = [Path(place, "data", name) for name in _SAMPLES]
        if any(path.exists() for path in found):
            return [Source(path, path.stem) for path in found if path.exists()]
    raise ValueError(
        "the sample photos come with scikit-image: pip install 'rectgrad[imagenet]', or name a photo"
    )


_SAMPLES = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")
