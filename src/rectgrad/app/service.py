"""Models, forward passes and maps for the explorer, cached. Does not depend on gradio."""

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
from rectgrad.app.query import Query
from rectgrad.engine.target import contrast
from rectgrad.methods import Method, RectGrad
from rectgrad.metrics import gini
from rectgrad.models import Guess, ImageModel, load

QS = (0, 10, 20, 40, 60, 80, 90, 95, 98, 99)  # the paper's Figure 4
T = TypeVar("T")


class Cache(Generic[T]):
    """A small LRU cache. Threads that request the same key wait for a single computation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Hashable, T] = OrderedDict()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            with self._lock:
                if key in self._entries:
                    self._entries.move_to_end(key)
                    return self._entries[key]
            value = compute()
            with self._lock:
                self._entries[key] = value
                self._evict()
            return value

    def discard(self, matches: Callable[[Any], bool]) -> None:
        with self._lock:
            for key in [key for key in self._entries if matches(key)]:
                del self._entries[key]
            self._evict()

    def _evict(self) -> None:
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        self._locks = {
            key: lock for key, lock in self._locks.items() if key in self._entries or lock.locked()
        }


@dataclass(frozen=True)
class Prediction:
    """A photo as the model saw it, and its top classes. `digest` is a hash of model name and pixels."""

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
    """The map of one method, and the time it took (without the forward pass if that was recorded)."""

    values: np.ndarray  # (3, H, W)
    seconds: float


class Service:
    """Computes everything that the page shows.

    `first` is the model at start-up; `files` are the arguments of `load` that it was loaded with.
    """

    def __init__(self, first: ImageModel, device: str = "cpu", **files: Path | None) -> None:
        self.device = device
        self.files = {name: path for name, path in files.items() if path is not None}
        self.first = first
        first.module.to(device)
        self._models: Cache[ImageModel] = Cache(2)
        self._records: Cache[Record] = Cache(3)
        self._maps: Cache[Map] = Cache(24)
        self._curves: Cache[list[tuple[float, float]]] = Cache(24)

    def model(self, name: str) -> ImageModel:
        if name == self.first.name:
            return self.first

        def compute() -> ImageModel:
            model = load(name)
            model.module.to(self.device)
            return model

        return self._models.get(name, compute)

    def load_arguments(self, name: str) -> str:
        """The arguments of `load` for a model, as Python code."""
        files = self.files if name == self.first.name else {}
        return ", ".join([repr(name), *(f"{key}={str(path)!r}" for key, path in files.items())])

    def predict(self, path: Path, name: str, model_name: str) -> Prediction:
        """Classifies a photo. Raises photos.UnreadableImageError with a message for the user."""
        model = self.model(model_name)
        crop = model.crop(read(path, name))
        digest = hashlib.blake2b(crop.tobytes(), key=model_name.encode()[:64]).hexdigest()
        prediction = Prediction(path, name, model_name, crop, (), digest)
        outputs = self._record(prediction).outputs
        scores = getattr(outputs, "logits", outputs)
        model.check_labels(scores.shape[1])
        guesses = tuple(model.top(scores[0].float().cpu(), 5))
        return replace(prediction, guesses=guesses, classes=scores.shape[1])

    def classes(self, prediction: Prediction) -> list[tuple[str, int]]:
        """The classes to choose from: the top ones with their confidence, then all others by name."""
        model = self.model(prediction.model)
        best = [(f"{guess.label}  {guess.probability:.1%}", guess.index) for guess in prediction.guesses]
        listed = {index for _, index in best}
        others = [(model.label(i), i) for i in range(prediction.classes) if i not in listed]
        return [*best, *(sorted(others) if model.labels else others)]

    @torch.no_grad()
    def classify(self, crop: Image.Image) -> int:
        """The top class of a picture according to the first model."""
        outputs = self.first.module(self.first.prepare(crop).unsqueeze(0).to(self.device))
        return int(getattr(outputs, "logits", outputs)[0].argmax())

    def inputs(self, prediction: Prediction) -> torch.Tensor:
        return self.model(prediction.model).prepare(prediction.crop).unsqueeze(0).to(self.device)

    def map(self, prediction: Prediction, method: Method, target: Any) -> Map:
        def compute() -> Map:
            recorded = self._record(prediction)
            started = time.perf_counter()
            values = recorded.attribute(method, target)[0].float().cpu().numpy()
            return Map(values, time.perf_counter() - started)

        return self._maps.get((prediction.digest, method, _key(target)), compute)

    def maps(self, prediction: Prediction, query: Query) -> dict[str, Map]:
        target = query.resolve_target(prediction.top)
        return {name: self.map(prediction, method, target) for name, method in query.configured().items()}

    def layers(self, prediction: Prediction, query: Query, count: int = 8) -> list[tuple[str, np.ndarray]]:
        """Attribution at evenly spaced layers, from output to input, of the first method that supports it."""
        supported = [
            method for method in query.configured().values() if method.one_backward and method.runs_model
        ]
        if not supported:
            return []
        model, target = self.model(prediction.model), query.resolve_target(prediction.top)
        layers = layer_attributions(model.module, self.inputs(prediction), supported[0], target)
        planes = [(name, values[0].float().cpu().numpy()) for name, values in layers if values[0].dim() == 2]
        step = max((len(planes) - 1) / (count - 1), 1)
        return [planes[round(i * step)] for i in range(min(count, len(planes)))]

    def sparsity(self, prediction: Prediction, query: Query) -> list[tuple[float, float]]:
        """Pairs (q, Gini index of RectGrad's map) for the chosen options of RectGrad."""
        chosen = (m for m in query.configured().values() if isinstance(m, RectGrad))
        method = replace(next(chosen, RectGrad()), tau=None, q=98.0)
        target = query.resolve_target(prediction.top)

        def compute() -> list[tuple[float, float]]:
            recorded = self._record(prediction)
            maps = [(q, recorded.attribute(replace(method, q=q), target).sum(1).float().cpu()) for q in QS]
            return [(q, float(gini(values)[0])) for q, values in maps]

        return self._curves.get((prediction.digest, method, _key(target)), compute)

    def release(self, prediction: Prediction) -> None:
        """Frees the memory of a photo that no visitor uses any more."""
        self._records.discard(lambda key: key == prediction.digest)
        for cache in (self._maps, self._curves):
            cache.discard(lambda key: key[0] == prediction.digest)
        _trim()

    def _record(self, prediction: Prediction) -> Record:
        compute = lambda: record(self.model(prediction.model).module, self.inputs(prediction))  # noqa: E731
        return self._records.get(prediction.digest, compute)


def _trim() -> None:
    """Returns freed memory to the system: glibc would keep hundreds of megabytes."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def read(path: Path, name: str) -> Image.Image:
    """Reads an uploaded photo. Errors show the user's file name, not that of the temporary file."""
    try:
        return photos.read(path)
    except photos.UnreadableImageError as error:
        raise photos.UnreadableImageError(str(error).replace(str(path), name)) from None


def _key(target: Any) -> Hashable:
    return (target.a, target.b) if isinstance(target, contrast) else target
