"""Caches finished parts of long computations on disk, so that an interrupted experiment resumes."""

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
    """A folder of JSON files, one per finished part. Each combination of settings has its own folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._all = folder

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of a part, from its file or computed now. It passes through JSON in both cases."""
        known = self.known(name)
        return self.keep(name, compute()) if known is None else known

    def known(self, name: str) -> Any:
        """The value of a finished part; None if it is not finished."""
        saved = files.load_json(self._path(name))
        return saved["value"] if saved is not None and saved.get("part") == name else None

    def keep(self, name: str, value: Any) -> Any:
        """Saves a finished part and returns its value as it will be read."""
        files.save_json({"part": name, "value": value}, self._path(name))
        return self.known(name)

    def array(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Like `part`, for arrays that are too large for JSON."""
        path = self._path(name).with_suffix(".npy")
        if not path.exists():
            files.save_array(compute(), path)
        return np.load(path, allow_pickle=False)

    def _path(self, name: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.=-]', '_', name)}.json"

    def clear(self) -> None:
        """Removes the parts of these settings; parts of other settings are kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._all.rmdir()
