"""Class names: lists of them, one class a line, and finding a class by what a person types."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from rectgrad.models.errors import ModelUnavailableError, first, reason

Names = Sequence[Sequence[str]]  # of each class, the one to show first


def bundled(name: str) -> list[list[str]]:
    """The names of a data set's classes: "imagenet" or "cifar10"."""
    return read(Path(__file__).with_name(f"{name}.txt"))


def read(path: str | Path) -> list[list[str]]:
    """A text file with one class a line, its names separated by commas, the one to show first."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnavailableError(f"labels={str(path)!r} cannot be read ({reason(error)})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip(" ,"):
            raise ValueError(f"labels={str(path)!r}: line {number} is empty, and each line names one class")
    return split(lines)


def split(lines: Sequence[str]) -> list[list[str]]:
    """ "tench, Tinca tinca" holds two names."""
    return [[name for name in map(str.strip, line.split(",")) if name] or [line] for line in lines]


def fields(names: Names) -> dict[str, Any]:
    """The fields of an ImageModel that hold these names."""
    return {"labels": [own[0] for own in names], "synonyms": [list(own[1:]) for own in names]}


def find(names: Names, wanted: str | SupportsIndex) -> int:
    """The class that `wanted` means: an index, a whole name, else part of a name that only one class has."""
    if not isinstance(wanted, str):
        return _checked(names, index(wanted))
    text = wanted.strip().casefold()
    found = _matches(names, lambda name: name == text)
    if not found and text.isdecimal():
        return _checked(names, int(text))
    found = found or _matches(names, lambda name: text in name)
    if len(found) != 1:
        raise ValueError(_ambiguous(names, wanted, found) if found else _unknown(names, wanted))
    return found[0]


def _matches(names: Names, test: Callable[[str], bool]) -> list[int]:
    return [i for i, own in enumerate(names) if any(test(name.casefold()) for name in own)]


def _checked(names: Names, number: int) -> int:
    if number < 0 or (names and number >= len(names)):
        there = f"this model's classes are 0 to {len(names) - 1}" if names else "they start at 0"
        raise ValueError(f"there is no class {number}: {there}")
    return number


def _ambiguous(names: Names, wanted: str, found: list[int]) -> str:
    text = wanted.strip().casefold()
    found = sorted(found, key=lambda i: text not in names[i][0].casefold().split())  # whole words first
    listed = first([f"{i} {names[i][0]}" for i in found], 8)
    return f"class {wanted!r} could be {listed}: give the number, or more of the name"


def _unknown(names: Names, wanted: str) -> str:
    if not names:
        return f"class {wanted!r} cannot be looked up: this model has no class names, so give a number"
    owners = {name.casefold(): i for i, own in reversed(list(enumerate(names))) for name in own}
    near = difflib.get_close_matches(wanted.strip().casefold(), owners, n=8)
    listed = dict.fromkeys(f"{owners[name]} {names[owners[name]][0]}" for name in near)
    if listed:
        return f"no class is called {wanted!r}; near it are {', '.join(listed)}"
    return f"no class is called {wanted!r}; there are {len(names)}, from {names[0][0]} to {names[-1][0]}"
