"""Reads the photos and masks that are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rectgrad import photos
from rectgrad.checks import check_input
from rectgrad.explanation import Network
from rectgrad.photos import UnreadableImageError, files
from rectgrad.verdict.rows import tensor_digest


@dataclass
class Album:
    """Photos of one shape as the network takes them, and those that could not be used."""

    inputs: Tensor
    names: list[str]
    crops: list[Image.Image | None]
    places: list[int]  # of these photos among those that were given
    given: int  # how many photos were given
    broken: list[dict[str, str]] = field(default_factory=list)


def album(network: Network, given: Any, limit: int) -> Album:
    """The first photos, at most `limit`; evenly spread over the list if there are more.

    Identical pictures are kept once: statistics treat each photo as an independent observation.
    """
    pictures = _listed(given)
    count = min(len(pictures), limit)
    inputs: list[Tensor] = []
    names, crops, places, broken = [], [], [], []
    known: dict[str, str] = {}  # digest -> name
    for place in (i * len(pictures) // count for i in range(count)):
        name, picture = pictures[place]
        try:
            prepared = network.prepared(picture)
        except UnreadableImageError as error:
            broken.append({"kind": "photo", "what": name, "why": str(error)})
            continue
        if inputs and prepared.inputs.shape != inputs[0].shape:
            shapes = f"{tuple(prepared.inputs.shape)}, and the first photo is {tuple(inputs[0].shape)}"
            broken.append({"kind": "photo", "what": name, "why": f"{name}: its shape is {shapes}"})
            continue
        digest = tensor_digest(prepared.inputs)
        if digest in known:
            broken.append({"kind": "duplicate", "what": name, "why": f"the same picture as {known[digest]}"})
            continue
        known[digest] = name
        inputs.append(prepared.inputs.detach().cpu())
        places.append(place)
        names.append(name)
        crops.append(prepared.photo)
    if not inputs:
        reasons = f": {broken[0]['why']}" if broken else ""
        raise ValueError(f"no photo to judge{reasons}")
    check_input(together := torch.stack(inputs), together)
    return Album(together, names, crops, places, len(pictures), broken)


def _listed(given: Any) -> list[tuple[str, Any]]:
    """Pictures with their names."""
    if isinstance(given, (str, Path)):
        return [(source.name, source.path) for source in files.sources([str(given)])]
    if isinstance(given, Tensor):
        return [(str(i), each) for i, each in enumerate(given)]
    if len(given) and isinstance(given[0], files.Source):
        return [(source.name, source.path) for source in given]
    return [(str(each) if isinstance(each, (str, Path)) else str(i), each) for i, each in enumerate(given)]


def with_outputs(shown: Album, outputs: Tensor) -> Album:
    """Without the photos for which the network's outputs are NaN or infinite: no map explains them."""
    good = outputs.reshape(len(outputs), -1).isfinite().all(1)
    if good.all():
        return shown
    why = "the network's outputs are NaN or infinite"
    if not good.any():
        raise ValueError(f"no photo to judge: {why}")
    bad = [shown.names[i] for i in (~good).nonzero()[:, 0].tolist()]
    kept = good.nonzero()[:, 0].tolist()
    return replace(
        shown,
        inputs=shown.inputs[kept],
        names=[shown.names[i] for i in kept],
        crops=[shown.crops[i] for i in kept],
        places=[shown.places[i] for i in kept],
        broken=shown.broken + [{"kind": "photo", "what": name, "why": f"{name}: {why}"} for name in bad],
    )


def masks_of(network: Network, given: Any, shown: Album) -> Tensor | None:
    """Masks (N, H, W) of the photos, cropped like them. Those of a folder have the names of their photos;
    others are in the order of the photos that were given."""
    if given is None:
        return None
    size = tuple(shown.inputs.shape[-2:])
    if isinstance(given, (str, Path)):
        by_name = dict(_listed(given))
        own = [_without_suffix(name, by_name) for name in shown.names]
        missing = [name for name in own if name not in by_name]
        if missing:
            raise ValueError(f"no mask for {missing[0]!r}; masks have the names of their photos")
        return torch.stack([_mask(network, by_name[name], size) for name in own])
    if len(given) != shown.given:
        raise ValueError(f"{len(given)} masks for {shown.given} photos: needs one for each")
    if not isinstance(given, Tensor):
        return torch.stack([_mask(network, given[place], size) for place in shown.places])
    if given.dtype != torch.bool or tuple(given.shape) not in ((len(given), *size), (len(given), 1, *size)):
        raise ValueError(
            f"masks of shape {tuple(given.shape)} and type {given.dtype}: needs a boolean tensor "
            f"(N, {size[0]}, {size[1]})"
        )
    return given[shown.places].reshape(-1, *size)


def _without_suffix(name: str, known: Mapping[str, Any]) -> str:
    """The name of the results of a photo that was given as a path."""
    return name if name in known or Path(name).suffix.lower() not in photos.SUFFIXES else Path(name).stem


def _mask(network: Network, picture: Any, size: tuple[int, ...]) -> Tensor:
    """True where a picture is bright. The mask of a photo is cropped like the photo."""
    if isinstance(picture, (np.ndarray, Tensor)):
        values = np.asarray(picture)
        if values.dtype != bool or values.ndim != 2:
            given = f"a mask of shape {values.shape} and type {values.dtype}"
            raise ValueError(f"{given}: needs a boolean array (H, W), a picture or a path")
        picture = Image.fromarray(np.uint8(255) * values)
    grey = (photos.read(picture) if isinstance(picture, (str, Path)) else picture).convert("RGB")
    if grey.size != (size[1], size[0]):
        crops = network.image_model is not None and network.own is None
        grey = network.image_model.crop(grey) if crops else grey.resize((size[1], size[0]))  # type: ignore[union-attr]
    return torch.from_numpy(np.asarray(grey.convert("L")) > 127)
