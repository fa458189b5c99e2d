"""What an experiment works with: dataset, trained network, photos, numbers, a place for finished parts."""

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
from rectgrad.data.fetch import Watch, unwatched
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
    numbers: dict[str, Any]  # of the preset
    out: Path
    device: str = "cpu"
    seed: int = 0
    watch: Watch = field(default=unwatched, repr=False)
    shows_photos: bool = False
    model: str | None = None  # that looks at the photos; None: the one that needs no download
    engine: str = "local"  # or ray, where the experiment can use it
    images: Path | None = None  # a user's photos; None: scikit-image's
    notes: list[str] = field(default_factory=list)  # what could not be done, for the record
    _networks: dict[Any, nn.Module] = field(default_factory=dict, init=False, repr=False)

    def settings(self) -> dict[str, Any]:
        """All that the outcome depends on."""
        named = {"experiment": self.experiment, "dataset": self.dataset_name, "preset": self.preset}
        photos = files.sources([str(self.images)]) if self.images else []
        marks = [[source.name, *files.mark(source.path)] for source in photos if source.path.exists()]
        shown = {"model": self.model or MODEL, "photos": marks or "scikit-image"}
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
        return self.trained("standard", _same)

    def trained(self, name: str, change: Callable[[Images], Images], seed: int | None = None) -> nn.Module:
        """The CNN trained on changed pictures: the one that ships, or trained once, then from the cache.
        `name` is that of the change."""
        seed = self.seed if seed is None else seed
        if (name, seed) not in self._networks:
            module = self._made(name, change, seed)
            self._networks[name, seed] = module.to(self.device).eval().requires_grad_(False)
        return self._networks[name, seed]

    def _made(self, name: str, change: Callable[[Images], Images], seed: int) -> nn.Module:
        if seed == 0 and (self.dataset_name, name) in SHIPPED:
            return load(SHIPPED[self.dataset_name, name]).module
        epochs = EPOCHS[self.dataset_name]
        plan = training.Plan(epochs=epochs, seed=seed, device=self.device)
        path = cache() / f"{self.dataset_name}-{name}-{epochs}-seed{seed}.safetensors"
        return training.train(change(self.dataset.train), plan, checkpoint=path, watch=self.watch).module

    def test(self) -> tuple[Tensor, Images]:
        """As many test pictures as the preset asks for, scaled, and as they are."""
        images = self.dataset.test.rows(slice(0, self.numbers["images"]))
        return scaled(images.pixels), images

    def masked(self) -> tuple[Tensor, Tensor, Images]:
        """The first correctly classified pictures of each class whose objects are known: scaled, where the
        object is, and as they are."""
        images, each = self._with_masks(), self.numbers["per_class"]
        right = training.logits(self.network, scaled(images.pixels)).argmax(1).numpy() == images.labels
        rows = [np.flatnonzero(right & (images.labels == c))[:each] for c in range(len(self.dataset.classes))]
        found = images.rows(np.concatenate(rows))
        if not len(found):
            raise ValueError("the network gets no picture with a known object right: nothing to measure")
        assert found.masks is not None
        return scaled(found.pixels), torch.from_numpy(found.masks), found

    def _with_masks(self) -> Images:
        if self.dataset_name == "shapes":
            return self.dataset.test
        known = masks.load()
        first = np.sort(np.unique(known.index, return_index=True)[1])  # three pictures are there twice
        train = self.dataset.train
        return Images(train.pixels[known.index[first]], train.labels[known.index[first]], known.mask[first])

    @functools.cached_property
    def gallery(self) -> Gallery | None:
        """Photos and the network that looks at them; None, and a note, where the usual ones are not here."""
        try:
            found, broken = gallery(self.model or MODEL, self.images, self.device)
        except (ModelUnavailableError, ValueError) as error:
            if self.model or self.images:
                raise
            self.notes.append(f"{NO_PHOTOS}: {error}")
            return None
        self.notes += [f"left out: {sentence}" for sentence in broken]
        return found


def _same(images: Images) -> Images:
    return images
