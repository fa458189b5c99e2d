"""Caches finished parts of long computations on disk, so that an interrupted experiment resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rectgrad.photos import files

LONGEST = 120  # file systems allow 255 bytes
_START = "start "  # of the names of parts that mark a start


class Parts:
    """A folder of JSON files, one per finished part. Each combination of settings has its own folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._all = folder

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of a part, from its file or computed now. It passes through JSON in both cases."""
        known = self.known(name)
        return self.keep(name, compute()) if known is None else known

    def known(self, name: str) -> Any:
        """The value of a finished part; None if it is not finished."""
        saved = files.load_record(self._path(name))
        return saved.get("value") if saved.get("part") == name else None

    def keep(self, name: str, value: Any) -> Any:
        """Saves a finished part and returns its value as it will be read."""
        files.save_json({"part": name, "value": value, "finished": time.time()}, self._path(name))
        return json.loads(json.dumps(value))  # not from the file, which another process may have removed

    def same(self, name: str, value: Any) -> None:
        """Raises an error if the value was another one in an earlier start."""
        if (before := self.part(name, lambda: value)) != value:
            raise ValueError(f"{name}: {value} now, {before} when the parts in {self.folder} were computed")

    def start(self) -> None:
        """Saves the time of a start, for `seconds`."""
        self.keep(f"{_START}{time.time_ns()}", None)

    def seconds(self) -> float:
        """The time over all starts: of the last one until now, of each other one until its last part."""
        saved = [files.load_record(path) for path in self.folder.glob("*.json")]
        kept = [each for each in saved if {"part", "finished"} <= each.keys()]
        moments = sorted((each["finished"], each["part"].startswith(_START)) for each in kept)
        moments.append((time.time(), False))
        gaps = (b - a for (a, _), (b, started) in pairwise(moments) if not started)
        return float(sum(gap for gap in gaps if gap > 0))  # a clock may have been moved back

    def array(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Like `part`, for arrays that are too large for JSON."""
        if not self.has_array(name):
            files.save_array(compute(), self._path(name).with_suffix(".npy"))
        found = self._array(name)
        assert found is not None
        return found

    def has_array(self, name: str) -> bool:
        return self._array(name) is not None

    def _array(self, name: str) -> np.ndarray | None:
        """None if the file is missing or damaged."""
        path = self._path(name).with_suffix(".npy")
        if not path.is_file():  # a pipe may never end
            return None
        with contextlib.suppress(OSError, ValueError, EOFError), open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
        return None

    def _path(self, name: str) -> Path:
        """Names that differ only in characters that are replaced or cut off have different files."""
        safe = re.sub(r"[^A-Za-z0-9_.=-]", "_", name)[:LONGEST]
        own = "" if safe == name else f"~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.folder / f"{safe}{own}.json"

    def clear(self) -> None:
        """Removes the parts of these settings; parts of other settings are kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._all.rmdir()
