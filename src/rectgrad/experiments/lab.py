"""The context of an experiment: dataset, trained network, photos, parameters and cached parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad import training
from rectgrad.data import DATASETS, Dataset, Images, masks, scaled
from rectgrad.data.dataset import cache
from rectgrad.data.fetch import Progress, no_progress
from rectgrad.experiments.gallery import MODEL, Gallery, gallery
from rectgrad.experiments.parts import Parts
from rectgrad.models import ModelUnavailableError, load
from rectgrad.photos import files

NO_PHOTOS = "no photos were shown"
EPOCHS = {"cifar10": 20, "shapes": 7}
SHIPPED = {("cifar10", "standard"): "cifar10_cnn", ("cifar10", "patch"): "cifar10_cnn_patch"}  # of seed 0


@dataclass
class Lab:
    experiment: str
    dataset_name: str
    preset: str
    numbers: dict[str, Any]  # the parameters of the preset
    out: Path
    device: str = "cpu"
    seed: int = 0
    progress: Progress = field(default=no_progress, repr=False)
    shows_photos: bool = False
    model: str | None = None  # for the photos; None: the default, which needs no download
    engine: str = "local"  # or ray, if the experiment supports it
    images: Path | None = None  # a folder of photos; None: those of scikit-image
    notes: list[str] = field(
        default_factory=list
    )  # remarks for the record, such as photos that could not be read
    _networks: dict[Any, nn.Module] = field(default_factory=dict, init=False, repr=False)

    def settings(self) -> dict[str, Any]:
        """Everything that the result depends on."""
        named = {"experiment": self.experiment, "dataset": self.dataset_name, "preset": self.preset}
        photos = files.sources([str(self.images)]) if self.images else []
        fingerprints = [
            [source.name, *files.fingerprint(source.path)] for source in photos if source.path.exists()
        ]
        shown = {"model": self.model or MODEL, "photos": fingerprints or "scikit-image"}
        trained = {"seed": self.seed, "epochs": EPOCHS[self.dataset_name]}
        return named | trained | self.numbers | (shown if self.shows_photos else {})

    @functools.cached_property
    def parts(self) -> Parts:
        return Parts(self.out / f".{self.experiment}.parts", self.settings())

    @functools.cached_property
    def dataset(self) -> Dataset:
        return DATASETS[self.dataset_name]()

    @property
    def network(self) -> nn.Module:
        """The paper's CNN, trained on the dataset."""
        return self.trained("standard", _unchanged)

    def trained(self, name: str, change: Callable[[Images], Images], seed: int | None = None) -> nn.Module:
        """The CNN trained on images modified by `change`; `name` identifies the modification.

        Uses the weights in the package if there are any; otherwise trains once and caches the weights.
        """
        seed = self.seed if seed is None else seed
        if (name, seed) not in self._networks:
            module = self._load_or_train(name, change, seed)
            self._networks[name, seed] = module.to(self.device).eval().requires_grad_(False)
        return self._networks[name, seed]

    def _load_or_train(self, name: str, change: Callable[[Images], Images], seed: int) -> nn.Module:
        if seed == 0 and (self.dataset_name, name) in SHIPPED:
            return load(SHIPPED[self.dataset_name, name]).module
        epochs = EPOCHS[self.dataset_name]
        plan = training.Plan(epochs=epochs, seed=seed, device=self.device)
        path = cache() / f"{self.dataset_name}-{name}-{epochs}-seed{seed}.safetensors"
        return training.train(
            change(self.dataset.train), plan, checkpoint=path, progress=self.progress
        ).module

    def test(self) -> tuple[Tensor, Images]:
        """The test images of the preset, scaled for the network and unscaled."""
        images = self.dataset.test.rows(slice(0, self.numbers["images"]))
        return scaled(images.pixels), images

    def masked(self) -> tuple[Tensor, Tensor, Images]:
        """The first correctly classified images of each class that have object masks: scaled for the network,
        their masks, and unscaled."""
        images, each = self._with_masks(), self.numbers["per_class"]
        right = training.logits(self.network, scaled(images.pixels)).argmax(1).numpy() == images.labels
        rows = [np.flatnonzero(right & (images.labels == c))[:each] for c in range(len(self.dataset.classes))]
        found = images.rows(np.concatenate(rows))
        if not len(found):
            raise ValueError(
                "the network classifies no image with a mask correctly, so there is nothing to measure"
            )
        assert found.masks is not None
        return scaled(found.pixels), torch.from_numpy(found.masks), found

    def _with_masks(self) -> Images:
        if self.dataset_name == "shapes":
            return self.dataset.test
        known = masks.load()
        first = np.sort(np.unique(known.index, return_index=True)[1])  # three images occur twice
        train = self.dataset.train
        return Images(train.pixels[known.index[first]], train.labels[known.index[first]], known.mask[first])

    @functools.cached_property
    def gallery(self) -> Gallery | None:
        """Photos and their network; None, with a note, if the default photos or weights are not installed."""
        try:
            found, broken = gallery(self.model or MODEL, self.images, self.device)
        except (ModelUnavailableError, ValueError) as error:
            if self.model or self.images:
                raise
            self.notes.append(f"{NO_PHOTOS}: {error}")
            return None
        self.notes += [f"skipped: {message}" for message in broken]
        return found


def _unchanged(images: Images) -> Images:
    return images
