"""Dataset types: images with their classes and, if known, object masks."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class DataUnavailableError(RuntimeError):
    """A dataset is not available, for example because the download failed or a file is damaged."""


@dataclass(frozen=True)
class Images:
    """pixels: (N, 32, 32, 3) bytes. labels: (N,). masks: (N, 32, 32), true on the object; None if unknown."""

    pixels: np.ndarray
    labels: np.ndarray
    masks: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: np.ndarray | slice) -> Images:
        masks = None if self.masks is None else self.masks[rows]
        return Images(self.pixels[rows], self.labels[rows], masks)


@dataclass(frozen=True)
class Dataset:
    name: str
    classes: tuple[str, ...]
    train: Images
    test: Images


def digest_of(images: Images) -> str:
    """sha256 of the pixels and labels."""
    digest = hashlib.sha256(np.ascontiguousarray(images.pixels).tobytes())
    digest.update(images.labels.astype("<i8").tobytes())
    return digest.hexdigest()


def scaled(pixels: np.ndarray) -> Tensor:
    """Converts bytes (N, 32, 32, 3) to network inputs: (N, 3, 32, 32), x / 127.5 - 1."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def cache() -> Path:
    """The folder for datasets: $RECTGRAD_CACHE, or the cache folder of the system."""
    if given := os.environ.get("RECTGRAD_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "rectgrad"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rectgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rectgrad"
