"""The authors' segmentation masks of CIFAR-10 images, matched to the rows of the training set.

Their archive CIFAR10_mask.tar contains pairs of files: an image in BGR order named CLASS_NUMBER, and a file
with "mask" added to that name, which is dark on the object. Both may be larger than 32 x 32.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from rectgrad.data import archive, cifar10, fetch
from rectgrad.data.dataset import DataUnavailableError, Images, cache
from rectgrad.photos import files, reading

ADDRESS = "https://github.com/1202kbs/Rectified-Gradient/raw/master/CIFAR10_mask.tar"
LARGEST = 16 * 2**20  # bytes of an image in the archive
DARK = 200  # grey values of a mask below this are on the object


@dataclass(frozen=True)
class Masks:
    """Rows of the training set, their classes, and masks (N, 32, 32) that are true on the object."""

    index: np.ndarray
    label: np.ndarray
    mask: np.ndarray


def place() -> Path:
    return cache() / "cifar10_masks.npz"


def load() -> Masks:
    if not place().exists():
        raise DataUnavailableError(
            "the masks are not installed: run `rectgrad data masks`, with --from FILE for a local copy"
        )
    try:
        with open(place(), "rb") as file, np.load(file, allow_pickle=False) as content:
            return Masks(content["index"], content["label"], content["mask"])
    except Exception as error:
        raise DataUnavailableError(f"{place()} is damaged; delete it and install the masks again") from error


def install(source: str | None = None, progress: fetch.Progress = fetch.no_progress) -> Path:
    """Stores the masks in the cache; CIFAR-10 must be installed. `source` is a copy of the authors' archive;
    None downloads it."""
    train = cifar10.load().train
    path = (
        Path(source) if source else fetch.download(ADDRESS, cache() / "CIFAR10_mask.tar", progress=progress)
    )
    try:
        found = matched(read(path), train)
    except DataUnavailableError:
        if not source:
            path.unlink(missing_ok=True)  # otherwise it would be reused next time
        raise
    files.remove_partial_files(cache())
    with files.atomic(place()) as part, open(part, "wb") as stream:
        np.savez_compressed(stream, index=found.index, label=found.label, mask=found.mask)
    return place()


class Pair(NamedTuple):
    label: int
    number: int
    pixels: np.ndarray
    mask: np.ndarray


def read(path: Path) -> list[Pair]:
    """The pairs of an archive, sorted by class and number."""
    pictures: dict[tuple[int, int], np.ndarray] = {}
    dark: dict[tuple[int, int], np.ndarray] = {}
    for name, content in archive.members(path, lambda name: _key(name) is not None, LARGEST):
        key = _key(name)
        if key is not None:
            try:
                picture = reading.decode(io.BytesIO(content)).convert("L" if "mask" in name else "RGB")
            except Exception as error:
                raise DataUnavailableError(f"{name} in {str(path)!r} is not an image ({error})") from error
            small = np.asarray(picture.resize((32, 32), Image.Resampling.LANCZOS))
            if "mask" in name:
                dark[key] = small < DARK
            else:
                pictures[key] = small[..., ::-1]
    if not pictures or pictures.keys() != dark.keys():
        alone = sorted(pictures.keys() ^ dark.keys())
        what = f"images and masks do not match: {alone[:3]}" if alone else "it has no images CLASS_NUMBER"
        raise DataUnavailableError(f"{str(path)!r} is not the authors' archive of masks: {what}")
    return [Pair(*key, pictures[key], dark[key]) for key in sorted(pictures)]


def _key(name: str) -> tuple[int, int] | None:
    """Class and number of an image file; None for other files."""
    parts = re.match(r"([a-z]+)_(\d{1,9})", name.lower())
    if parts is None or parts[1] not in cifar10.CLASSES:
        return None
    return cifar10.CLASSES.index(parts[1]), int(parts[2])


def matched(pairs: list[Pair], train: Images) -> Masks:
    """Matches each image to the nearest image of its class in the training set."""
    rows = {label: np.flatnonzero(train.labels == label) for label in {pair.label for pair in pairs}}
    flat = {label: train.pixels[at].reshape(len(at), -1).astype(np.float32) for label, at in rows.items()}
    index = []
    for pair in pairs:
        distance = np.square(flat[pair.label] - pair.pixels.reshape(1, -1)).mean(1)
        nearest = int(distance.argmin())
        if distance[nearest] > FARTHEST**2:
            name = f"{cifar10.CLASSES[pair.label]}_{pair.number}"
            raise DataUnavailableError(f"{name} does not match any image of CIFAR-10's training set")
        index.append(rows[pair.label][nearest])
    return Masks(
        np.array(index, dtype=np.int32),
        np.array([pair.label for pair in pairs], dtype=np.int8),
        np.stack([pair.mask for pair in pairs]),
    )


FARTHEST = 40  # largest root mean square difference due to resizing and compression
