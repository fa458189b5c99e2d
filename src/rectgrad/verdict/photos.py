"""A chunk of photos with what is computed once for it: maps, baselines, random draws, and evaluations of the
network that are the same for every row."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rectgrad import metrics
from rectgrad.engine.op import UnsupportedModelError
from rectgrad.kernels.device import out_of_memory
from rectgrad.metrics import baselines, grid
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.perturbation import random_square
from rectgrad.metrics.removal import FRACTIONS
from rectgrad.verdict.case import Chunk
from rectgrad.verdict.matched import Matched
from rectgrad.verdict.presets import is_cheap
from rectgrad.verdict.rows import Row
from rectgrad.verdict.units import COMPUTE, Values

if TYPE_CHECKING:
    from rectgrad.verdict.work import Worker

ROAD_NOISE = 0.01


class Photos:
    """A chunk of photos with everything that is computed once for them."""

    def __init__(self, worker: Worker, chunk: Chunk) -> None:
        case = worker.case
        self.worker, self.case, self.chunk = worker, case, chunk
        self.rows: dict[str, list[Tensor]] = {}  # maps of methods by their digest
        self.shared: dict[str, Replayed] = {}
        self.done: dict[tuple[str, str], Values] = {}
        rows = slice(chunk.start, chunk.stop)
        if chunk.composite:
            assert case.grid is not None
            index = case.grid.photos[rows]
            self.inputs = grid.composites(case.inputs, index, case.grid.shape, case.grid.fit).to(case.device)
            self.cells = torch.arange(chunk.start, chunk.stop) % index.shape[1]
            self.target: Tensor | None = case.outputs.argmax(1)[index.gather(1, self.cells[:, None])[:, 0]]
            self.target = self.target.to(case.device)
        else:
            self.inputs = case.inputs[rows].to(case.device)
            outputs = case.outputs[rows].to(case.device)
            self.target = outputs.argmax(1) if case.has_classes else None
            self.least = outputs.argmin(1) if case.has_classes else None
            self.model = Known(case.evaluated, [(self.inputs, outputs)])
            self.masks = case.masks[rows].to(case.device) if case.masks is not None else None

    def compute(self, unit: str, row: Row) -> Values:
        """The values of a unit; {"error": reason} if the method or a measure raises an error.

        Rows with the same method, as matched comparisons have, are computed once.
        """
        key = unit, row.digest
        if key not in self.done:
            started = time.monotonic()
            found = self._compute(unit, row)  # reading values on the CPU has waited for the device
            self.done[key] = found | {"seconds": round(time.monotonic() - started, 3)}
        return self.done[key]

    def _compute(self, unit: str, row: Row) -> Values:
        try:
            with torch.no_grad():
                found = COMPUTE[unit](self, row)
        except Exception as error:
            if out_of_memory(error):
                raise
            return {"error": _reason(error)}
        undefined = self.zero(row) & (unit != "grid")  # in which a zero map scores 0
        return {
            key: torch.where(undefined, torch.nan, value.double().cpu()).tolist()
            if isinstance(value, Tensor)
            else value
            for key, value in found.items()
        }

    def maps(self, row: Row) -> Tensor:
        return self.both(row)[0]

    def forget(self, row: Row) -> None:
        """Frees the maps of a row."""
        self.rows.pop(row.digest, None)

    def zero(self, row: Row) -> Tensor:
        """Whether the map of a photo is zero everywhere."""
        return (self.maps(row).flatten(1) == 0).all(1).cpu()

    def both(self, row: Row) -> list[Tensor]:
        """The maps of the photos' classes and, for specificity, of their least likely classes."""
        if row.digest not in self.rows and isinstance(row.method, Matched):
            base = self.maps(Row(row.name, row.method.over))
            self.rows[row.digest] = [row.method.processed(base, self.inputs)]
        if row.digest not in self.rows:
            second = not self.chunk.composite and "specificity" in self.case.wanted("maps")
            second = second and (is_cheap(row.method) or self.chunk.stop <= self.case.preset.costly_repeated)
            targets = (self.target, self.least) if second else (self.target,)
            found = self.worker.maps(row.method, self.inputs, *targets)
            if not all(bool(each.isfinite().all()) for each in found):
                raise ValueError("a map has values that are NaN or infinite")
            self.rows[row.digest] = found
        return self.rows[row.digest]

    def probabilities(self, images: Tensor) -> Tensor:
        outputs = self.model(images)
        return outputs.softmax(1) if self.case.has_classes else outputs.reshape(len(images))

    def scores(self, images: Tensor) -> Tensor:
        outputs = self.model(images)
        return outputs if self.case.has_classes else outputs.reshape(len(images))

    @functools.cached_property
    def blurred(self) -> Tensor:
        return self._known(baselines.filled("blur", self.inputs))

    @functools.cached_property
    def mean(self) -> Tensor:
        return self._known(baselines.filled("mean", self.inputs).contiguous())

    def _known(self, images: Tensor) -> Tensor:
        self.model.known.append((images, self.model(images)))
        return images

    def replayed(self, unit: str) -> Replayed:
        """The network for evaluations that do not depend on the row."""
        found = self.shared.setdefault(unit, Replayed(self.scores))
        found.position = 0
        return found

    @functools.cached_property
    def road_noise(self) -> list[Tensor]:
        draws = Draws(self.inputs, self.case.seed)
        return [ROAD_NOISE * draws.normal(*self.inputs.shape[1:]) for _ in FRACTIONS]

    @functools.cached_property
    def small_noise(self) -> list[Tensor]:
        """Of max-sensitivity."""
        shape, draws = self.inputs.shape[1:], Draws(self.inputs, self.case.seed)
        return [self.case.radius * (2 * draws.uniform(*shape) - 1) for _ in range(self.case.preset.draws)]

    @functools.cached_property
    def squares(self) -> list[Tensor]:
        """Masks of infidelity's random squares."""
        draws = Draws(self.inputs, self.case.seed)
        return [random_square(draws, self.inputs) for _ in range(self.case.preset.squares)]

    def infidelity(self, effects: Tensor) -> Tensor:
        return metrics.infidelity(
            self.replayed("squares"),
            self.inputs,
            effects,
            self.target,
            perturbation=lambda x, j: torch.where(self.squares[j], x - self.mean, 0),
            draws=len(self.squares),
            baseline=self.mean,
            multiplied=True,
            optimal_scaling=True,
        )

    @functools.cached_property
    def largest_infidelity(self) -> Tensor:
        """Of a map that is zero."""
        return self.infidelity(torch.zeros_like(self.inputs))

    @functools.cached_property
    def subsets(self) -> list[list[Tensor]]:
        """Random pixels, for each fraction of sensitivity-n."""
        pixels, draws = self.inputs.shape[-2] * self.inputs.shape[-1], Draws(self.inputs, self.case.seed)
        sizes = [max(round(fraction * pixels), 1) for fraction in self.case.preset.fractions]
        return [[draws.subset(pixels, size) for _ in range(self.case.preset.subsets)] for size in sizes]


class Known:
    """Wraps the network, which does not run again on images whose outputs are known."""

    def __init__(self, model: Callable[[Tensor], Tensor], known: list[tuple[Tensor, Tensor]]) -> None:
        self.model, self.known = model, known

    def __call__(self, images: Tensor) -> Tensor:
        for given, outputs in self.known:  # comparing values would wait for the device
            if given.data_ptr() == images.data_ptr() and given.shape == images.shape:
                return outputs
        return self.model(images)


class Replayed:
    """Wraps a network that is called with the same images for every row: it runs for the first row only."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model, self.position = model, 0
        self.answers: list[Tensor] = []

    def __call__(self, images: Tensor) -> Tensor:
        if self.position == len(self.answers):
            self.answers.append(self.model(images))
        self.position += 1
        return self.answers[self.position - 1]


def _reason(error: Exception) -> str:
    """The message of an error as one line, with its type if the message alone may not say enough."""
    message = " ".join(str(error).split())
    expected = isinstance(error, (ValueError, TypeError, UnsupportedModelError)) and message
    return message if expected else f"{type(error).__name__}: {message}"
