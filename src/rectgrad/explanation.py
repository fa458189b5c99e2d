"""Explains photos: prefetches them, attributes in batches, and writes each result atomically.

A run that was interrupted resumes: results that already exist with the same settings are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from rectgrad import image, photos
from rectgrad.api import record
from rectgrad.methods import Method
from rectgrad.methods.catalog import describe, name_of, plain_value
from rectgrad.models import ImageModel
from rectgrad.photos import files
from rectgrad.photos.files import Source
from rectgrad.photos.stream import batches, prefetch


@dataclass(frozen=True)
class Plan:
    """The settings of a run, the same for every photo."""

    model: ImageModel
    method: Method
    out: Path
    target: int | None = None  # None: the top class of each photo
    maps: str | None = None  # "npy" or "npz" to save the raw maps
    batch_size: int = 8
    device: str = "cpu"
    dark: bool = False
    made_from: tuple = ()  # fingerprints of the files of the model
    recompute: bool = False  # ignore existing results

    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on. Results with other settings are recomputed."""
        return {
            "model": self.model.name,
            "method": name_of(self.method),
            "options": {f.name: plain_value(getattr(self.method, f.name)) for f in fields(self.method)},
            "target": self.target,
            "made_from": list(self.made_from),
            "dark": self.dark,
        }


def explain(plan: Plan, sources: Iterable[Source], done: Callable[[Source, Any], None]) -> int:
    """Explains every photo and calls `done(source, result)` with its record, or with the error of a file
    that cannot be read. Returns the number of photos that were computed, not loaded from existing results."""
    computed = 0
    plan.model.module.to(plan.device)
    enough = 2 * max(plan.model.size)

    def decode(source: Source) -> tuple[Image.Image, list[int]]:
        picture = photos.read(source.path, enough)
        return plan.model.crop(picture), files.fingerprint(source.path)

    decoded = prefetch(decode, pending(plan, sources, done), depth=2 * plan.batch_size)
    for batch in batches(_readable(decoded, done), plan.batch_size):
        results = _attribute(plan, [picture for _, (picture, _) in batch])
        for (source, (_, fingerprint)), result in zip(batch, results, strict=True):
            done(source, _write(plan, source, fingerprint, *result))
            computed += 1
    return computed


def pending(plan: Plan, sources: Iterable[Source], done: Callable[[Source, Any], None]) -> Iterator[Source]:
    """Yields the photos that have no result with these settings; calls `done` for the others."""
    for source in sources:
        existing = None if plan.recompute else files.load_json(plan.out / f"{source.name}.json")
        if existing and _is_current(plan, source, existing) and _is_complete(plan, existing):
            done(source, existing)
        else:
            yield source


def _is_current(plan: Plan, source: Source, existing: dict[str, Any]) -> bool:
    """Whether a result was computed from this version of the photo with these settings."""
    photo = files.fingerprint(source.path) if source.path.exists() else None
    return existing.get("settings") == plan.settings() and existing.get("photo") == photo


def _is_complete(plan: Plan, existing: dict[str, Any]) -> bool:
    required = [existing.get("picture")]
    if plan.maps:
        required.append(existing.get("map") if str(existing.get("map")).endswith(plan.maps) else None)
    return all(name and (plan.out / name).exists() for name in required)


def _readable(results: Any, done: Callable[[Source, Any], None]) -> Iterator[tuple[Source, Any]]:
    for source, future in results:
        error = future.exception()
        if error is None:
            yield source, future.result()
        elif isinstance(error, (photos.UnreadableImageError, MemoryError)):
            done(source, error)
        else:
            raise error


def _attribute(plan: Plan, pictures: list[Image.Image]) -> Iterator[tuple[Image.Image, Tensor, Tensor]]:
    """Yields (photo as the network saw it, class probabilities, map) for each photo of a batch."""
    inputs = torch.stack([plan.model.prepare(picture) for picture in pictures]).to(plan.device)
    recorded = record(plan.model.module, inputs)
    scores = getattr(recorded.outputs, "logits", recorded.outputs)
    check_labels(plan.model, scores.shape[1])
    maps = recorded.attribute(plan.method, plan.target)
    yield from zip(pictures, scores.float().softmax(1).cpu(), maps.float().cpu(), strict=True)


def check_labels(model: ImageModel, classes: int) -> None:
    if model.labels and len(model.labels) != classes:
        raise ValueError(f"{len(model.labels)} class names for {classes} classes of {model.name}")


def _write(
    plan: Plan,
    source: Source,
    fingerprint: list[int],
    picture: Image.Image,
    probabilities: Tensor,
    values: Tensor,
) -> dict[str, Any]:
    """Writes one result. The JSON file is written last: it marks the result as complete."""
    target = int(probabilities.argmax()) if plan.target is None else plan.target
    top = probabilities.topk(min(5, len(probabilities))).indices
    result: dict[str, Any] = {
        "image": str(source.path),
        "target": _class(plan, probabilities, target),
        "top5": [_class(plan, probabilities, int(i)) for i in top],
        "picture": f"{source.name}.png",
        "settings": plan.settings(),
        "photo": fingerprint,
    }
    if plan.maps:
        result["map"] = f"{source.name}.{plan.maps}"
        files.save_array(values.numpy(), plan.out / result["map"])
    files.save_picture(draw(plan, picture, values, result["target"]), plan.out / result["picture"])
    files.save_json(result, plan.out / f"{source.name}.json")
    return result


def _class(plan: Plan, probabilities: Tensor, index: int) -> dict[str, Any]:
    confidence = round(float(probabilities[index]), 4)
    return {"index": index, "name": plan.model.label(index), "confidence": confidence}


def draw(plan: Plan, picture: Image.Image, values: Tensor, target: dict[str, Any]) -> Image.Image:
    """Photo, map and overlay side by side, under the name and confidence of the class."""
    height = picture.height * max(
        1, round(448 / picture.height)
    )  # small crops are enlarged by an integer factor
    flat = image.plane(values)
    scheme = image.scheme_of(flat, plan.dark)
    panels = [
        image.Panel(picture, "photo", smooth=True),
        image.Panel(image.colour(flat, scheme), describe(plan.method)),
        image.Panel(image.overlay(picture, flat, name=scheme), "overlay"),
        image.Panel(image.bar(flat, height, plan.dark, scheme), framed=False),
    ]
    caption = f"{target['name']}  {target['confidence']:.0%}"
    return image.sheet([panels], caption, cell=height, dark=plan.dark)
