"""Reads the photos and masks that are judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rectgrad import photos
from rectgrad.explanation import Network
from rectgrad.photos import UnreadableImageError, files


@dataclass
class Album:
    """Photos of one shape as the network takes them, and those that could not be used."""

    inputs: Tensor
    names: list[str]
    crops: list[Image.Image | None]
    broken: list[dict[str, str]] = field(default_factory=list)


def album(network: Network, given: Any, limit: int) -> Album:
    """The first photos, at most `limit`; evenly spread over the list if there are more."""
    pictures = _listed(given)
    spread = (
        [pictures[i * len(pictures) // limit] for i in range(limit)] if len(pictures) > limit else pictures
    )
    inputs: list[Tensor] = []
    names, crops, broken = [], [], []
    for name, picture in spread:
        try:
            prepared = network.prepared(picture)
        except UnreadableImageError as error:
            broken.append({"kind": "photo", "what": name, "why": str(error)})
            continue
        if inputs and prepared.inputs.shape != inputs[0].shape:
            shapes = f"{tuple(prepared.inputs.shape)}, and the first photo is {tuple(inputs[0].shape)}"
            broken.append({"kind": "photo", "what": name, "why": f"{name}: its shape is {shapes}"})
            continue
        inputs.append(prepared.inputs.detach().cpu())
        names.append(name)
        crops.append(prepared.photo)
    if not inputs:
        reasons = f": {broken[0]['why']}" if broken else ""
        raise ValueError(f"no photo to judge{reasons}")
    return Album(torch.stack(inputs), names, crops, broken)


def _listed(given: Any) -> list[tuple[str, Any]]:
    """Pictures with their names."""
    if isinstance(given, (str, Path)):
        return [(source.name, source.path) for source in files.sources([str(given)])]
    if isinstance(given, Tensor):
        return [(str(i), each) for i, each in enumerate(given)]
    if len(given) and isinstance(given[0], files.Source):
        return [(source.name, source.path) for source in given]
    return [(str(each) if isinstance(each, (str, Path)) else str(i), each) for i, each in enumerate(given)]


def masks_of(network: Network, given: Any, shown: Album) -> Tensor | None:
    """Masks (N, H, W) of the photos, cropped like them."""
    if given is None:
        return None
    size = tuple(shown.inputs.shape[-2:])
    if isinstance(given, Tensor):
        chosen = (
            torch.stack([given[int(name)] for name in shown.names])
            if len(given) != len(shown.names)
            else given
        )
        if chosen.dtype != torch.bool or tuple(chosen.shape[-2:]) != size:
            raise ValueError(
                f"masks of shape {tuple(given.shape)} and type {given.dtype}: needs a boolean tensor "
                f"(N, {size[0]}, {size[1]})"
            )
        return chosen.reshape(-1, *size)
    by_name = dict(_listed(given))
    missing = [name for name in shown.names if name not in by_name]
    if missing:
        raise ValueError(f"no mask for {missing[0]!r}; masks have the names of their photos")
    return torch.stack([_mask(network, by_name[name], size) for name in shown.names])


def _mask(network: Network, picture: Any, size: tuple[int, ...]) -> Tensor:
    """True where a picture is bright. A mask of the photo is cropped as the network crops the photo."""
    grey = (photos.read(picture) if isinstance(picture, (str, Path)) else picture).convert("RGB")
    if grey.size != (size[1], size[0]):
        crops = network.image_model is not None and network.own is None
        grey = network.image_model.crop(grey) if crops else grey.resize((size[1], size[0]))  # type: ignore[union-attr]
    return torch.from_numpy(np.asarray(grey.convert("L")) > 127)
