"""Computes units of work: the values of some measures (units.py) for one row and one chunk of photos.

A unit is a pure function of the case. Maps are computed once for a chunk, and evaluations of the network that
are the same for every row are kept: the unchanged photos, the baselines, and photos with random pixels
removed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rectgrad.api import attribute, record_for
from rectgrad.explanation.captures import Captures
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.kernels.device import out_of_memory
from rectgrad.methods import Method
from rectgrad.methods.perturbation import Perturbation
from rectgrad.metrics.random_weights import stages
from rectgrad.verdict.case import Case, Chunk, batch_size
from rectgrad.verdict.matched import Matched
from rectgrad.verdict.photos import Photos
from rectgrad.verdict.rows import Row
from rectgrad.verdict.units import MATCHED

UNITS = ("maps", "removal", "effects", "stability", "randomisation")  # of methods and photos
PERTURBED = 50  # photos for occlusion and RISE at most


class Worker:
    """Computes the units of one case. Randomised weights are drawn once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._captures: tuple[Captures, Captures] | None = None

    def units(self, rows: list[Row], chunk: Chunk) -> Iterator[tuple[str, Row]]:
        """The units of a chunk, those of one row together."""
        for row in rows:
            for unit in self._kinds(row, chunk):
                if (unit == "matched" or self.case.wanted(unit)) and chunk.stop <= self.photos(unit, row):
                    yield unit, row

    def _kinds(self, row: Row, chunk: Chunk) -> Sequence[str]:
        if isinstance(row.method, Matched):
            return () if chunk.composite or MATCHED[0] not in self.case.wanted("removal") else ("matched",)
        return ("grid",) if chunk.composite else UNITS

    def photos(self, unit: str, row: Row) -> int:
        """The number of photos, or composites, of a row for which a unit is computed."""
        preset = self.case.preset
        if unit in ("grid", "matched"):
            return preset.composites if unit == "grid" else preset.matched
        repeated = unit in ("stability", "randomisation")
        given = preset.photos_for(row.method, repeated)
        if isinstance(row.method, Perturbation):
            given = 0 if repeated else min(given, PERTURBED)
        return min(given, preset.evaluated) if unit in ("removal", "effects") else given

    def opened(self, chunk: Chunk) -> Photos:
        return Photos(self, chunk)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Within the context, maps are replayed on a GPU, which is faster for many calls of one method."""
        self._captures = Captures(), Captures()
        try:
            yield
        finally:
            for each in self._captures:
                each.release()
            self._captures = None

    @functools.cached_property
    def randomised(self) -> list[tuple[str, list[Tensor]]]:
        """Pairs of a kind, cascading or alone, and the weights of the network with random layers."""
        preset, kinds = self.case.preset, ("cascading", "alone") if self.case.preset.alone else ("cascading",)
        return [
            (kind, list(stage.model.parameters()))
            for kind in kinds
            for stage in stages(self.case.model, preset.stages, kind, self.case.seed)  # type: ignore[arg-type]
        ]

    @functools.cached_property
    def _copy(self) -> Any:
        return copy.deepcopy(self.case.model).requires_grad_(False)  # type: ignore[attr-defined]

    def randomised_maps(self, method: Method, inputs: Tensor, target: Tensor | None) -> Iterator[Tensor]:
        """Of a copy of the network, whose weights are changed in place, so that one capture serves all."""
        for _, weights in self.randomised:
            for own, random in zip(self._copy.parameters(), weights, strict=True):
                own.copy_(random)
            yield self.maps(method, inputs, target, model=self._copy)[0]

    def maps(
        self, method: Method, inputs: Tensor, *targets: Tensor | None, model: Any = None
    ) -> list[Tensor]:
        """Maps of one method for several targets, by one forward pass if it needs one only.

        model: the randomised copy; default: the network itself.
        """
        size = batch_size(inputs)
        if len(inputs) <= size:
            try:
                with WarningLog(quiet=True):
                    return self._maps(method, inputs, targets, model)
            except Exception as error:
                if not out_of_memory(error) or len(inputs) == 1:
                    raise
            size = len(inputs) // 2
        found = []
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            own = (None if target is None else target[part] for target in targets)
            found.append(self.maps(method, inputs[part], *own, model=model))
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def _maps(
        self, method: Method, inputs: Tensor, targets: Sequence[Tensor | None], model: Any
    ) -> list[Tensor]:
        network = self.case.model if model is None else model
        if not (method.one_backward and method.runs_model):
            return [attribute(network, inputs, method, target) for target in targets]
        own = None if self._captures is None else self._captures[model is not None]
        replayed = None if own is None else own.replay(network, inputs, method, targets[0])
        kept = record_for(network, inputs, method) if replayed is None else replayed
        return [kept.attribute(method, target) for target in targets]
