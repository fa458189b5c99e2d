"""What an experiment works with: dataset, trained network, its numbers, and a place for finished parts."""

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
from rectgrad.data import Dataset, Images, cifar10, masks, scaled, shapes
from rectgrad.data.dataset import cache
from rectgrad.data.fetch import Watch, unwatched
from rectgrad.experiments.parts import Parts

DATASETS: dict[str, Callable[[], Dataset]] = {"cifar10": cifar10.load, "shapes": shapes.load}
EPOCHS = {"cifar10": 20, "shapes": 10}


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
    _networks: dict[str, nn.Module] = field(default_factory=dict, init=False, repr=False)

    def settings(self) -> dict[str, Any]:
        """All that the outcome depends on."""
        named = {"experiment": self.experiment, "dataset": self.dataset_name, "preset": self.preset}
        return {**named, "seed": self.seed, "epochs": EPOCHS[self.dataset_name], **self.numbers}

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

    def trained(self, name: str, change: Callable[[Images], Images]) -> nn.Module:
        """The CNN trained on changed pictures: once, then from the cache. `name` is that of the change."""
        if name not in self._networks:
            epochs = EPOCHS[self.dataset_name]
            plan = training.Plan(epochs=epochs, seed=self.seed, device=self.device)
            path = cache() / f"{self.dataset_name}-{name}-{epochs}-seed{self.seed}.safetensors"
            run = training.train(change(self.dataset.train), plan, checkpoint=path, watch=self.watch)
            self._networks[name] = run.module.requires_grad_(False)
        return self._networks[name]

    def test(self) -> tuple[Tensor, Images]:
        """As many test pictures as the preset asks for, scaled, and as they are."""
        images = self.dataset.test.rows(slice(0, self.numbers["images"]))
        return scaled(images.pixels), images

    def masked(self, each: int = 10) -> tuple[Tensor, Tensor, Images]:
        """The first correctly classified pictures of each class whose objects are known: scaled, where the
        object is, and as they are."""
        images = self._with_masks()
        right = training.logits(self.network, scaled(images.pixels)).argmax(1).numpy() == images.labels
        rows = [np.flatnonzero(right & (images.labels == c))[:each] for c in range(len(self.dataset.classes))]
        found = images.rows(np.concatenate(rows))
        assert found.masks is not None
        return scaled(found.pixels), torch.from_numpy(found.masks), found

    def _with_masks(self) -> Images:
        if self.dataset_name == "shapes":
            return self.dataset.test
        known = masks.load()
        first = np.sort(np.unique(known.index, return_index=True)[1])  # three pictures are there twice
        train = self.dataset.train
        return Images(train.pixels[known.index[first]], train.labels[known.index[first]], known.mask[first])


def _same(images: Images) -> Images:
    return images
