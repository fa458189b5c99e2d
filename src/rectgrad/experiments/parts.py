"""Finished parts of long work, kept on disk: what was computed once is not computed again after a stop."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rectgrad.photos import files


class Parts:
    """A folder of JSON files, one for each finished part. Parts of other settings are left behind."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        said = json.dumps(settings, sort_keys=True)
        self.folder = folder / hashlib.sha256(said.encode()).hexdigest()[:16]
        self._all = folder

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of a part: from its file, or made now. Values are as JSON has them, either way."""
        known = self.known(name)
        return self.keep(name, make()) if known is None else known

    def known(self, name: str) -> Any:
        """The value of a finished part; None where it is not finished."""
        found = files.load_json(self._path(name))
        return found["value"] if found is not None and found.get("part") == name else None

    def keep(self, name: str, value: Any) -> Any:
        """Write a finished part down; its value as it will be read."""
        files.save_json({"part": name, "value": value}, self._path(name))
        return self.known(name)

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """`part` for what is too large for JSON."""
        path = self._path(name).with_suffix(".npy")
        if not path.exists():
            files.save_array(make(), path)
        return np.load(path, allow_pickle=False)

    def _path(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.=-]', '_', name)}.json"

    def clear(self) -> None:
        """Away with the parts of these settings; those of others stay."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._all.rmdir()
