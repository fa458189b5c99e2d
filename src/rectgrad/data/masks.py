"""The authors' segmentation masks of CIFAR-10 pictures, matched to the rows of the training set.

Their archive CIFAR10_mask.tar holds pairs of files, CLASS_NUMBER and the same with "mask" in its name: a
picture, its colours the other way round, and a mask, dark on the object. Both may be larger than 32 x 32.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from rectgrad.data import cifar10, fetch
from rectgrad.data.dataset import DataUnavailableError, Images, cache
from rectgrad.photos import files

ADDRESS = "https://github.com/1202kbs/Rectified-Gradient/raw/master/CIFAR10_mask.tar"
LARGEST = 16 * 2**20  # bytes of a picture in the archive
DARK = 200  # a mask's grey is below this on the object


@dataclass(frozen=True)
class Masks:
    """index: rows of the training set. label: their classes. mask: (N, 32, 32), true on the object."""

    index: np.ndarray
    label: np.ndarray
    mask: np.ndarray


def place() -> Path:
    return cache() / "cifar10_masks.npz"


def load() -> Masks:
    if not place().exists():
        raise DataUnavailableError(
            "the masks are not here yet: run `rectgrad data masks`, with --from FILE for a copy of your own"
        )
    with np.load(place(), allow_pickle=False) as content:
        return Masks(content["index"], content["label"], content["mask"])


def install(source: str | None = None, watch: fetch.Watch = fetch.unwatched) -> Path:
    """Put the masks into the cache; CIFAR-10 must be there already. source: the authors' archive as a file;
    None downloads it."""
    train = cifar10.load().train
    archive = Path(source) if source else fetch.download(ADDRESS, cache() / "CIFAR10_mask.tar", watch=watch)
    try:
        found = matched(read(archive), train)
    except DataUnavailableError:
        if not source:
            archive.unlink(missing_ok=True)  # or it would be read again the next time
        raise
    with files.whole(place()) as part, open(part, "wb") as stream:
        np.savez_compressed(stream, index=found.index, label=found.label, mask=found.mask)
    return place()


class Pair(NamedTuple):
    label: int
    number: int
    pixels: np.ndarray
    mask: np.ndarray


def read(archive: Path) -> list[Pair]:
    """The pairs of an archive, by class and number."""
    pictures: dict[tuple[int, int], np.ndarray] = {}
    dark: dict[tuple[int, int], np.ndarray] = {}
    for name, content in _members(archive):
        key = _key(name)
        if key is not None:
            try:
                picture = Image.open(io.BytesIO(content)).convert("L" if "mask" in name else "RGB")
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise DataUnavailableError(f"{name} in {str(archive)!r} is no picture ({error})") from error
            small = np.asarray(picture.resize((32, 32), Image.Resampling.LANCZOS))
            if "mask" in name:
                dark[key] = small < DARK
            else:
                pictures[key] = small[..., ::-1]
    if not pictures or pictures.keys() != dark.keys():
        alone = sorted(pictures.keys() ^ dark.keys())
        what = (
            f"pictures and masks do not pair up: {alone[:3]}" if alone else "no pictures CLASS_NUMBER in it"
        )
        raise DataUnavailableError(f"{str(archive)!r} is not the authors' archive of masks: {what}")
    return [Pair(*key, pictures[key], dark[key]) for key in sorted(pictures)]


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if not archive.is_file():
        raise DataUnavailableError(f"there is no file {str(archive)!r}")
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                name = Path(member.name).name
                wanted = member.isfile() and _key(name) is not None and member.size <= LARGEST
                stream = opened.extractfile(member) if wanted else None
                if stream is not None:
                    yield name, stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataUnavailableError(f"{str(archive)!r} is damaged or cut short ({error})") from error


def _key(name: str) -> tuple[int, int] | None:
    """Class and number of a file; None for files that are no pictures."""
    parts = re.match(r"([a-z]+)_(\d+)", name.lower())
    if parts is None or parts[1] not in cifar10.CLASSES:
        return None
    return cifar10.CLASSES.index(parts[1]), int(parts[2])


def matched(pairs: list[Pair], train: Images) -> Masks:
    """Each picture's row: the nearest of its class in the training set."""
    rows = {label: np.flatnonzero(train.labels == label) for label in {pair.label for pair in pairs}}
    flat = {label: train.pixels[at].reshape(len(at), -1).astype(np.float32) for label, at in rows.items()}
    index = []
    for pair in pairs:
        distance = np.square(flat[pair.label] - pair.pixels.reshape(1, -1)).mean(1)
        nearest = int(distance.argmin())
        if distance[nearest] > FARTHEST**2:
            name = f"{cifar10.CLASSES[pair.label]}_{pair.number}"
            raise DataUnavailableError(f"{name} is like no picture of CIFAR-10's training set")
        index.append(rows[pair.label][nearest])
    return Masks(
        np.array(index, dtype=np.int32),
        np.array([pair.label for pair in pairs], dtype=np.int8),
        np.stack([pair.mask for pair in pairs]),
    )


FARTHEST = 40  # root mean square difference of colours that resizing and compression explain
