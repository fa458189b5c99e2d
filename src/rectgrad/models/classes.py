"""Reads lists of class names, and finds a class from user input."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from rectgrad.models.errors import ModelUnavailableError, first, reason

Names = Sequence[Sequence[str]]  # names of each class, the display name first


def bundled(name: str) -> list[list[str]]:
    """The class names of a dataset: "imagenet" or "cifar10"."""
    return read(Path(__file__).with_name(f"{name}.txt"))


def read(path: str | Path) -> list[list[str]]:
    """Reads a text file with one class per line: names separated by commas, the display name first."""
    if not Path(path).is_file() and not Path(path).is_dir():  # a pipe may never end
        raise ModelUnavailableError(f"labels={str(path)!r}: no such file")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError:
        raise ModelUnavailableError(
            f"labels={str(path)!r} cannot be read (it is not a text file in UTF-8)"
        ) from None
    except OSError as error:
        raise ModelUnavailableError(f"labels={str(path)!r} cannot be read ({reason(error)})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip(" ,"):
            raise ValueError(f"labels={str(path)!r}: line {number} is empty; each line must name one class")
    return split(lines)


def split(lines: Sequence[str]) -> list[list[str]]:
    """Splits lines into names: "tench, Tinca tinca" has two."""
    return [[name for name in map(str.strip, line.split(",")) if name] or [line] for line in lines]


def fields(names: Names) -> dict[str, Any]:
    """The fields of an ImageModel for these names."""
    return {"labels": [own[0] for own in names], "synonyms": [list(own[1:]) for own in names]}


def check_count(model: str, names: Names, count: int) -> None:
    """Raises an error if the number of class names differs from the number of classes."""
    if names and len(names) != count:
        has = f"{count} classes" if count > 1 else "a single output"
        raise ValueError(f"{model} has {has}, but the number of class names is {len(names)}")


def find(names: Names, query: str | SupportsIndex) -> int:
    """The index of a class, given as an index, a full name, or a part of a name.

    A part must match a single class. Whole words take precedence over parts of words: "bus" is the school
    bus, not the minibus.
    """
    if not isinstance(query, str):
        return _checked(names, index(query))
    text = query.strip().casefold()
    found = _matches(names, lambda name: name == text)
    if not found and text.isdecimal():
        return _checked(names, int(text))
    found = found or _matches(names, lambda name: _rank(name, text) == 0) or search(names, query)
    if len(found) != 1:
        raise ValueError(_ambiguous(names, query) if found else _unknown(names, query))
    return found[0]


def search(names: Names, query: str) -> list[int]:
    """The classes with a name that contains the query, best match first: "cat" finds cats before
    oystercatchers.

    A whole word is a better match than the beginning of a word, which is better than any other part. The
    display name takes precedence over other names. Without a query: all classes, sorted by name.
    """
    text = query.strip().casefold()
    ranked = []
    for i, own in enumerate(names):
        ranks = [
            (rank, place > 0) for place, name in enumerate(own) if (rank := _rank(name, text)) is not None
        ]
        if ranks or text == str(i):
            ranked.append((min(ranks, default=(0, False)), own[0].casefold(), i))
    return [i for _, _, i in sorted(ranked)]


def _rank(name: str, text: str) -> int | None:
    """How well a name matches: 0 is best, None is no match."""
    tests = (rf"\b{re.escape(text)}\b", rf"\b{re.escape(text)}", re.escape(text))
    return next((rank for rank, test in enumerate(tests) if re.search(test, name.casefold())), None)


def _matches(names: Names, test: Callable[[str], bool]) -> list[int]:
    return [i for i, own in enumerate(names) if any(test(name.casefold()) for name in own)]


def _checked(names: Names, number: int) -> int:
    if number < 0 or (names and number >= len(names)):
        valid = f"this model has classes 0 to {len(names) - 1}" if names else "classes start at 0"
        raise ValueError(f"there is no class {number}: {valid}")
    return number


def _ambiguous(names: Names, query: str) -> str:
    listed = first([f"{i} {names[i][0]}" for i in search(names, query)], 8)
    return f"class {query!r} is ambiguous: {listed}; use an index, or a longer part of the name"


def _unknown(names: Names, query: str) -> str:
    if not names:
        return f"class {query!r} is unknown: this model has no class names, so use an index"
    owners = {name.casefold(): i for i, own in reversed(list(enumerate(names))) for name in own}
    near = difflib.get_close_matches(query.strip().casefold(), owners, n=8)
    listed = dict.fromkeys(f"{owners[name]} {names[owners[name]][0]}" for name in near)
    if listed:
        return f"unknown class {query!r}; similar names are {', '.join(listed)}"
    return f"unknown class {query!r}; there are {len(names)} classes, from {names[0][0]} to {names[-1][0]}"
