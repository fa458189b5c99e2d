"""Answers: models, forward passes and maps, each made once and kept a while. Knows nothing of pages."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from rectgrad import photos
from rectgrad.api import Record, layer_attributions, record
from rectgrad.app.ask import Ask
from rectgrad.engine.target import contrast
from rectgrad.explanation import check_labels
from rectgrad.methods import Method, RectGrad
from rectgrad.metrics import gini
from rectgrad.models import Guess, ImageModel, load

PIXELS = 50_000_000  # of an uploaded photo
QS = (0, 10, 20, 40, 60, 80, 90, 95, 98, 99)  # the paper's Figure 4
T = TypeVar("T")


class Shelf(Generic[T]):
    """The last few things made. Two threads that want the same one wait for one making."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            made = make()
            with self._lock:
                self._kept[key] = made
                self._shorten()
            return made

    def forget(self, wanted: Callable[[Any], bool]) -> None:
        with self._lock:
            for key in [key for key in self._kept if wanted(key)]:
                del self._kept[key]
            self._shorten()

    def _shorten(self) -> None:
        while len(self._kept) > self.size:
            self._kept.popitem(last=False)
        self._locks = {key: lock for key, lock in self._locks.items() if key in self._kept or lock.locked()}


@dataclass(frozen=True)
class Seen:
    """A photo as a model saw it, and what it said. digest: of the model's name and the pixels it saw."""

    path: Path
    name: str
    model: str
    crop: Image.Image = field(repr=False, compare=False)
    guesses: tuple[Guess, ...] = field(compare=False)
    digest: str = ""
    classes: int = field(default=0, compare=False)

    @property
    def top(self) -> int:
        return self.guesses[0].index


class Map(NamedTuple):
    """One method's map, and what it took: after the forward pass, where one pass is enough."""

    values: np.ndarray  # (3, H, W)
    seconds: float


class Desk:
    """All that the page asks. first: the model that is there from the start. device: where models run.
    given: the files that the first model was loaded with, by argument of `load`."""

    def __init__(self, first: ImageModel, device: str = "cpu", **given: Path | None) -> None:
        self.device = device
        self.given = {name: path for name, path in given.items() if path is not None}
        self.first = first
        first.module.to(device)
        self._models: Shelf[ImageModel] = Shelf(2)
        self._records: Shelf[Record] = Shelf(3)
        self._maps: Shelf[Map] = Shelf(24)
        self._curves: Shelf[list[tuple[float, float]]] = Shelf(24)

    def model(self, name: str) -> ImageModel:
        if name == self.first.name:
            return self.first

        def make() -> ImageModel:
            model = load(name)
            model.module.to(self.device)
            return model

        return self._models.get(name, make)

    def loading(self, name: str) -> str:
        """The arguments of `load` for a model, as Python."""
        given = self.given if name == self.first.name else {}
        return ", ".join([repr(name), *(f"{key}={str(path)!r}" for key, path in given.items())])

    def look(self, path: Path, name: str, model_name: str) -> Seen:
        """Show a photo to a model. Raises photos.UnreadableImageError with a sentence for the person."""
        model = self.model(model_name)
        crop = model.crop(read(path, name))
        digest = hashlib.blake2b(crop.tobytes(), key=model_name.encode()[:64]).hexdigest()
        seen = Seen(path, name, model_name, crop, (), digest)
        outputs = self._record(seen).outputs
        scores = getattr(outputs, "logits", outputs)
        check_labels(model, scores.shape[1])
        guesses = tuple(model.top(scores[0].float().cpu(), 5))
        return replace(seen, guesses=guesses, classes=scores.shape[1])

    def classes(self, seen: Seen) -> list[tuple[str, int]]:
        """The classes to choose from: the likely ones with their confidence, then all others by name."""
        model = self.model(seen.model)
        best = [(f"{guess.label}  {guess.probability:.1%}", guess.index) for guess in seen.guesses]
        listed = {index for _, index in best}
        others = [(model.label(i), i) for i in range(seen.classes) if i not in listed]
        return [*best, *(sorted(others) if model.labels else others)]

    @torch.no_grad()
    def class_of(self, crop: Image.Image) -> int:
        """What the first model takes a picture for."""
        outputs = self.first.module(self.first.prepare(crop).unsqueeze(0).to(self.device))
        return int(getattr(outputs, "logits", outputs)[0].argmax())

    def inputs(self, seen: Seen) -> torch.Tensor:
        return self.model(seen.model).prepare(seen.crop).unsqueeze(0).to(self.device)

    def map(self, seen: Seen, method: Method, target: Any) -> Map:
        def make() -> Map:
            kept = self._record(seen)
            started = time.perf_counter()
            values = kept.attribute(method, target)[0].float().cpu().numpy()
            return Map(values, time.perf_counter() - started)

        return self._maps.get((seen.digest, method, _key(target)), make)

    def maps(self, seen: Seen, ask: Ask) -> dict[str, Map]:
        target = ask.explained(seen.top)
        return {name: self.map(seen, method, target) for name, method in ask.chosen().items()}

    def layers(self, seen: Seen, ask: Ask, count: int = 8) -> list[tuple[str, np.ndarray]]:
        """Attribution at evenly spaced layers, from output to input, by the first method that has it."""
        able = [method for method in ask.chosen().values() if method.one_backward and method.runs_model]
        if not able:
            return []
        model, target = self.model(seen.model), ask.explained(seen.top)
        found = layer_attributions(model.module, self.inputs(seen), able[0], target)
        planes = [(name, values[0].float().cpu().numpy()) for name, values in found if values[0].dim() == 2]
        step = max((len(planes) - 1) / (count - 1), 1)
        return [planes[round(i * step)] for i in range(min(count, len(planes)))]

    def sparsity(self, seen: Seen, ask: Ask) -> list[tuple[float, float]]:
        """(q, Gini index of RectGrad's map) with the options asked for."""
        chosen = (m for m in ask.chosen().values() if isinstance(m, RectGrad))
        method = replace(next(chosen, RectGrad()), tau=None, q=98.0)
        target = ask.explained(seen.top)

        def make() -> list[tuple[float, float]]:
            kept = self._record(seen)
            maps = [(q, kept.attribute(replace(method, q=q), target).sum(1).float().cpu()) for q in QS]
            return [(q, float(gini(values)[0])) for q, values in maps]

        return self._curves.get((seen.digest, method, _key(target)), make)

    def forget(self, seen: Seen) -> None:
        """Nobody looks at this photo any more."""
        self._records.forget(lambda key: key == seen.digest)
        for shelf in (self._maps, self._curves):
            shelf.forget(lambda key: key[0] == seen.digest)
        _trim()

    def _record(self, seen: Seen) -> Record:
        make = lambda: record(self.model(seen.model).module, self.inputs(seen))  # noqa: E731
        return self._records.get(seen.digest, make)


def _trim() -> None:
    """Give freed memory back to the system: glibc would keep hundreds of megabytes for later."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def read(path: Path, name: str) -> Image.Image:
    """An uploaded photo; what is wrong with it is said of its own name, not of where it lies."""
    try:
        with Image.open(path) as opened:
            width, height = opened.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise photos.UnreadableImageError(f"{name}: {_too_large()}") from None
    except Exception:  # what it is, photos.read says
        width = height = 0
    if width * height > PIXELS:
        raise photos.UnreadableImageError(f"{name}: {width} x {height} pixels are {_too_large()}")
    try:
        return photos.read(path)
    except photos.UnreadableImageError as error:
        raise photos.UnreadableImageError(str(error).replace(str(path), name)) from None


def _too_large() -> str:
    return f"more than {PIXELS // 1_000_000} megapixels, the limit of this page"


def _key(target: Any) -> Hashable:
    return (target.a, target.b) if isinstance(target, contrast) else target
