"""The context of an experiment: dataset, trained network, photos, parameters and cached parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad import many, training
from rectgrad.bench.environment import code_digest
from rectgrad.data import DATASETS, Dataset, Images, digest_of, masks, scaled
from rectgrad.data.dataset import cache
from rectgrad.data.fetch import Progress, no_progress
from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.gallery import MODEL, Gallery, gallery
from rectgrad.experiments.parts import Parts
from rectgrad.models import ModelUnavailableError, load
from rectgrad.models.fingerprint import weights_digest
from rectgrad.photos import files

NO_PHOTOS = "no photos were shown"
EPOCHS = {"cifar10": 20, "shapes": 7}
SHIPPED = {("cifar10", "standard"): "cifar10_cnn", ("cifar10", "patch"): "cifar10_cnn_patch"}  # of seed 0
NETWORKS = {"quick": 1, "paper": 5}  # by preset


def _unchanged(images: Images) -> Images:
    return images


def _digest_of_file(path: Path) -> str:
    """Empty for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return files.digest(file)
    except OSError:
        return ""


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
        shown = {"model": self.model or MODEL, "photos": self._photos or "scikit-image"}
        trained = {"seed": self.seed, "epochs": EPOCHS[self.dataset_name]}
        return named | trained | self.numbers | (shown if self.shows_photos else {})

    @functools.cached_property
    def _photos(self) -> list[list[str]]:
        """Name and digest of each photo in the folder."""
        photos = files.sources([str(self.images)]) if self.images else []
        return [[each.name, _digest_of_file(each.path)] for each in photos]

    @functools.cached_property
    def parts(self) -> Parts:
        folder = self.out / f".{self.experiment}.parts"
        return Parts(folder, {**self.settings(), "code": self.code, "data": self._images})

    @property
    def code(self) -> str:
        """A hash of the code that the result depends on. Other experiments do not matter."""
        others = {name for key, name in EXPERIMENTS.items() if key != self.experiment} | {
            "report",
            "summary",
            "markup",
        }
        ours = sorted(path.name for path in Path(__file__).parent.glob("*.py") if path.stem not in others)
        folders = (
            "api.py",
            "training.py",
            "data",
            "models",
            "many",
            "verdict/matched.py",
            "verdict/rows.py",
            *(f"experiments/{name}" for name in ours),
        )
        return code_digest(*folders)

    @functools.cached_property
    def _images(self) -> dict[str, str]:
        return {"train": digest_of(self.dataset.train), "test": digest_of(self.dataset.test)}

    def data(self) -> dict[str, str]:
        """Digests of the images, and of the masks if they were used."""
        known: Images | None = self.__dict__.get("_with_masks")
        if known is None or known.masks is None:
            return self._images
        return {**self._images, "masks": digest_of(Images(known.masks, known.labels))}

    def weights(self) -> dict[str, str]:
        """Digests of the networks that were used."""
        used = {f"{name}, seed {seed}": weights_digest(each) for (name, seed), each in self._networks.items()}
        shown = self.__dict__.get("gallery")
        return used | ({} if shown is None else {shown.model.name: weights_digest(shown.model.module)})

    def accuracy(self) -> float:
        """The mean test accuracy of the networks that were trained on unmodified images."""
        used = [module for (name, _), module in self._networks.items() if name == "standard"]
        test = self.dataset.test
        return float(np.mean([training.accuracy(module, test) for module in used or [self.network]]))

    @functools.cached_property
    def dataset(self) -> Dataset:
        return DATASETS[self.dataset_name]()

    @property
    def seeds(self) -> range:
        """The training seeds of the networks that a claim about a method is decided on."""
        return range(self.seed, self.seed + NETWORKS[self.preset])

    @property
    def network(self) -> nn.Module:
        """The paper's CNN, trained on the dataset."""
        return self.trained("standard", _unchanged)

    def networks(
        self, name: str = "standard", change: Callable[[Images], Images] = _unchanged
    ) -> list[nn.Module]:
        """`trained` for each of the seeds. On a GPU, missing networks are trained at once."""
        missing = [seed for seed in self.seeds if (name, seed) not in self._networks]
        if many.at_once(self.device) > 1:
            self._train_together(name, change(self.dataset.train), missing)
        return [self.trained(name, change, seed) for seed in self.seeds]

    def _train_together(self, name: str, images: Images, seeds: Sequence[int]) -> None:
        """Writes the checkpoints of networks that are neither in the package nor in the cache."""
        data, plans = digest_of(images), {seed: self._plan(seed) for seed in seeds}
        missing = []
        for seed, plan in plans.items():
            found = training.load_checkpoint(self._checkpoint(name, seed), plan, data)
            if not self._shipped(name, seed) and (found is None or found.epoch < plan.epochs):
                missing.append(seed)
        if missing:
            with training.deterministic():
                runs = many.train_runs(images, missing, self._plan(missing[0]))
            for seed, run in zip(missing, runs, strict=True):
                training.save(run, plans[seed], data, self._checkpoint(name, seed))

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
        if shipped := self._shipped(name, seed):
            return load(shipped).module
        return training.train(
            change(self.dataset.train),
            self._plan(seed),
            checkpoint=self._checkpoint(name, seed),
            progress=self.progress,
        ).module

    def _shipped(self, name: str, seed: int) -> str | None:
        """The name of the network in the package, if there is one."""
        return SHIPPED.get((self.dataset_name, name)) if seed == 0 else None

    def _plan(self, seed: int) -> training.Plan:
        return training.Plan(epochs=EPOCHS[self.dataset_name], seed=seed, device=self.device)

    def _checkpoint(self, name: str, seed: int) -> Path:
        epochs = EPOCHS[self.dataset_name]
        return cache() / f"{self.dataset_name}-{name}-{epochs}-seed{seed}.safetensors"

    def test(self) -> tuple[Tensor, Images]:
        """The test images of the preset, scaled for the network and unscaled."""
        images = self.dataset.test.rows(slice(0, self.numbers["images"]))
        return scaled(images.pixels), images

    def masked(self) -> tuple[Tensor, Tensor, Images]:
        """The first correctly classified images of each class that have object masks: scaled for the network,
        their masks, and unscaled."""
        images, each = self._with_masks, self.numbers["per_class"]
        right = training.logits(self.network, scaled(images.pixels)).argmax(1).numpy() == images.labels
        rows = [np.flatnonzero(right & (images.labels == c))[:each] for c in range(len(self.dataset.classes))]
        found = images.rows(np.concatenate(rows))
        if not len(found):
            raise ValueError(
                "the network classifies no image with a mask correctly, so there is nothing to measure"
            )
        assert found.masks is not None
        return scaled(found.pixels), torch.from_numpy(found.masks), found

    @functools.cached_property
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
