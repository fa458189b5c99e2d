"""The measures of each unit of work, for one row and one chunk of photos."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad import metrics
from rectgrad.metrics import removal
from rectgrad.metrics.checks import images
from rectgrad.metrics.curves import curve, pixel_order
from rectgrad.metrics.scores import Scores
from rectgrad.metrics.sensitivity import largest_change, subset_correlation
from rectgrad.verdict.rows import Row, is_gradient

if TYPE_CHECKING:
    from rectgrad.verdict.photos import Photos

Values = dict[str, Any]  # measure -> one value per photo; other keys describe the unit
MATCHED = ("insertion_blur", "deletion_blur", "gini")  # measures of matched comparisons
SIDE = 14  # of the coarse maps in which methods are compared photo by photo


def _maps(photos: Photos, row: Row) -> Values:
    both, wanted = photos.both(row), photos.case.wanted("maps")
    maps = both[0]
    found: Values = {"zero": int(photos.zero(row).sum())}
    simple: dict[str, Callable[[Tensor], Tensor]] = {
        "gini": metrics.gini,
        "zero_share": metrics.zero_share,
        "total_variation": functools.partial(metrics.total_variation, normalize=True),
        "inside": lambda m: _on(photos.masks, functools.partial(metrics.inside, share=True), m),
        "pointing_game": lambda m: _on(photos.masks, metrics.pointing_game, m),
        "specificity": lambda m: metrics.specificity(_positions(m), _positions(both[1])),
        "specificity_floor": lambda m: _unrelated(metrics.specificity, _positions(m)),
    }
    found |= {name: simple[name](maps) for name in wanted if name != "specificity" or len(both) > 1}
    if photos.case.has_positions:
        found["coarse"] = _coarse(maps)
    return found


def _removal(photos: Photos, row: Row) -> Values:
    x, wanted = photos.inputs, photos.case.wanted("removal")
    rank = pixel_order("judge", x, photos.maps(row))
    found = {name: _area(name, photos, rank) for name in wanted if not name.startswith("road")}
    if any(name.startswith("road") for name in wanted):
        scores, last = Scores(photos.scores, photos.target, len(x)), rank.shape[-2] * rank.shape[-1] - 1
        most, least = (
            removal.answers(scores, x, each, removal.FRACTIONS, photos.road_noise)
            for each in (rank, last - rank)
        )
        found["road_most"], found["road_least"] = most.probability.mean(1), least.probability.mean(1)
        found["road"] = found["road_least"] - found["road_most"]
        found["road_accuracy"] = (least.correct - most.correct).mean(1)
    return found


def _area(name: str, photos: Photos, rank: Tensor) -> Tensor:
    """The area under an insertion or deletion curve, whose ends are the same for every row."""
    kind, _, base = name.partition("_")
    start, end = photos.inputs, photos.blurred if base == "blur" else photos.mean
    if kind == "insertion":
        start, end = end, start
    scores = Scores(photos.probabilities, photos.target, len(start))
    ends = scores(start), scores(end)
    return metrics.area(curve(scores, start, end, rank, photos.case.preset.steps, False, ends))


def _matched(photos: Photos, row: Row) -> Values:
    maps = photos.maps(row)
    rank = pixel_order("judge", photos.inputs, maps)
    return {name: _area(name, photos, rank) for name in MATCHED[:2]} | {"gini": metrics.gini(maps)}


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
        mine, zero = photos.infidelity(effects), photos.largest_infidelity
        found["infidelity"] = torch.where(zero > 0, mine / zero, torch.nan)
    return found


def _stability(photos: Photos, row: Row) -> Values:
    def again(x: Tensor, target: Any) -> Tensor:
        return photos.worker.maps(row.method, x, target)[0]

    change = largest_change(photos.inputs, photos.maps(row), photos.target, again, photos.small_noise)
    return {"max_sensitivity": change}


def _randomisation(photos: Photos, row: Row) -> Values:
    maps, kinds = photos.maps(row), [kind for kind, _ in photos.worker.randomised]
    if row.method.runs_model:
        others = photos.worker.randomised_maps(row.method, photos.inputs, photos.target)
        similarity = metrics.randomisation(maps, others)
    else:  # the same map every time
        similarity = metrics.randomisation(maps, [maps]).expand(-1, len(kinds))
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


COMPUTE: dict[str, Callable[[Photos, Row], Values]] = {
    "maps": _maps,
    "removal": _removal,
    "effects": _effects,
    "stability": _stability,
    "randomisation": _randomisation,
    "grid": _grid,
    "matched": _matched,
}


def _on(masks: Tensor | None, measure: Callable[[Tensor, Tensor], Tensor], maps: Tensor) -> Tensor:
    """A measure of location; undefined where every map has the same value."""
    assert masks is not None
    return torch.where(says_nothing(masks), torch.nan, measure(maps, masks))


def says_nothing(masks: Tensor) -> Tensor:
    """Whether a mask is empty, or covers the whole photo."""
    flat = masks.flatten(1)
    return flat.all(1) | ~flat.any(1)


def _positions(maps: Tensor) -> Tensor:
    """Maps with rows and columns; the features of a vector count as positions."""
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
