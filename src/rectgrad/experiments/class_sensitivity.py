"""Not in the paper: does a map depend on the class it is for?

The map for the predicted class is compared with the maps of the same image for the runner-up, for a random
class and for the least likely class: rank correlation, and the share of the 5 % largest pixels that both have
(1 - specificity). The floor is the same measure for the maps of unrelated images, which share nothing but the
method. RectGrad is measured over q, with and without the multiplication by the input. On photos there is one
network, so the numbers are of that network only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.colours import colour
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean, methods
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import comparison_map
from rectgrad.experiments.statistics import difference, estimate, spread
from rectgrad.methods import Method, RectGrad
from rectgrad.methods.catalog import METHODS, title_of
from rectgrad.metrics import rank_correlation, specificity, unrelated

TITLE = "The same image explained for other classes (class sensitivity)"
PHOTOS = True
PRESETS = {"quick": {"images": 50, "photo_count": 4}, "paper": {"images": 500, "photo_count": 50}}
PAPER = "Not in the paper, which argues from adversarial images that RectGrad's maps follow the class."
CAPTIONS = {
    "": "Similarity of the map for the predicted class and maps of the same image for other classes, on the "
    "dataset (left) and on photos (right): rank correlation (upper row) and shared top pixels (lower row). "
    "The grey bar is the floor, maps of unrelated images. A method whose bars are far above its floor shows "
    "the image rather than the class.",
    "q": "RectGrad's similarity to the map of the least likely class, over q, with and without the "
    "multiplication by the input; dotted: unrelated images.",
}
LISTED = (
    "saliency",
    "gradient_x_input",
    "guided_backprop",
    "deeplift",
    "epsilon_lrp",
    "rectgrad",
    "rectgrad_gated",
)
LEVELS = (0, 50, 80, 90, 95, 98, 99)
CLASSES = ("runner-up", "random", "least likely")
FLOOR = "unrelated images"
SHADES = {"runner-up": 1.0, "random": 0.7, "least likely": 0.4}


def shared(a: Tensor, b: Tensor) -> Tensor:
    """The share of the 5 % largest pixels that both maps have."""
    return 1 - specificity(a, b)


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"rank": rank_correlation, "shared": shared}
WORDS = {"rank": "rank correlation", "shared": "shared top pixels"}


def rows() -> dict[str, Method]:
    """Everything that is measured, by name."""
    bare: dict[str, Any] = {"multiply_by_input": False, "positive_only": False}
    found: dict[str, Method] = {name: METHODS[name] for name in LISTED}
    found |= {f"q = {q}": RectGrad(q=q) for q in LEVELS}
    return found | {f"q = {q}, without input": RectGrad(q=q, **bare) for q in LEVELS}


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    metrics = {"dataset": _measured(lab, "dataset", lab.networks(), x)}
    if lab.gallery:
        photos = lab.gallery.x[: lab.numbers["photo_count"]]
        metrics["photos"] = _measured(lab, "photos", [lab.gallery.model.module], photos)
    return metrics


def _measured(lab: Lab, what: str, modules: list[nn.Module], x: Tensor) -> dict[str, Any]:
    chosen, found = rows(), dict[str, dict[str, np.ndarray]]()
    with lab.progress(len(chosen) * len(modules), f"class-sensitivity, {what}") as advance:
        for name, method in chosen.items():
            each = []
            for i, module in enumerate(modules):
                each.append(lab.parts.part(f"{what} {name} {i}", partial(_measure, module, x, method)))
                advance()
            found[name] = {key: np.array([one[key] for one in each], dtype=float) for key in each[0]}
    return {name: _summary(values, found["saliency"]) for name, values in found.items()}


def _measure(module: nn.Module, x: Tensor, method: Method) -> dict[str, list[float]]:
    """measure and class -> one value per image."""
    predicted, others = targets(scores(module, x))
    own = comparison_map(module, x, method, predicted)
    found: dict[str, list[float]] = {}
    for which, target in others.items():
        other = comparison_map(module, x, method, target)
        found |= {f"{key} {which}": measure(own, other).tolist() for key, measure in MEASURES.items()}
    floors = {f"{key} {FLOOR}": unrelated(measure, own).tolist() for key, measure in MEASURES.items()}
    return found | floors


@torch.no_grad()
def scores(module: nn.Module, x: Tensor) -> Tensor:
    device = next(module.parameters()).device
    found = [module(part.to(device)) for part in x.split(100)]
    return torch.cat([getattr(each, "logits", each).cpu() for each in found])


def targets(outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The predicted class, and the other classes of `CLASSES`; the random one is never the predicted one."""
    ordered = outputs.argsort(1, descending=True)
    places = torch.randint(1, outputs.shape[1], (len(outputs), 1), generator=torch.Generator().manual_seed(0))
    random = ordered.gather(1, places).squeeze(1)
    return ordered[:, 0], dict(zip(CLASSES, (ordered[:, 1], random, ordered[:, -1]), strict=True))


def _summary(values: Mapping[str, np.ndarray], saliency: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Spreads, and for the least likely class the difference to the floor, and how much larger that is than
    saliency's: maps of one method are alike for reasons that have nothing to do with the class."""
    found = {key: spread(each) for key, each in values.items()}
    for key in MEASURES:
        last = f"{key} {CLASSES[-1]}"
        ours, theirs = (each[last] - each[f"{key} {FLOOR}"] for each in (values, saliency))
        found[last] |= {"above floor": estimate(ours), "above saliency": difference(ours, theirs)}
    return found


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(6.5 * len(metrics), 7.5), layout="constrained")
    axes = page.subplots(len(MEASURES), len(metrics), squeeze=False, sharey="row", sharex=True)
    for column, (what, found) in enumerate(metrics.items()):
        for row, key in enumerate(MEASURES):
            _bars(axes[row, column], found, key)
        axes[0, column].set_title("photos" if what == "photos" else lab.dataset_name)
    for row, key in enumerate(MEASURES):
        axes[row, 0].set_ylabel(WORDS[key])
    axes[0, 0].legend(*_legend(), frameon=False, ncols=2, fontsize=8)
    return {"": page, "q": _over_q(lab, metrics)}


def _bars(axis: Any, found: dict[str, Any], key: str) -> None:
    for i, name in enumerate(LISTED):
        about = [found[name][f"{key} {which}"] for which in (*CLASSES, FLOOR)]
        for k, (value, which) in enumerate(zip(about, (*CLASSES, FLOOR), strict=True)):
            shade = (
                {"color": colour(name), "alpha": SHADES[which]} if which in SHADES else {"color": "#c3c5cc"}
            )
            axis.bar(i + 0.2 * (k - 1.5), value.get("mean", 0), 0.19, **shade)
            at = value.get("interval")
            if at:
                axis.plot([i + 0.2 * (k - 1.5)] * 2, at, color="#1c1d21", linewidth=1)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(LISTED)), [title_of(n) for n in LISTED], rotation=35, ha="right")
    axis.spines[["top", "right"]].set_visible(False)


def _legend() -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    shades = [Patch(color="#3b6fb6", alpha=alpha) for alpha in SHADES.values()]
    return [*shades, Patch(color="#c3c5cc")], [*SHADES, FLOOR]


def _over_q(lab: Lab, metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(5.5 * len(metrics), 3.8), layout="constrained")
    axes = page.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axis, (what, found) in zip(axes, metrics.items(), strict=True):
        for suffix, style in (("", "-"), (", without input", "--")):
            about = [found[f"q = {q}{suffix}"] for q in LEVELS]
            for which, line in ((CLASSES[-1], style), (FLOOR, ":")):
                means = [a[f"rank {which}"].get("mean", np.nan) for a in about]
                label = f"{which}{suffix}" if which != FLOOR or not suffix else None
                shade = colour("rectgrad") if not suffix else colour("rectgrad_mod")
                axis.plot(LEVELS, means, line, marker=".", color=shade, label=label)
        axis.set_title("photos" if what == "photos" else lab.dataset_name)
        axis.set_xlabel("q")
        axis.set_ylim(-0.3, 1)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("rank correlation")
    axes[0].legend(frameon=False, fontsize=8)
    return page


def tables(metrics: dict[str, Any]) -> list[Table]:
    made = []
    for what, found in metrics.items():
        for key in MEASURES:
            head = [f"{WORDS[key]}, {what}", *CLASSES, FLOOR]
            lines = [
                [title_of(name) if name in METHODS else f"RectGrad, {name}"]
                + [_cell(about[f"{key} {which}"]) for which in (*CLASSES, FLOOR)]
                for name, about in found.items()
            ]
            note = (
                "With the map of the predicted class; mean with its 95 % interval. Undefined: one of the two "
                "maps is zero; these do not count in the mean."
            )
            made.append(Table(head, lines, note))
    return made


def _cell(found: dict[str, Any]) -> str:
    """A mean, and how many pairs of maps have no value, which would otherwise go unnoticed."""
    return mean(found) + (f", {found['undefined']} undefined" if found["n"] and "undefined" in found else "")


def findings(metrics: dict[str, Any]) -> list[Finding]:
    found = metrics["dataset"]
    last = {name: found[name][f"rank {CLASSES[-1]}"] for name in methods(found)}
    ordered = sorted(last, key=lambda name: -last[name].get("mean", 0))
    numbers = "; ".join(
        f"{title_of(name)} {mean(last[name])} (unrelated images {mean(found[name][f'rank {FLOOR}'])})"
        for name in ordered
    )
    photos = metrics.get("photos", {}).get("rectgrad", {})
    on_photos = (
        f"; on photos RectGrad {mean(photos[f'rank {CLASSES[-1]}'])}, shared top pixels "
        f"{mean(photos[f'shared {CLASSES[-1]}'])}"
        if photos
        else ""
    )
    because = f"rank correlation with the least likely class's map: {numbers}{on_photos}"
    return [
        decided(
            "RectGrad's map for the least likely class is as different from that for the predicted class as "
            "maps of unrelated images are.",
            [effect(last["rectgrad"]["above floor"], sign=-1)],
            because,
            ours=True,
        ),
        decided(
            "RectGrad's maps depend less on the class than saliency maps: those for the least likely and the "
            "predicted class are more similar, beyond the similarity of unrelated images.",
            [effect(last["rectgrad"]["above saliency"])],
            because,
            ours=True,
        ),
    ]
