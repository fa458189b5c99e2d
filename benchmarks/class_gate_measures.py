"""What the study of the class gate measures: photos, maps from recorded passes, one value for each photo."""

from __future__ import annotations

import copy
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import rectgrad
from rectgrad import metrics
from rectgrad.methods import Method
from rectgrad.metrics import grid
from rectgrad.models import ImageModel

SHARES = (0.02, 0.05, 0.10, 0.20, 0.40)  # of the positions
SUFFIXES = (".jpg", ".jpeg", ".png")


def photos(
    source: Path, model: ImageModel, half: str, step: int, count: int | None
) -> tuple[list[str], Tensor]:
    """The names and inputs of every `step`-th photo of a half of a folder or a tar file, by sorted names."""
    found = dict(_files(source))
    names = sorted(found)[0 if half == "even" else 1 :: 2][::step][:count]
    pictures = (Image.open(io.BytesIO(found[name]())).convert("RGB") for name in names)
    return names, torch.stack([model.prepare(model.crop(picture)) for picture in pictures])


def _files(source: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if source.is_dir():
        for path in source.rglob("*"):
            if path.suffix.lower() in SUFFIXES:
                yield path.relative_to(source).as_posix(), path.read_bytes
        return
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isfile() and member.name.lower().endswith(SUFFIXES):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, io.BytesIO(content.read()).getvalue


class Study:
    """A network, its photos, the classes to ask for and the composites. Each batch is recorded once for all
    classes of a method: about 180 MB for each photo of EfficientNet-Lite0."""

    def __init__(self, module: nn.Module, inputs: Tensor, device: str, batch: int, composites: int) -> None:
        self.module, self.device, self.batch = module.to(device).eval(), device, batch
        self.inputs = inputs.to(device)
        order = self._outputs(self.inputs).argsort(1, descending=True)
        random = torch.Generator().manual_seed(0)
        other = torch.randint(1, order.shape[1], (len(inputs),), generator=random).to(device)
        self.top = order[:, 0]
        self.classes = {
            "runner-up": order[:, 1],
            "random class": (self.top + other) % order.shape[1],  # never the explained one
            "least likely": order[:, -1],
        }
        self._randomised = random_last_layer(self.module)
        self.pairs, self.asked = self._composites(composites)

    def _composites(self, count: int) -> tuple[Tensor, Tensor]:
        """Two photos side by side, `count` before those that are not recognised are left out."""
        index = grid.grid_photos(self.top, (1, 2), count) if count else torch.zeros(0, 2).long()
        pairs, asked = grid.composites(self.inputs, index, (1, 2), fit=True), self.top[index.to(self.device)]
        kept = grid.recognised(self._outputs(pairs), asked) if count else asked.new_zeros(0).bool()
        return pairs[kept], asked[kept]

    def _outputs(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.module(x).float() for x in inputs.split(4 * self.batch)])

    def _maps(self, module: nn.Module, inputs: Tensor, method: Method, *targets: Tensor) -> list[Tensor]:
        """For each target, the maps of all inputs."""
        found = []
        for x, *classes in zip(*(each.split(self.batch) for each in (inputs, *targets)), strict=True):
            recorded = rectgrad.record(module, x)
            found.append([recorded.attribute(method, target) for target in classes])
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def measured(self, method: Method) -> dict[str, list[float]]:
        """One value for each photo, or composite, in each column."""
        maps, *rest = self._maps(self.module, self.inputs, method, self.top, *self.classes.values())
        others = dict(zip(self.classes, rest, strict=True))
        [others["random layer"]] = self._maps(self._randomised, self.inputs, method, self.top)
        found = {name: overlap(maps, other) for name, other in others.items()}
        found["deletion"], found["insertion"] = self._curves(maps)
        m = maps.sum(1).abs()
        found |= {"Gini": metrics.gini(m), "zero": (m.flatten(1) == 0).all(1)}
        found |= {f"zero, {name}": (other.flatten(1) == 0).all(1) for name, other in others.items()}
        found["marked"] = (m != 0).flatten(1).float().mean(1)
        if len(self.pairs):
            each = self._maps(self.module, self.pairs, method, *self.asked.unbind(1))
            found["half"] = sum(grid.grid_pointing(m, (1, 2), i) for i, m in enumerate(each)) / 2
        return {name: value.double().tolist() for name, value in found.items()}

    def _curves(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities without and with only the largest positions, averaged over the shares."""
        x = self.inputs
        blurred = F.avg_pool2d(x, 31, 1, 15, count_include_pad=False)
        m = F.avg_pool2d(maps.sum(1, keepdim=True).abs(), 5, 1, 2, count_include_pad=False)
        order = m.flatten(1).argsort(dim=1, descending=True, stable=True)  # ties by position
        places = torch.arange(order.shape[1], device=x.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, places).reshape(m.shape)
        chosen = [rank < round(share * order.shape[1]) for share in SHARES]
        without = sum(self._probability(torch.where(each, blurred, x)) for each in chosen)
        alone = sum(self._probability(torch.where(each, x, blurred)) for each in chosen)
        return without / len(SHARES), alone / len(SHARES)

    def _probability(self, pictures: Tensor) -> Tensor:
        return self._outputs(pictures).softmax(1).gather(1, self.top[:, None])[:, 0]


def overlap(maps: Tensor, others: Tensor) -> Tensor:
    """Share of the largest positions in common; 0 where one of the maps is zero."""
    return (1 - metrics.specificity(maps, others)).nan_to_num(0)


@torch.no_grad()
def random_last_layer(module: nn.Module) -> nn.Module:
    """A copy whose last linear layer has normal weights of the trained standard deviation."""
    changed = copy.deepcopy(module)
    last = [layer for layer in changed.modules() if isinstance(layer, nn.Linear)][-1]
    drawn = torch.randn(last.weight.shape, generator=torch.Generator().manual_seed(0))
    last.weight.copy_(drawn.to(last.weight) * last.weight.std())
    return changed
