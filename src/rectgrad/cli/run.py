"""Explains photos: prefetches them, attributes in batches, and writes each result atomically.

A run that was interrupted resumes: results that already exist with the same settings are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rectgrad import photos
from rectgrad.explanation import Explanation, Network, Prepared, explain_prepared
from rectgrad.methods import Method
from rectgrad.methods.catalog import name_of, plain_value
from rectgrad.models import Guess, ImageModel
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
    specificity: bool | None = None  # True: also for methods that need many passes

    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on. Results with other settings are recomputed."""
        return {
            "model": self.model.name,
            "method": name_of(self.method),
            "options": {f.name: plain_value(getattr(self.method, f.name)) for f in fields(self.method)},
            "target": self.target,
            "made_from": list(self.made_from),
            "dark": self.dark,
            "specificity": self.specificity,
        }


def explain_photos(plan: Plan, sources: Iterable[Source], done: Callable[[Source, Any], None]) -> int:
    """Explains every photo and calls `done(source, result)` with its record, or with the error of a file
    that cannot be read. Returns the number of photos that were computed, not loaded from existing results."""
    computed = 0
    plan.model.module.to(plan.device)
    network = Network.of(plan.model)
    enough = 2 * max(plan.model.size)

    def decode(source: Source) -> tuple[Prepared, list[int]]:
        picture = photos.read(source.path, enough)
        return network.from_photo(picture), files.fingerprint(source.path)

    decoded = prefetch(decode, pending(plan, sources, done), depth=2 * plan.batch_size)
    for batch in batches(_readable(decoded, done), plan.batch_size):
        prepared = [ready for _, (ready, _) in batch]
        size, asked = len(batch), (plan.method, plan.target)
        found = explain_prepared(network, prepared, size, *asked, size, plan.specificity)
        for (source, (_, fingerprint)), each in zip(batch, found, strict=True):
            done(source, _write(plan, source, fingerprint, each))
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


def _write(plan: Plan, source: Source, fingerprint: list[int], found: Explanation) -> dict[str, Any]:
    """Writes one result. The JSON file is written last: it marks the result as complete."""
    assert found.target is not None
    result: dict[str, Any] = {
        "image": str(source.path),
        "target": _class(found.target),
        "top5": [_class(guess) for guess in found.top],
        "specificity": None if found.specificity is None else round(found.specificity, 4),
        "notes": list(found.notes),
        "picture": f"{source.name}.png",
        "settings": plan.settings(),
        "photo": fingerprint,
    }
    if plan.maps:
        result["map"] = f"{source.name}.{plan.maps}"
        files.save_array(found.map.float().numpy(), plan.out / result["map"])
    files.save_picture(found.show(dark=plan.dark), plan.out / result["picture"])
    files.save_json(result, plan.out / f"{source.name}.json")
    return result


def _class(guess: Guess) -> dict[str, Any]:
    return {"index": guess.index, "name": guess.label, "confidence": round(guess.probability, 4)}
