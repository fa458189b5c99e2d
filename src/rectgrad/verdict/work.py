"""Units of work: the values of some measures for one row and one chunk of photos.

A unit is a pure function of the case. Maps are computed once for a chunk, and evaluations of the network that
are the same for every row are kept: the unchanged photos, the baselines, and photos with random pixels
removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad import metrics
from rectgrad.api import attribute, record_for
from rectgrad.engine.op import UnsupportedModelError
from rectgrad.explanation.captures import Captures
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.kernels.device import out_of_memory
from rectgrad.methods import Method
from rectgrad.methods.perturbation import Perturbation
from rectgrad.metrics import baselines, grid
from rectgrad.metrics.checks import images
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.random_weights import stages
from rectgrad.metrics.scores import Scores
from rectgrad.metrics.sensitivity import subset_correlation
from rectgrad.verdict.case import Case, Chunk, batch_size
from rectgrad.verdict.matched import Matched
from rectgrad.verdict.presets import is_cheap
from rectgrad.verdict.rows import Row, is_gradient

Values = dict[str, Any]  # measure -> one value per photo; other keys describe the unit
UNITS = ("maps", "removal", "effects", "stability", "randomisation")  # of methods and photos
MATCHED = ("insertion_blur", "deletion_blur", "gini")  # measures of matched comparisons
PERTURBED = 50  # photos for occlusion and RISE at most
SIDE = 14  # of the coarse maps in which methods are compared photo by photo


class Worker:
    """Computes the units of one case. Randomised networks are made once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.captures = Captures()  # of the network, where there is a GPU

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
        """How many photos, or composites, of a row a unit is computed for."""
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

    def close(self) -> None:
        self.captures.release()

    @functools.cached_property
    def randomised(self) -> list[tuple[str, Any]]:
        """Pairs of a kind, cascading or alone, and a copy of the network with random layers."""
        preset, kinds = self.case.preset, ("cascading", "alone") if self.case.preset.alone else ("cascading",)
        return [
            (kind, stage.model)
            for kind in kinds
            for stage in stages(self.case.model, preset.stages, kind, self.case.seed)  # type: ignore[arg-type]
        ]

    def maps(
        self, method: Method, inputs: Tensor, *targets: Tensor | None, model: Any = None
    ) -> list[Tensor]:
        """Maps of one method for several targets, by one forward pass if it needs one only.

        model: a randomised copy; default: the network itself.
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
        replayed = self.captures.replay(network, inputs, method, targets[0]) if model is None else None
        kept = record_for(network, inputs, method) if replayed is None else replayed
        return [kept.attribute(method, target) for target in targets]


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
        """The values of a unit; {"error": reason} if the method or a measure refuses.

        Rows with the same method, as matched comparisons have, are computed once.
        """
        key = unit, row.digest
        if key not in self.done:
            self.done[key] = self._compute(unit, row)
        return self.done[key]

    def _compute(self, unit: str, row: Row) -> Values:
        try:
            with torch.no_grad():
                found = _COMPUTE[unit](self, row)
        except Exception as error:
            if out_of_memory(error):
                raise
            return {"error": _reason(error)}
        undefined = self.zero(row) & (unit != "grid")  # where a zero map scores 0
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
    def subsets(self) -> list[list[Tensor]]:
        """Random pixels, for each fraction of sensitivity-n."""
        pixels, draws = self.inputs.shape[-2] * self.inputs.shape[-1], Draws(self.inputs, self.case.seed)
        sizes = [max(round(fraction * pixels), 1) for fraction in self.case.preset.fractions]
        return [[draws.subset(pixels, size) for _ in range(self.case.preset.subsets)] for size in sizes]


class Known:
    """The network, which does not run again on images whose outputs are known."""

    def __init__(self, model: Callable[[Tensor], Tensor], known: list[tuple[Tensor, Tensor]]) -> None:
        self.model, self.known = model, known

    def __call__(self, images: Tensor) -> Tensor:
        for given, outputs in self.known:
            if torch.equal(given, images):
                return outputs
        return self.model(images)


class Replayed:
    """A network that is called with the same images for every row: it runs for the first row only."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model, self.position = model, 0
        self.answers: list[Tensor] = []

    def __call__(self, images: Tensor) -> Tensor:
        if self.position == len(self.answers):
            self.answers.append(self.model(images))
        self.position += 1
        return self.answers[self.position - 1]


def _maps(photos: Photos, row: Row) -> Values:
    both, wanted = photos.both(row), photos.case.wanted("maps")
    maps = both[0]
    found: Values = {"zero": int(photos.zero(row).sum())}
    simple: dict[str, Callable[[Tensor], Tensor]] = {
        "gini": metrics.gini,
        "zero_share": metrics.zero_share,
        "total_variation": functools.partial(metrics.total_variation, normalize=True),
        "inside": lambda m: metrics.inside(m, _given(photos.masks), share=True),
        "pointing_game": lambda m: metrics.pointing_game(m, _given(photos.masks)),
        "specificity": lambda m: metrics.specificity(_positions(m), _positions(both[1])),
        "specificity_floor": lambda m: _unrelated(metrics.specificity, _positions(m)),
    }
    found |= {name: simple[name](maps) for name in wanted if name != "specificity" or len(both) > 1}
    if photos.case.has_positions:
        found["coarse"] = _coarse(maps)
    return found


def _removal(photos: Photos, row: Row) -> Values:
    x, maps, case = photos.inputs, photos.maps(row), photos.case
    wanted = case.wanted("removal")
    found = {name: _curve(name, photos, maps) for name in wanted if not name.startswith("road")}
    if any(name.startswith("road") for name in wanted):
        most, least = (
            metrics.road(photos.scores, x, maps, photos.target, order=order, seed=case.seed)
            for order in ("most", "least")
        )
        found["road_most"], found["road_least"] = most.probability.mean(1), least.probability.mean(1)
        found["road"] = found["road_least"] - found["road_most"]
        found["road_accuracy"] = (least.correct - most.correct).mean(1)
    return found


def _curve(name: str, photos: Photos, maps: Tensor) -> Tensor:
    """The area under an insertion or deletion curve."""
    kind, _, base = name.partition("_")
    curve = {"insertion": metrics.insertion, "deletion": metrics.deletion}[kind]
    baseline = photos.blurred if base == "blur" else photos.mean
    arguments = (photos.probabilities, photos.inputs, maps, photos.target)
    return metrics.area(curve(*arguments, steps=photos.case.preset.steps, baseline=baseline))


def _matched(photos: Photos, row: Row) -> Values:
    maps = photos.maps(row)
    return {name: _curve(name, photos, maps) for name in MATCHED[:2]} | {"gini": metrics.gini(maps)}


def _effects(photos: Photos, row: Row) -> Values:
    """Sensitivity-n is the mean over fractions. Infidelity is divided by that of a zero map."""
    x, maps, case = photos.inputs, photos.maps(row), photos.case
    wanted, found = case.wanted("effects"), {}
    if "sensitivity_n" in wanted:
        scores = Scores(photos.replayed("subsets"), photos.target, len(x))
        clean = scores(x)
        each = [subset_correlation(scores, clean, x, photos.mean, maps, s) for s in photos.subsets]
        found["sensitivity_n"] = torch.stack(each, 1).nanmean(1)
    if "infidelity" in wanted:
        effects = maps * (x - photos.mean) if is_gradient(row.method) else maps
        mine, zero = (
            metrics.infidelity(
                photos.replayed("squares"),
                x,
                m,
                photos.target,
                draws=case.preset.squares,
                baseline=photos.mean,
                multiplied=True,
                optimal_scaling=True,
                seed=case.seed,
            )
            for m in (effects, torch.zeros_like(effects))
        )
        found["infidelity"] = torch.where(zero > 0, mine / zero, torch.nan)
    return found


def _stability(photos: Photos, row: Row) -> Values:
    case = photos.case
    value = metrics.max_sensitivity(
        photos.inputs,
        photos.maps(row),
        photos.target,
        attribute=lambda x, t: photos.worker.maps(row.method, x, t)[0],  # type: ignore[arg-type]
        radius=case.radius,
        draws=case.preset.draws,
        seed=case.seed,
    )
    return {"max_sensitivity": value}


def _randomisation(photos: Photos, row: Row) -> Values:
    maps, kinds = photos.maps(row), [kind for kind, _ in photos.worker.randomised]
    others = (
        photos.worker.maps(row.method, photos.inputs, photos.target, model=model)[0]
        for _, model in photos.worker.randomised
    )
    similarity = metrics.randomisation(maps, others)
    cascade = similarity[:, [kind == "cascading" for kind in kinds]]
    found = {
        "randomisation": cascade.nanmean(1),  # without stages whose map is constant
        "randomisation_last": cascade[:, -1],
        "randomisation_floor": _unrelated(functools.partial(metrics.rank_correlation, absolute=True), maps),
        "stages": cascade.nanmean(0).tolist(),
    }
    if "alone" in kinds:
        found["randomisation_alone"] = similarity[:, [kind == "alone" for kind in kinds]].nanmean(1)
    return found


def _grid(photos: Photos, row: Row) -> Values:
    assert photos.case.grid is not None
    return {"grid_pointing": metrics.grid_pointing(photos.maps(row), photos.case.grid.shape, photos.cells)}


_COMPUTE: dict[str, Callable[[Photos, Row], Values]] = {
    "maps": _maps,
    "removal": _removal,
    "effects": _effects,
    "stability": _stability,
    "randomisation": _randomisation,
    "grid": _grid,
    "matched": _matched,
}


def _reason(error: Exception) -> str:
    """The message of an error as one line, with its type if the message alone may not say enough."""
    message = " ".join(str(error).split())
    expected = isinstance(error, (ValueError, TypeError, UnsupportedModelError)) and message
    return message if expected else f"{type(error).__name__}: {message}"


def _given(masks: Tensor | None) -> Tensor:
    assert masks is not None
    return masks


def _positions(maps: Tensor) -> Tensor:
    """Maps with rows and columns: the features of a vector are positions."""
    return maps if maps.dim() > 2 else maps[:, None]


def _unrelated(measure: Callable[[Tensor, Tensor], Tensor], maps: Tensor) -> Tensor:
    if len(maps) < 2:
        return maps.new_full((len(maps),), torch.nan)
    return metrics.unrelated(measure, maps)


def _coarse(maps: Tensor) -> list[list[int]]:
    """Each map as SIDE x SIDE numbers from 0 to 255: sums of absolute values, scaled to the largest."""
    pixels = images("judge", maps).sum(1, keepdim=True).abs()
    sums = F.adaptive_avg_pool2d(pixels, SIDE).flatten(1)
    return (255 * sums / sums.amax(1, keepdim=True).clamp(min=1e-30)).round().int().tolist()
