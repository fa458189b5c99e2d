"""Names for results: one per photo, unique on every file system, in the same subfolders as the photos.

The results of a photo are NAME.png, NAME.json and so on. Names are compared case-insensitively and in one
Unicode normal form, as file systems of Windows and macOS do.
"""

from __future__ import annotations

import hashlib
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

RESULTS = (
    ".png",
    ".json",
    ".jsonl",
    ".npy",
    ".npz",
    ".jpg",
    ".html",
)  # suffixes of the files that runs write
_DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    "conin$",
    "conout$",
    *(f"{port}{i}" for port in ("com", "lpt") for i in range(10)),
}
_CONTROLS = {"Cc", "Zl", "Zp"}  # categories of Unicode
_ORDER = {chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # reverse the text around them
_LONGEST = 180  # bytes of a file name; file systems allow 255, including our suffixes


def unique_names(photos: Sequence[tuple[Path, Path]], reserved: Collection[str] = ()) -> list[str]:
    """A name for each photo, given as (path, path relative to the requested folder).

    The name is the relative path without its suffix. Photos that would share a name get longer ones: with the
    suffix, with the parent folder, with both, and finally with a hash of the path. Adding a photo renames
    only the photos that it clashes with. `reserved` are names that the caller uses for other files.
    """
    ladders = [_candidates(path, relative) for path, relative in photos]
    steps = [0] * len(ladders)
    while True:
        names = [ladder[step] for ladder, step in zip(ladders, steps, strict=True)]
        taken = Counter(folded(name) for name in names) + Counter(map(folded, reserved))
        clashing = [i for i, name in enumerate(names) if taken[folded(name)] > 1]
        longer = [i for i in clashing if steps[i] + 1 < len(ladders[i])]
        if not longer:
            return names
        for i in longer:
            steps[i] += 1


def folded(name: str) -> str:
    """A key that is equal for two names if some file system treats them as the same."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).upper().casefold())


def readable(text: str | Path) -> str:
    """A path or a name for one line of text. Bytes that are not UTF-8, line breaks and the characters that
    control a terminal are replaced."""
    decoded = str(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in _CONTROLS or c in _ORDER else c
        for c in decoded
    )


def _candidates(path: Path, relative: Path) -> list[str]:
    """Candidate names for a photo, shortest first. The last one is unique."""
    absolute = Path(os.path.abspath(path))
    if ".." in relative.parts:
        relative = Path(relative.name)  # would be outside the folder for the results
    base = absolute.parents[len(relative.parts) - 1].name
    folders = [_folder(part) for part in relative.parts[:-1]]
    names = (relative.stem, relative.name)
    own = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:32]  # long enough to make collisions infeasible
    return [
        *("/".join([*folders, _file(name)]) for name in names),
        *("/".join([_folder(base), *folders, _file(name)]) for name in names if base),
        "/".join([*folders, f"{_file(relative.name)}~{own}"]),
    ]


def _storable(name: str) -> str:
    """A readable name in the encoding of file names, which is not UTF-8 in some locales."""
    encoding = sys.getfilesystemencoding()
    return readable(name).encode(encoding, "replace").decode(encoding)


def _folder(name: str) -> str:
    """A folder name that no result can have: the result of a.jpg is a.png, so no folder may be a.png."""
    name = _storable(name)
    return f"{name}_" if folded(name).endswith((*RESULTS, ".", " ")) or _is_device(name) else name


def _is_device(name: str) -> bool:
    """Whether Windows takes a name for a device, with any suffix."""
    return folded(name).partition(".")[0].rstrip() in _DEVICES


def _file(name: str) -> str:
    """A name that is short enough for our suffixes."""
    name = _storable(name)
    name = f"{name}_" if _is_device(name) else name
    if len(name.encode()) <= _LONGEST:
        return name
    start = name.encode()[: _LONGEST - 17].decode("utf-8", "ignore")
    return f"{start}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
