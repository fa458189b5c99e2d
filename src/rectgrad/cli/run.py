"""Runs a command over many photos: decodes ahead, computes in batches, draws and writes in the background.

Built-in networks explain two batches at a time, each on half of the threads: a single batch leaves a core
idle a quarter of the time (1.25 times as many photos per second on two cores).

A result consists of NAME.png, NAME.json (the network's answer and all settings), a thumbnail and, optionally,
the raw maps. Files are written atomically, the JSON file last. An interrupted run resumes: a result is reused
if the content of the photo, the settings and the model are the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from rectgrad import photos
from rectgrad.cli import options as shared
from rectgrad.engine.diagnose import warn
from rectgrad.explanation import Explanation, Network, Prepared
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.models import Guess, ImageModel
from rectgrad.models.fingerprint import fingerprint
from rectgrad.photos import files, names
from rectgrad.photos.files import Source
from rectgrad.photos.stream import batches, prefetch

Json = dict[str, Any]
_WRITERS = 2  # threads that draw and write results; more would only compete with the network
Done = Callable[[Source, Any], None]  # called with the record of a photo, or the error of an unreadable file


class Drawn(NamedTuple):
    """The results of a photo. `summary` goes into the JSON record."""

    picture: Image.Image
    thumbnail: Image.Image
    maps: np.ndarray | Mapping[str, np.ndarray]
    summary: Json


class Work(Protocol):
    """What a command does with photos. `draw` runs in the background, and so does `explain` in pairs."""

    def settings(self) -> Json:
        """Everything that a result depends on, except the photo and the model."""
        ...

    def explain(self, network: Network, batch: list[Prepared]) -> list[Any]:
        """One answer for each photo: its explanation, or several explanations."""
        ...

    def draw(self, answer: Any) -> Drawn: ...


@dataclass(frozen=True)
class Plan:
    """The parameters of a run."""

    model: ImageModel
    work: Work
    out: Path
    maps: str | None = None  # "npy" or "npz" to save the raw maps
    batch_size: int = 8
    device: str = "cpu"
    made_from: tuple = ()  # the model's Python file with the hash of its content
    recompute: bool = False  # ignore existing results
    in_pairs: bool = False  # explain two batches at a time

    def settings(self) -> Json:
        """Everything that a result depends on, except the photo, as it is read back from JSON."""
        model = {"model": self.model.name, "weights": fingerprint(self.model), "made_from": self.made_from}
        return json.loads(json.dumps({**model, **self.work.settings()}))


class Ready(NamedTuple):
    """A photo that has no result yet."""

    prepared: Prepared
    digest: str


def run(plan: Plan, sources: Iterable[Source], done: Done) -> int:
    """Processes every photo. Returns how many had to be computed because there was no existing result."""
    plan.model.module.to(plan.device)
    with contextlib.closing(Network.of(plan.model)) as network:
        try:
            return _run(plan, network, sources, done)
        except Exception:
            shared.check_alone(plan.model, plan.device)  # reports an error of the model itself
            raise


def _run(plan: Plan, network: Network, sources: Iterable[Source], done: Done) -> int:
    settings, computed = plan.settings(), 0

    def look(source: Source) -> Json | Ready:
        with photos.opened(source.path) as opened:
            file = io.BytesIO(opened.read())  # read once: the digest is that of the pixels that are explained
            digest = files.digest(file)
            existing = None if plan.recompute else _existing(plan, settings, source, digest)
            if existing is not None:
                return existing
            picture = photos.decode(file, 2 * max(plan.model.size))
        return Ready(network.from_photo(picture), digest)

    def write(answer: tuple[Source, str, Any]) -> Json:
        source, digest, found = answer
        return _write(plan, settings, source, digest, plan.work.draw(found))

    looked = prefetch(look, sources, depth=2 * plan.batch_size)
    with contextlib.closing(_answers(plan, network, _to_compute(looked, done))) as answers:
        for (source, *_), future in prefetch(write, answers, _WRITERS, 2 * plan.batch_size, prompt=True):
            done(source, future.result())
            computed += 1
    return computed


def waiting(plan: Plan, sources: Iterable[Source], done: Done) -> Iterator[Source]:
    """Yields the photos that have no result; calls `done` for the others."""
    settings = plan.settings()

    def look(source: Source) -> Json | None:
        with photos.opened(source.path) as file:
            return None if plan.recompute else _existing(plan, settings, source, files.digest(file))

    for source, future in prefetch(look, sources):
        existing = None if future.exception() else future.result()
        if existing is None:
            yield source  # includes unreadable files, which are reported when they are decoded
        else:
            done(source, existing)


def _to_compute(looked: Iterable[tuple[Source, Future]], done: Done) -> Iterator[tuple[Source, Ready]]:
    """The photos without a result; `done` is called for existing results and for unreadable files."""
    for source, future in looked:
        error = future.exception()
        if isinstance(error, (photos.UnreadableImageError, MemoryError)):
            done(source, error)
        elif isinstance(found := future.result(), Ready):
            yield source, found
        else:
            done(source, found)


def _answers(
    plan: Plan, network: Network, ready: Iterable[tuple[Source, Ready]]
) -> Generator[tuple[Source, str, Any], None, None]:
    def explain(batch: list[tuple[Source, Ready]]) -> list[Any]:
        return _explained(plan, network, [photo.prepared for _, photo in batch])

    groups = batches(ready, plan.batch_size)
    if plan.in_pairs and torch.get_num_threads() > 1:
        found = _in_pairs(explain, groups)
    else:  # in the main thread, which Ctrl-C interrupts at once
        found = ((batch, explain(batch)) for batch in groups)
    for batch, answers in found:
        for (source, photo), answer in zip(batch, answers, strict=True):
            yield source, photo.digest, answer


def _in_pairs(explain: Callable[[Any], list[Any]], groups: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads // 2)
    try:
        with contextlib.closing(prefetch(explain, groups, workers=2, depth=3, prompt=True)) as explained:
            for batch, future in explained:
                yield batch, future.result()
    finally:
        torch.set_num_threads(threads)


def _explained(plan: Plan, network: Network, batch: list[Prepared]) -> list[Any]:
    """Explains a batch; every map of a run is computed here. Warnings about a map are in its record and its
    picture, and only the others are printed."""
    with WarningLog(quiet=True) as log:
        found = plan.work.explain(network, batch)
    own = {message for answer in found for each in _several(answer) for message in each.warnings}
    for message in dict.fromkeys(log.messages):
        if message not in own:
            warn(message)
    return found


def _several(answer: Any) -> list[Explanation]:
    """The explanations of one photo: a single one, or one for each method."""
    return [answer] if isinstance(answer, Explanation) else list(answer.values())


def _existing(plan: Plan, settings: Json, source: Source, digest: str) -> Json | None:
    """The record of a complete result for this photo and these settings; None if there is none."""
    found = files.load_record(plan.out / f"{source.name}.json")
    if (found.get("settings"), found.get("photo")) != (settings, digest):
        return None
    required = [found.get("picture"), found.get("thumbnail")]
    if plan.maps:
        required.append(found.get("map") if str(found.get("map")).endswith(plan.maps) else None)
    return found if all(name and (plan.out / name).exists() for name in required) else None


def _write(plan: Plan, settings: Json, source: Source, digest: str, drawn: Drawn) -> Json:
    """Writes one result. The JSON file is written last: it marks the result as complete."""
    record: Json = {
        "image": names.readable(source.path),
        **drawn.summary,
        "picture": f"{source.name}.png",
        "thumbnail": f"thumbnails/{source.name}.jpg",
        "settings": settings,
        "photo": digest,
    }
    _forget(plan, settings, source, digest)
    if plan.maps:
        record["map"] = f"{source.name}.{plan.maps}"
        files.save_array(drawn.maps, plan.out / record["map"])
    files.save_picture(drawn.picture, plan.out / record["picture"])
    files.save_thumbnail(drawn.thumbnail, plan.out / record["thumbnail"])
    files.save_json(record, plan.out / f"{source.name}.json")
    return record


def _forget(plan: Plan, settings: Json, source: Source, digest: str) -> None:
    """Removes the record of an earlier result, which would describe files that are replaced one by one, and
    its raw maps if they are of other settings or another photo."""
    path = plan.out / f"{source.name}.json"
    found = files.load_record(path)
    if not {"settings", "photo"} <= found.keys():
        return  # not ours
    path.unlink(missing_ok=True)
    if (found["settings"], found["photo"]) != (settings, digest):
        for kind in shared.KINDS:
            (plan.out / f"{source.name}.{kind}").unlink(missing_ok=True)


def summary_of(found: Explanation) -> Json:
    """The fields of a JSON record that describe an explanation."""
    assert found.target is not None
    return {
        "target": _class(found.target),
        "top5": [_class(guess) for guess in found.top],
        "specificity": None if found.specificity is None else round(found.specificity, 4),
        "caution": found.caution,
        "warnings": list(found.warnings),
        "notes": list(found.notes),
    }


def summary_of_several(found: Mapping[str, Explanation]) -> Json:
    """The same for several explanations of one photo. `specificity` maps each name to a value."""
    first = summary_of(next(iter(found.values())))
    each = {name: summary_of(one) for name, one in found.items()}
    return {
        "target": first["target"],
        "top5": first["top5"],
        "specificity": {name: one["specificity"] for name, one in each.items()},
        "caution": "; ".join(dict.fromkeys(one["caution"] for one in each.values() if one["caution"])),
        "warnings": [f"{name}: {text}" for name, one in each.items() for text in one["warnings"]],
    }


def array(found: Explanation) -> np.ndarray:
    return found.map.float().numpy()


def _class(guess: Guess) -> Json:
    """JSON has no NaN: the probability of a single output is null."""
    confidence = None if math.isnan(guess.probability) else round(guess.probability, 4)
    return {"index": guess.index, "name": guess.label, "confidence": confidence}
