"""Figure 3: units on the object and on the background are zeroed step by step.

For each convolution and each image with a mask, the units (one channel at one position) on the object, or on
the background, are set to zero in random order, from none to all. Logits are averaged over trials. The margin
is the logit of the class minus the largest other logit, averaged over the images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.boxes import COLOURS
from rectgrad.experiments.colours import layer_name
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.statistics import difference, estimate, spread
from rectgrad.experiments.units import LAYERS, resized

TITLE = "Zeroing units on the object and on the background (Figure 3)"
PRESETS = {
    "quick": {"per_class": 5, "steps": 20, "trials": 5},
    "paper": {"per_class": 10, "steps": 100, "trials": 10},  # of each network: 50 in all
}
PAPER = "Zeroing units on the object has a much larger effect on the decision."
CAPTIONS = {
    "": "Margin of the class (its logit minus the largest other logit; below the dotted line the decision "
    "changes) while units are zeroed in random order, for each convolution. Bands are 95 % intervals over "
    "networks and images. If the units of the object matter more, the orange curve falls far below the blue "
    "one. Object and background have different numbers of units, so the x-axis is a share."
}
PLACES = ("object", "background")


def run(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with lab.progress(len(LAYERS) * len(PLACES) * len(lab.seeds), "feature-occlusion") as advance:
        for name in LAYERS:
            margin = {place: _margins(lab, name, place, advance) for place in PLACES}
            found[name] = {place: _summary(lab, name, place, margin[place]) for place in PLACES}
            drops = {place: each[:, 0] - each[:, -1] for place, each in margin.items()}
            found[name]["more"] = difference(drops["object"], drops["background"])
    return found


def _margins(lab: Lab, name: str, place: str, advance: Callable[[], Any]) -> np.ndarray:
    """(networks, steps + 1, images)"""
    each = []
    for seed, module in zip(lab.seeds, lab.networks(), strict=True):
        each.append(lab.parts.part(f"{name} {place} {seed}", partial(_curve, lab, module, name, place)))
        advance()
    return np.array(each, dtype=float)


def _curve(lab: Lab, module: nn.Module, name: str, place: str) -> list[list[float]]:
    """The margin of each image at each step, logits averaged over trials."""
    x, objects, images = lab.masked()
    steps, trials = lab.numbers["steps"], lab.numbers["trials"]
    total = torch.zeros(steps + 1, len(x), 10)
    for trial in range(trials):
        total += occluded_logits(module, x.to(lab.device), objects, name, place, steps, trial)
    found: list[list[float]] = margins(total / trials, torch.from_numpy(images.labels)).tolist()
    return found


def _summary(lab: Lab, name: str, place: str, margin: np.ndarray) -> dict[str, Any]:
    objects, steps = lab.masked()[1], lab.numbers["steps"]
    about = [estimate(each) for each in margin.swapaxes(0, 1)]
    limits = [each.get("interval", [each["mean"]] * 2) for each in about]
    return {
        "switched_off": [k / steps for k in range(steps + 1)],
        "margin": [each["mean"] for each in about],
        "low": [low for low, _ in limits],
        "high": [high for _, high in limits],
        "drop": spread(margin[:, 0] - margin[:, -1]),
        "units": int(_region(objects, name, place).sum()) * _channels(name) // len(objects),
        "trials": lab.numbers["trials"],
        "n": len(objects),
    }


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """(..., N, classes) -> (..., N): the logit of the class minus the largest of the others."""
    index = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    others = logits.scatter(-1, index, -torch.inf).amax(-1)
    return logits.gather(-1, index).squeeze(-1) - others


def _region(objects: Tensor, name: str, place: str) -> Tensor:
    """Where units are zeroed: (N, 1, side, side) at the resolution of the layer."""
    on_object = resized(objects, 32 if name in ("conv1", "conv2") else 16)
    return (on_object if place == "object" else ~on_object).unsqueeze(1)


def _channels(name: str) -> int:
    return 32 if name in ("conv1", "conv2") else 64


@torch.no_grad()
def occluded_logits(
    module: nn.Module, x: Tensor, objects: Tensor, name: str, place: str, steps: int, trial: int
) -> Tensor:
    """(steps + 1, N, classes): logits with none to all units of a region zeroed, in the order of the
    trial."""
    region = _region(objects, name, place).expand(-1, _channels(name), -1, -1)
    keys = torch.rand(region.shape, generator=torch.Generator().manual_seed(trial))
    keys = keys.masked_fill(~region, 2.0).to(x.device)  # 2: never zeroed
    ordered, counts = keys.flatten(1).sort(1).values, region.flatten(1).sum(1).to(x.device)
    relu, found = getattr(module, LAYERS[name]), []
    for k in range(steps + 1):
        n = (counts * k // steps).clamp(max=ordered.shape[1] - 1)
        # the n smallest keys are those below the one at index n
        bound = torch.where(n < counts, ordered.gather(1, n.unsqueeze(1)).squeeze(1), 2.0)
        off = keys < bound.view(-1, 1, 1, 1)
        hook = relu.register_forward_hook(lambda _, __, y, off=off: y.masked_fill(off, 0.0))
        try:
            found.append(module(x).cpu())
        finally:
            hook.remove()
    return torch.stack(found)


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(12, 3.4), layout="constrained")
    for axis, (name, places) in zip(page.subplots(1, 4, sharey=True), metrics.items(), strict=True):
        for place, colour in zip(PLACES, COLOURS[::-1], strict=True):
            found = places[place]
            axis.plot(found["switched_off"], found["margin"], color=colour, label=place)
            axis.fill_between(found["switched_off"], found["low"], found["high"], color=colour, alpha=0.2)
        axis.axhline(0, color="grey", linestyle=":")
        axis.set_title(layer_name(name))
        axis.set_xlabel("share of zeroed units")
        axis.spines[["top", "right"]].set_visible(False)
    page.axes[0].set_ylabel("margin of the class")
    page.axes[0].legend(frameon=False)
    return {"": page}


def tables(metrics: dict[str, Any]) -> list[Table]:
    head = ["layer", "zeroed units", "number per image", "margin before", "margin after", "drop"]
    rows = [
        [
            layer_name(name),
            place,
            str(f["units"]),
            number(f["margin"][0]),
            number(f["margin"][-1]),
            mean(f["drop"]),
        ]
        for name, places in metrics.items()
        for place, f in ((place, places[place]) for place in PLACES)
    ]
    return [
        Table(head, rows, "Margin after: all units of the region are zeroed. Drop with its 95 % interval.")
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        decided(
            f"In {layer_name(name)}, units on the object matter more than those on the background.",
            [effect(found["more"])],
            f"margin falls by {mean(found['object']['drop'])} against {mean(found['background']['drop'])}; "
            f"with half of the units zeroed: by {number(_half(found['object']))} against "
            f"{number(_half(found['background']))}",
        )
        for name, found in metrics.items()
    ]


def _half(found: dict[str, Any]) -> float:
    return found["margin"][0] - found["margin"][len(found["margin"]) // 2]
