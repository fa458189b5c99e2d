"""Computes and caches models, forward passes and maps for the explorer. Independent of the web server."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from rectgrad import photos
from rectgrad.api import Record, record
from rectgrad.app import controls, work
from rectgrad.app.cache import Cache
from rectgrad.app.query import Query
from rectgrad.engine.target import contrast
from rectgrad.explanation import Explanation, Network, Prepared
from rectgrad.explanation.captures import Answered
from rectgrad.explanation.recorded import answers, measured, top_classes
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.methods import Method, RectGrad
from rectgrad.metrics import gini
from rectgrad.models import MODELS, Guess, ImageModel, classes, load
from rectgrad.photos import names

QS = (0, 10, 20, 40, 60, 80, 90, 95, 98, 99)  # the paper's Figure 4
SHOWN = 896  # longest side of the photo as the page shows it


@dataclass(frozen=True)
class Prediction:
    """A photo as the model saw it, and its top classes. `digest` is a hash of model name and pixels."""

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
    """The explanation by one method, and its time (without the forward pass if that was already recorded)."""

    explanation: Explanation
    seconds: float

    @property
    def values(self) -> np.ndarray:
        """(3, H, W)"""
        return self.explanation.map.float().numpy()


class Service:
    """Computes everything that the page shows.

    `first` is the model loaded at start-up; `source` and `files` are the arguments of `load` that it was
    loaded with: its name, which may differ from that of the model, and files.
    """

    def __init__(
        self, first: ImageModel, device: str = "cpu", source: str | None = None, **files: Path | None
    ) -> None:
        self.device = device
        self.source = source or first.name
        self.files = {name: path for name, path in files.items() if path is not None}
        self.first = first
        self._first = self._ready(first)
        self._networks: Cache[Network] = Cache(2, work.paused)  # a model that leaves takes its captures along
        self._predictions: Cache[Prediction] = Cache(64, work.paused)
        self._inputs: Cache[torch.Tensor] = Cache(3, work.paused)
        self._records: Cache[Record] = Cache(3, work.paused)
        self._maps: Cache[Map] = Cache(24, work.paused)
        self._measured: Cache[Explanation] = Cache(24, work.paused)
        self._sparsities: Cache[float] = Cache(100, work.paused)

    def _ready(self, model: ImageModel) -> Network:
        """Moves the model to the device and adds a hook that counts evaluated inputs and stops computations
        that no request waits for."""
        model.module.to(self.device)
        model.module.register_forward_pre_hook(lambda _, inputs: work.evaluated(len(inputs[0])))
        return Network.of(model)

    # --- models ---

    def models(self) -> list[str]:
        """The models that can be loaded by name. A page cannot request others, whose code would run here."""
        named = [name for name in MODELS if not any(letter in name for letter in ":.")]
        return list(dict.fromkeys([self.first.name, *named]))

    def model(self, name: str) -> ImageModel:
        model = self.network(name).image_model
        assert model is not None
        return model

    def network(self, name: str) -> Network:
        if name == self.first.name:
            return self._first
        if name not in self.models():
            raise ValueError(f"unknown model {name!r}; models are {', '.join(self.models())}")
        return self._networks.get(name, lambda: self._ready(load(name)))

    def is_loaded(self, name: str) -> bool:
        return name == self.first.name or name in self._networks

    def load_arguments(self, name: str) -> str:
        """The arguments of `load` for a model, as Python code."""
        files = self.files if name == self.first.name else {}
        source = self.source if name == self.first.name else name
        return ", ".join([repr(source), *(f"{key}={str(path)!r}" for key, path in files.items())])

    # --- photos ---

    def open(self, path: Path, name: str, model_name: str) -> tuple[Prediction, Image.Image]:
        """A photo as the model sees it, not yet classified, and the same crop at a higher resolution.

        Raises photos.UnreadableImageError with a message for the user.
        """
        model = self.model(model_name)
        photo = read(path, name)
        crop = model.crop(photo)
        digest = hashlib.blake2b(crop.tobytes(), key=model_name.encode()[:64]).hexdigest()
        return Prediction(name, model_name, crop, (), digest), _detailed(model, photo)

    def pixels(self, path: Path, name: str) -> int:
        with _named(path, name):
            return photos.pixels(path, _turn)

    def classified(self, opened: Prediction) -> Prediction:
        """The photo with its top classes."""

        def compute() -> Prediction:
            recorded, network = self._record(opened), self.network(opened.model)
            scores = getattr(recorded.outputs, "logits", recorded.outputs).reshape(1, -1)
            network.check_labels(scores.shape[1])
            return replace(opened, guesses=top_classes(recorded, network), classes=scores.shape[1])

        return self._predictions.get((opened.digest, opened.name), compute)

    def predict(self, path: Path, name: str, model_name: str) -> Prediction:
        return self.classified(self.open(path, name, model_name)[0])

    @torch.no_grad()
    def classify(self, crop: Image.Image) -> int:
        """The top class of a picture according to the first model."""
        outputs = self.first.module(self.first.prepare(crop).unsqueeze(0).to(self.device))
        return int(getattr(outputs, "logits", outputs)[0].argmax())

    def inputs(self, prediction: Prediction) -> torch.Tensor:
        prepare = self.model(prediction.model).prepare
        compute = lambda: prepare(prediction.crop).unsqueeze(0).to(self.device)  # noqa: E731
        return self._inputs.get(prediction.digest, compute)

    def classes(self, prediction: Prediction, search: str) -> list[dict[str, Any]]:
        """The classes whose names match, best first, each with its other names. Without a search: all
        classes, sorted by name."""
        names = self.model(prediction.model).names()
        names = names or [[f"class {i}"] for i in range(prediction.classes)]
        found = classes.search(names, search)
        return [{"index": i, "label": names[i][0], "note": ", ".join(names[i][1:])} for i in found]

    # --- maps ---

    def key(self, prediction: Prediction, method: Method, target: Any) -> Hashable:
        return (prediction.digest, method, _key(target))

    def is_slow(self, prediction: Prediction, method: Method, target: Any) -> bool:
        """Whether a map needs many passes and is not cached."""
        return controls.is_slow(method) and self.key(prediction, method, target) not in self._maps

    def map(self, prediction: Prediction, method: Method, target: Any) -> Map:
        """The map of a method, without its specificity."""

        def compute() -> Map:
            network = self.network(prediction.model)
            batch = [Prepared(self.inputs(prediction)[0], prediction.crop)]
            self._record(prediction)  # its time is not the map's
            started = time.perf_counter()
            with WarningLog(quiet=True) as log:
                recorded = self._answered(prediction, method, target)
                found = answers(recorded, network, batch, method, target, False, log)
            return Map(found[0], time.perf_counter() - started)

        return self._maps.get(self.key(prediction, method, target), compute)

    def measured(self, prediction: Prediction, method: Method, target: Any) -> Explanation:
        """The explanation with its specificity, which needs a second map."""

        def compute() -> Explanation:
            with WarningLog(quiet=True):  # a zero map of the other class is expected
                explanation = self.map(prediction, method, target).explanation
                return measured(self._answered(prediction, method, target), explanation, target)

        return self._measured.get(self.key(prediction, method, target), compute)

    def has_specificity(self, prediction: Prediction, method: Method, target: Any) -> bool:
        return self.key(prediction, method, target) in self._measured

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
        network, target = self.network(prediction.model), query.resolve_target(prediction.top)
        layers = network.layers(self.inputs(prediction), supported[0], target)
        planes = [(name, values.float().numpy()) for name, values in layers]
        step = max((len(planes) - 1) / (count - 1), 1)
        return [planes[round(i * step)] for i in range(min(count, len(planes)))]

    def sparsity(self, prediction: Prediction, query: Query, q: float) -> float:
        """The Gini index of RectGrad's map at q, with the chosen options of RectGrad."""
        chosen = (m for m in query.configured().values() if isinstance(m, RectGrad))
        method = replace(next(chosen, RectGrad()), tau=None, q=float(q))
        target = query.resolve_target(prediction.top)

        def compute() -> float:
            return float(gini(self._record(prediction).attribute(method, target).sum(1).float().cpu())[0])

        return self._sparsities.get(self.key(prediction, method, target), compute)

    def release(self, digest: str) -> None:
        """Frees the memory of a photo that no session uses anymore."""
        for by_photo in (self._inputs, self._records):
            by_photo.discard(lambda key: key == digest)
        for cache in (self._maps, self._measured, self._predictions, self._sparsities):
            cache.discard(lambda key: key[0] == digest)
        _trim()

    def _answered(self, prediction: Prediction, method: Method, target: Any) -> Answered:
        """A capture's answer for this method, or the recorded forward pass, for any."""
        replayed = self.network(prediction.model).replay(self.inputs(prediction), method, target)
        return self._record(prediction) if replayed is None else replayed

    def _record(self, prediction: Prediction) -> Record:
        def compute() -> Record:
            with work.undisturbed():
                return record(self.model(prediction.model).module, self.inputs(prediction))

        return self._records.get(prediction.digest, compute)


def _detailed(model: ImageModel, photo: Image.Image) -> Image.Image:
    """The part of the photo that the model sees, at its full resolution up to `SHOWN` pixels."""
    height, width = model.size
    available = model.crop_fraction * min(photo.width / width, photo.height / height)
    factor = max(1.0, min(available, SHOWN / max(height, width)))
    return replace(model, size=(round(height * factor), round(width * factor))).crop(photo)


def _trim() -> None:
    """Returns freed memory to the system: glibc would keep hundreds of megabytes."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def read(path: Path, name: str) -> Image.Image:
    """Reads an uploaded photo."""
    with _named(path, name):
        return photos.read(path, tick=_turn)


def _turn() -> None:
    """Lets other photos go first, and stops if no request waits for this one."""
    work.evaluated(0)


@contextlib.contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """Errors show the user's file name, not that of the temporary file."""
    try:
        yield
    except photos.UnreadableImageError as error:
        raise photos.UnreadableImageError(str(error).replace(names.readable(path), name)) from None


def _key(target: Any) -> Hashable:
    return (target.a, target.b) if isinstance(target, contrast) else target
