"""A folder of photos to browse: their names at once, their classes as they are found."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from rectgrad import photos
from rectgrad.app.desk import Desk
from rectgrad.photos import files

ALL = "all"


class Folder:
    """photos: in order. classes: what the first model says of each, as far as it got."""

    def __init__(self, folder: Path, desk: Desk) -> None:
        self.sources = files.sources([str(folder)])
        self.classes: dict[int, int] = {}
        self._desk = desk
        self.finished = threading.Event()

    def __len__(self) -> int:
        return len(self.sources)

    def start(self) -> None:
        """Find the classes in the background."""
        threading.Thread(target=self._classify, daemon=True).start()

    def _classify(self) -> None:
        model = self._desk.first
        enough = 2 * max(model.size)
        for i, source in enumerate(self.sources):
            try:
                crop = model.crop(photos.read(source.path, enough))
            except (photos.UnreadableImageError, MemoryError):
                continue  # said when it is looked at
            self.classes[i] = self._desk.class_of(crop)
        self.finished.set()

    def choices(self) -> list[tuple[str, str]]:
        """Classes to filter by, the most frequent first."""
        counted = Counter(self.classes.values()).most_common()
        said = [(f"{self._desk.first.label(index)} ({n})", str(index)) for index, n in counted]
        state = "" if self.finished.is_set() else f", {len(self.classes)} of them classified so far"
        return [(f"all photos ({len(self)}{state})", ALL), *said]

    def rows(self, wanted: str) -> list[int]:
        """The photos of a class."""
        return [i for i in range(len(self)) if wanted == ALL or str(self.classes.get(i)) == wanted]

    def step(self, at: int, by: int, wanted: str) -> int:
        """The next photo of a class in a direction; around at the ends."""
        rows = self.rows(wanted) or list(range(len(self)))
        if at in rows:
            return rows[(rows.index(at) + by) % len(rows)]
        return next((i for i in rows if i > at), rows[0])
