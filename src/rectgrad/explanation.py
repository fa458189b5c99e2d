"""Photos to explanations: decode ahead, explain in batches, write each result whole, go on after a stop."""

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
from rectgrad.photos.stream import ahead, batches


@dataclass(frozen=True)
class Plan:
    """What is asked of every photo."""

    model: ImageModel
    method: Method
    out: Path
    target: int | None = None  # None: each photo's top class
    maps: str | None = None  # "npy" or "npz": keep the raw maps
    batch_size: int = 8
    device: str = "cpu"
    dark: bool = False
    made_from: tuple = ()  # marks of the files that the model came from
    again: bool = False  # do what is done once more

    def settings(self) -> dict[str, Any]:
        """What a result depends on; a result made with other settings is made again."""
        return {
            "model": self.model.name,
            "method": name_of(self.method),
            "options": {f.name: plain_value(getattr(self.method, f.name)) for f in fields(self.method)},
            "target": self.target,
            "made_from": list(self.made_from),
            "dark": self.dark,
        }


def explain(plan: Plan, sources: Iterable[Source], done: Callable[[Source, Any], None]) -> int:
    """Explain every photo; `done(source, result)` is told of each: the record, or the error of a bad file.
    Returns how many were explained now; the others had been before."""
    fresh = 0
    plan.model.module.to(plan.device)
    enough = 2 * max(plan.model.size)

    def decode(source: Source) -> tuple[Image.Image, list[int]]:
        picture = photos.read(source.path, enough)
        return plan.model.crop(picture), files.mark(source.path)

    ready = _readable(ahead(decode, left(plan, sources, done), depth=2 * plan.batch_size), done)
    for batch in batches(ready, plan.batch_size):
        explained = _explained(plan, [picture for _, (picture, _) in batch])
        for (source, (_, mark)), result in zip(batch, explained, strict=True):
            done(source, _written(plan, source, mark, *result))
            fresh += 1
    return fresh


def left(plan: Plan, sources: Iterable[Source], done: Callable[[Source, Any], None]) -> Iterator[Source]:
    """The photos without a result of the same settings; the others are done."""
    for source in sources:
        known = None if plan.again else files.load_json(plan.out / f"{source.name}.json")
        if known and _same_question(plan, source, known) and _complete(plan, known):
            done(source, known)
        else:
            yield source


def _same_question(plan: Plan, source: Source, known: dict[str, Any]) -> bool:
    """Whether a result was made of this very photo with these settings."""
    photo = files.mark(source.path) if source.path.exists() else None
    return known.get("settings") == plan.settings() and known.get("photo") == photo


def _complete(plan: Plan, known: dict[str, Any]) -> bool:
    wanted = [known.get("picture")]
    if plan.maps:
        wanted.append(known.get("map") if str(known.get("map")).endswith(plan.maps) else None)
    return all(name and (plan.out / name).exists() for name in wanted)


def _readable(results: Any, done: Callable[[Source, Any], None]) -> Iterator[tuple[Source, Any]]:
    for source, future in results:
        error = future.exception()
        if error is None:
            yield source, future.result()
        elif isinstance(error, (photos.UnreadableImageError, MemoryError)):
            done(source, error)
        else:
            raise error


def _explained(plan: Plan, pictures: list[Image.Image]) -> Iterator[tuple[Image.Image, Tensor, Tensor]]:
    """(photo as the network saw it, class probabilities, map) for each."""
    inputs = torch.stack([plan.model.prepare(picture) for picture in pictures]).to(plan.device)
    kept = record(plan.model.module, inputs)
    scores = getattr(kept.outputs, "logits", kept.outputs)
    check_labels(plan.model, scores.shape[1])
    maps = kept.attribute(plan.method, plan.target)
    yield from zip(pictures, scores.float().softmax(1).cpu(), maps.float().cpu(), strict=True)


def check_labels(model: ImageModel, classes: int) -> None:
    if model.labels and len(model.labels) != classes:
        raise ValueError(f"there are {len(model.labels)} class names for {classes} classes of {model.name}")


def _written(
    plan: Plan, source: Source, mark: list[int], picture: Image.Image, chances: Tensor, values: Tensor
) -> dict[str, Any]:
    """Write one result; its JSON last, as the mark that it is complete."""
    target = int(chances.argmax()) if plan.target is None else plan.target
    result: dict[str, Any] = {
        "image": str(source.path),
        "target": _class(plan, chances, target),
        "top5": [_class(plan, chances, int(i)) for i in chances.topk(min(5, len(chances))).indices],
        "picture": f"{source.name}.png",
        "settings": plan.settings(),
        "photo": mark,
    }
    if plan.maps:
        result["map"] = f"{source.name}.{plan.maps}"
        files.save_array(values.numpy(), plan.out / result["map"])
    files.save_picture(draw(plan, picture, values, result["target"]), plan.out / result["picture"])
    files.save_json(result, plan.out / f"{source.name}.json")
    return result


def _class(plan: Plan, chances: Tensor, index: int) -> dict[str, Any]:
    return {"index": index, "name": plan.model.label(index), "confidence": round(float(chances[index]), 4)}


def draw(plan: Plan, picture: Image.Image, values: Tensor, target: dict[str, Any]) -> Image.Image:
    """Photo, map and overlay side by side, with what was explained above them."""
    height = picture.height * max(1, round(448 / picture.height))  # small crops are enlarged, whole pixels
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
