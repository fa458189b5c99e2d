"""What is judged: a network, its photos, and everything that the numbers depend on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rectgrad.bench.environment import code_digest
from rectgrad.metrics.random_weights import layer_groups
from rectgrad.metrics.scores import Scores
from rectgrad.models.fingerprint import weights_digest
from rectgrad.verdict.grids import Grid, grid_of, no_grid
from rectgrad.verdict.measures import MEASURES
from rectgrad.verdict.presets import Preset
from rectgrad.verdict.rows import Row, source_of, tensor_digest

NOISE = 0.01  # radius of max-sensitivity, as a share of the value range
COMPUTES = (  # what numbers depend on, besides the folders of `code_digest`
    "api.py",
    "checks.py",
    "explanation/captures.py",
    *(f"verdict/{name}.py" for name in ("case", "grids", "matched", "photos", "rows", "units", "work")),
)
GPU_VALUES = 3 * 50 * 224 * 224  # of the photos in a chunk
CPU_PIXELS = 200_000  # on a CPU, activations of 4 photos of 224 x 224 fit the cache: 27 ms each, 39 ms at 8


class Chunk(NamedTuple):
    """Photos, or composites of photos, that are computed together."""

    start: int
    stop: int
    composite: str = ""  # a digest of the composites: near the limit, other machines may keep other ones


@dataclass(frozen=True)
class Case:
    model: Callable[..., Any]
    inputs: Tensor  # of all photos
    preset: Preset
    measures: tuple[str, ...]
    seed: int = 0
    masks: Tensor | None = None  # (N, H, W), boolean

    @functools.cached_property
    def device(self) -> torch.device:
        tensors = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        return next((each.device for each in tensors), torch.device("cpu"))

    @functools.cached_property
    def outputs(self) -> Tensor:
        """Of the unchanged photos."""
        return torch.cat([self.evaluated(part.to(self.device)).cpu() for part in self.inputs.split(50)])

    @torch.no_grad()
    def evaluated(self, images: Tensor) -> Tensor:
        """The network's outputs."""
        return Scores(self.model, None, len(images), batch_size(images)).outputs(images)

    @property
    def has_classes(self) -> bool:
        return self.outputs.ndim == 2 and self.outputs.shape[1] > 1

    @property
    def has_positions(self) -> bool:
        return self.inputs.ndim >= 3

    @functools.cached_property
    def unavailable(self) -> dict[str, str]:
        """Measures that cannot be computed for this network and these photos, with the reason."""
        lacking = {}
        if not self.has_positions:
            lacking["positions"] = f"the inputs have no rows and columns: {tuple(self.inputs.shape[1:])}"
        if not self.has_classes:
            lacking["classes"] = "the network has a single output"
        if self.masks is None:
            lacking["masks"] = "no masks were given"
        found = {
            name: lacking[need] for name in self.measures for need in MEASURES[name].needs if need in lacking
        }
        if "grid_pointing" in self.measures and "grid_pointing" not in found and (why := no_grid(self)):
            found["grid_pointing"] = why
        return found | (dict.fromkeys(self._of("randomisation"), why) if (why := self._fixed()) else {})

    def _of(self, unit: str) -> list[str]:
        return [name for name in self.measures if MEASURES[name].unit == unit]

    def _fixed(self) -> str:
        """The reason why the weights cannot be randomised; empty if they can."""
        if not isinstance(self.model, nn.Module):
            return "the network is a function, whose weights cannot be randomised"
        try:
            layer_groups(self.model, 1)
        except ValueError:
            return "the network has no weights"
        return ""

    def wanted(self, unit: str) -> list[str]:
        """The measures of a unit of work that are to be computed."""
        return [name for name in self._of(unit) if name not in self.unavailable]

    @functools.cached_property
    def radius(self) -> float:
        return NOISE * float(self.inputs.max() - self.inputs.min())

    @functools.cached_property
    def grid(self) -> Grid | None:
        return grid_of(self) if self.has_classes and self.inputs.ndim == 4 else None

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of photos, such that each count of the preset is at the end of a chunk; then composites."""
        p = self.preset
        counts = {p.evaluated, p.repeated, p.costly, p.costly_repeated, p.matched}
        yield from _cut(len(self.inputs), self._chunk, counts)
        if self.wanted("grid") and self.grid is not None:
            for each in _cut(len(self.grid.photos), self._chunk):
                photos = self.grid.photos[each.start : each.stop]
                yield each._replace(composite=tensor_digest(photos)[:8])

    @property
    def _chunk(self) -> int:
        """Photos in a chunk: on a GPU more if they are small, because its kernels would be too short."""
        fit = GPU_VALUES // max(self.inputs[0].numel(), 1) if self.device.type == "cuda" else 0
        return max(self.preset.chunk, fit)

    def digests(self) -> dict[str, str | None]:
        return {
            "code": code_digest(*COMPUTES),
            "network": _code_of(self.model),
            "weights": weights_digest(self.model) if isinstance(self.model, nn.Module) else None,
            "photos": tensor_digest(self.inputs),
            "masks": None if self.masks is None else tensor_digest(self.masks),
        }

    def settings(self) -> dict[str, Any]:
        """Everything that a number depends on, except its row."""
        return self.digests() | {
            "preset": asdict(self.preset),
            "measures": self.measures,
            "seed": self.seed,
            "device": self.device.type,
        }


def batch_size(images: Tensor) -> int:
    """How many images are computed at a time."""
    return (
        max(3 * CPU_PIXELS // max(images[:1].numel(), 1), 1) if images.device.type == "cpu" else len(images)
    )


def part_name(unit: str, row: Row, chunk: Chunk) -> str:
    name = f"{unit}-{row.name}-{row.digest}-{chunk.start}-{chunk.stop}"
    return f"{name}-{chunk.composite}" if chunk.composite else name


def _cut(n: int, size: int, counts: set[int] | frozenset[int] = frozenset()) -> Iterator[Chunk]:
    ends = sorted({0, n} | {count for count in counts if count < n})
    for first, last in pairwise(ends):
        pieces = -(-(last - first) // size)
        edges = [first + i * (last - first) // pieces for i in range(pieces + 1)]
        yield from (Chunk(start, stop) for start, stop in pairwise(edges))


def _code_of(model: Callable[..., Any]) -> str:
    """A hash of the layers that are not torch's own, or the name of a function. See also `run.kept_in`."""
    if not isinstance(model, nn.Module):
        return getattr(model, "__qualname__", type(model).__qualname__)
    kinds = {type(each) for each in model.modules() if not type(each).__module__.startswith("torch.")}
    return hashlib.sha256(b"".join(sorted(map(source_of, kinds)))).hexdigest()[:32]
