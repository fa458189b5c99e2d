"""Datasets: CIFAR-10, its segmentation masks, and the generated `shapes`, stored in a cache folder.

cifar = rectgrad.data.cifar10.load()      # after `rectgrad data cifar10`
small = rectgrad.data.shapes.load()       # needs no files
"""

from collections.abc import Callable

from rectgrad.data import cifar10, masks, shapes
from rectgrad.data.dataset import Dataset, DataUnavailableError, Images, digest_of, scaled

# name -> loader
DATASETS: dict[str, Callable[[], Dataset]] = {"cifar10": cifar10.load, "shapes": shapes.load}

__all__ = [
    "DATASETS",
    "DataUnavailableError",
    "Dataset",
    "Images",
    "cifar10",
    "digest_of",
    "masks",
    "scaled",
    "shapes",
]
