"""Retrains networks on images without some of their pixels, the work of ROAR and KAR."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad import many
from rectgrad.data import Images
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.rankings import rankings
from rectgrad.methods import Method
from rectgrad.methods.averages import IntegratedGradients, SmoothGrad
from rectgrad.methods.catalog import METHODS
from rectgrad.training import Plan, deterministic


class Cell(NamedTuple):
    """One network to train. `mode` is roar, kar, or mask (only the mask is visible).

    `method` is a name, or a name and a number of samples: "smoothgrad 10". `variant`: see `rankings`.
    """

    method: str
    mode: str
    fraction: float
    seed: int
    variant: str = ""

    @property
    def name(self) -> str:
        return " ".join(
            filter(None, (self.mode, self.variant, self.method, str(self.fraction), str(self.seed)))
        )

    def hidden(self, ranking: int) -> many.Hidden:
        """The pixels to hide: the most important ones for roar and mask, all others for kar."""
        most = round(self.fraction * 1024)
        low, high = (most, 1024) if self.mode == "kar" else (0, most)
        return many.Hidden(ranking, low, high, self.mode == "mask")


def method_of(name: str) -> Method:
    """The method of a cell."""
    base, _, count = name.partition(" ")
    method = METHODS[base]
    if count and isinstance(method, SmoothGrad):
        return replace(method, samples=int(count))
    return replace(method, steps=int(count)) if count and isinstance(method, IntegratedGradients) else method


def accuracies(lab: Lab, needed: Sequence[Cell]) -> dict[Cell, float]:
    """The accuracy of each cell; those that were finished before are not trained again."""
    known = {cell: lab.parts.known(cell.name) for cell in needed}
    missing = [cell for cell in needed if known[cell] is None]
    with lab.progress(len(missing), lab.experiment) as advance:
        for cell, accuracy in trained(lab, missing):
            known[cell] = lab.parts.keep(cell.name, accuracy)
            advance()
    return known


def trained(lab: Lab, missing: Sequence[Cell]) -> Iterator[tuple[Cell, float]]:
    """Yields cells with their accuracies as they complete."""
    if lab.engine == "ray":
        from rectgrad.experiments import ray_engine

        yield from ray_engine.trained(lab, missing)
        return
    sets = pictures(lab)
    variants = {
        method: [kind[1] for kind in kinds(missing) if kind[0] == method] for method, _ in kinds(missing)
    }
    for group in groups(lab, missing):
        orders = [_order(lab, sets, method, variant, variants[method]) for method, variant in kinds(group)]
        yield from zip(group, train_group(sets, group, plan(lab), orders), strict=True)


def _order(
    lab: Lab, sets: tuple[Images, Images], method: str, variant: str, variants: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """`ranked`, cached with the parts, all variants of a method at once: a map can take longer than
    training."""
    name = f"order {method} {variant}"
    if not lab.parts.has_array(name):
        for each, found in zip(variants, ranked(lab.network, sets, method, variants), strict=True):
            lab.parts.array(f"order {method} {each}", torch.cat(found).numpy)
    both = lab.parts.array(name, lambda: np.empty(0))
    first, second = torch.from_numpy(both).split([len(each) for each in sets])
    return first, second


def pictures(lab: Lab) -> tuple[Images, Images]:
    """The images for retraining, and the test images."""
    return lab.dataset.train.rows(slice(0, lab.numbers["retraining"]["pictures"])), lab.dataset.test


def plan(lab: Lab) -> Plan:
    return Plan(epochs=lab.numbers["retraining"]["epochs"], device=lab.device)


def groups(lab: Lab, missing: Sequence[Cell]) -> list[Sequence[Cell]]:
    """Groups of as many cells as the device trains at once."""
    size = many.at_once(lab.device)
    return [missing[start : start + size] for start in range(0, len(missing), size)]


def kinds(group: Sequence[Cell]) -> list[tuple[str, str]]:
    """The rankings that a group needs: (method, variant)."""
    return list(dict.fromkeys((cell.method, cell.variant) for cell in group))


def ranked(
    module: nn.Module, sets: tuple[Images, Images], method: str, variants: Sequence[str]
) -> list[tuple[Tensor, Tensor]]:
    """The rankings of the pixels of the training and test images, for each variant."""
    with many.fixed_threads(), deterministic():
        first, second = (
            rankings(module, images, method_of(method), variants, seed)
            for seed, images in enumerate(sets, start=1)
        )
    return list(zip(first, second, strict=True))


def train_group(
    sets: tuple[Images, Images], group: Sequence[Cell], plan: Plan, orders: Sequence[tuple[Tensor, Tensor]]
) -> list[float]:
    """The accuracy of each cell; `orders` has the rankings for each of `kinds(group)`."""
    hidden = [cell.hidden(kinds(group).index((cell.method, cell.variant))) for cell in group]
    mean = torch.tensor(mean_colour(sets[0]))
    train, test = (
        many.Occluded(images, torch.stack(ranks), hidden, mean, plan.device)
        for images, ranks in zip(sets, zip(*orders, strict=True), strict=True)
    )
    with deterministic():
        return many.train(train, test, [cell.seed for cell in group], plan)


def mean_colour(images: Images) -> list[float]:
    """The mean of all pixels, scaled to -1..1."""
    return [float(v) for v in images.pixels.mean((0, 1, 2), dtype=np.float64) / 127.5 - 1]
