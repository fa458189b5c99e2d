"""A folder of photos to browse. Classes are predicted in the background."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from pathlib import Path

from rectgrad import photos
from rectgrad.app.service import Service
from rectgrad.photos import files

ALL = "all"


class Folder:
    """`sources` lists the photos; `ids` are their names in links, which stay the same when other photos are
    added; `classes` maps those classified so far to their top class."""

    def __init__(self, folder: Path, service: Service) -> None:
        self.sources = files.sources([str(folder)])
        self.ids = {_id(source.name): i for i, source in enumerate(self.sources)}
        self.classes: dict[int, int] = {}
        self._service = service
        self.finished = threading.Event()
        self._stopped = False

    def __len__(self) -> int:
        return len(self.sources)

    def start(self) -> None:
        """Starts classifying the photos in a background thread."""
        threading.Thread(target=self._classify, daemon=True).start()

    def close(self) -> bool:
        """Stops classifying. Returns whether that has ended."""
        self._stopped = True
        return self.finished.wait(1)

    def _classify(self) -> None:
        model = self._service.first
        enough = 2 * max(model.size)
        for i, source in enumerate(self.sources):
            if self._stopped:
                break
            try:
                crop = model.crop(photos.read(source.path, enough))
            except (photos.UnreadableImageError, MemoryError):
                continue  # reported when the photo is opened
            self.classes[i] = self._service.classify(crop)
        self.finished.set()

    def choices(self) -> list[tuple[str, str]]:
        """The filters by class, the most frequent first."""
        counted = Counter(self.classes.values()).most_common()
        classes = [(f"{self._service.first.label(index)} ({n})", str(index)) for index, n in counted]
        state = "" if self.finished.is_set() else f", {len(self.classes)} of them classified so far"
        return [(f"all photos ({len(self)}{state})", ALL), *classes]

    def rows(self, chosen: str) -> list[int]:
        """Indices of the photos of a class."""
        return [i for i in range(len(self)) if chosen == ALL or str(self.classes.get(i)) == chosen]

    def step(self, at: int, by: int, chosen: str) -> int:
        """The index of the next photo of a class, `by` steps away; wraps around at the ends."""
        rows = self.rows(chosen) or list(range(len(self)))
        if at in rows:
            return rows[(rows.index(at) + by) % len(rows)]
        return next((i for i in rows if i > at), rows[0])


def _id(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
