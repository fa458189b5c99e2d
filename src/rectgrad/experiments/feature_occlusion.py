"""Figure 3: units on the object and on the background are zeroed step by step.

For each convolution and each image with a mask, the units (one channel at one position) on the object, or on
the background, are set to zero in random order, from none to all. Logits are averaged over trials. The margin
is the logit of the class minus the largest other logit, averaged over the images.

Object and background differ in size and place, which matters by itself. The null is the difference of the two
drops, with all units zeroed, for the masks of images of other classes.
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
from rectgrad.experiments.units import LAYERS, of_other_classes, resized

TITLE = "Zeroing units on the object and on the background (Figure 3)"
PRESETS = {
    "quick": {"per_class": 5, "steps": 20, "trials": 5},
    "paper": {"per_class": 10, "steps": 100, "trials": 50},
}
PAPER = "Zeroing units on the object has a much larger effect on the decision."
CAPTIONS = {
    "": "Margin of the class (its logit minus the largest other logit; below the dotted line the decision "
    "changes) while units are zeroed in random order, for each convolution. Bands are 95 % intervals over "
    "networks and images. If the units of the object matter more, the orange curve falls far below the blue "
    "one. Object and background have different numbers of units, so the x-axis is a share."
}
PLACES = ("object", "background")
TOGETHER = 20  # steps in one pass on a GPU, whose kernels would be too small for one step


def run(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with lab.progress(len(LAYERS) * len(PLACES) * len(lab.seeds), "feature-occlusion") as advance:
        for name in LAYERS:
            margin = {place: _margins(lab, name, place, advance) for place in PLACES}
            found[name] = {place: _summary(lab, name, place, margin[place]) for place in PLACES}
            drops = {place: each[:, 0] - each[:, -1] for place, each in margin.items()}
            more, null = drops["object"] - drops["background"], _null(lab, name)
            found[name] |= {"more": estimate(more), "null": estimate(null), "beyond": difference(more, null)}
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


def _null(lab: Lab, name: str) -> np.ndarray:
    """(networks, images): how much more the margin falls without the units on the masks of images of other
    classes than without all others, mean over these masks."""
    return np.array(
        [
            lab.parts.part(f"{name} null {seed}", partial(_others, lab, module, name))
            for seed, module in zip(lab.seeds, lab.networks(), strict=True)
        ],
        dtype=float,
    )


def _others(lab: Lab, module: nn.Module, name: str) -> list[float]:
    x, objects, images = lab.masked()
    given, labels = x.to(lab.device), torch.from_numpy(images.labels)
    each = []
    for rows in of_other_classes(images.labels):
        after = [
            margins(occluded_logits(module, given, objects[rows], name, place, 1, 0)[-1], labels)
            for place in PLACES
        ]
        each.append(after[1] - after[0])  # the difference of the drops: the margin before cancels out
    found: list[float] = torch.stack(each).mean(0).tolist()
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
    module: nn.Module,
    x: Tensor,
    objects: Tensor,
    name: str,
    place: str,
    steps: int,
    trial: int,
    together: int | None = None,
) -> Tensor:
    """(steps + 1, N, classes): logits with none to all units of a region zeroed, in the order of the
    trial. `together`: the number of steps in one pass; the result does not depend on it."""
    region = _region(objects, name, place).expand(-1, _channels(name), -1, -1)
    keys = torch.rand(region.shape, generator=torch.Generator().manual_seed(trial))
    keys = keys.masked_fill(~region, 2.0).to(x.device)  # 2: never zeroed
    ordered, counts = keys.flatten(1).sort(1).values, region.flatten(1).sum(1).to(x.device)
    relu, found = getattr(module, LAYERS[name]), []
    for chunk in torch.arange(steps + 1, device=x.device).split(together or (TOGETHER if x.is_cuda else 1)):
        n = counts[:, None] * chunk // steps
        # the n smallest keys are those below the one at index n
        bound = torch.where(n < counts[:, None], ordered.gather(1, n.clamp(max=ordered.shape[1] - 1)), 2.0)
        off = (keys < bound.T[:, :, None, None, None]).flatten(0, 1)
        hook = relu.register_forward_hook(lambda _, __, y, off=off: y.masked_fill(off, 0.0))
        try:
            found.append(module(x.repeat(len(chunk), 1, 1, 1)).unflatten(0, (len(chunk), len(x))))
        finally:
            hook.remove()
    return torch.cat(found).cpu()


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
    differences = [
        [layer_name(name), *(mean(found[key]) for key in ("more", "null", "beyond"))]
        for name, found in metrics.items()
    ]
    return [
        Table(head, rows, "Margin after: all units of the region are zeroed. Drop with its 95 % interval."),
        Table(
            ["layer", "drop, object minus background", "masks of other classes", "beyond these"],
            differences,
            "All units of the region zeroed; means with 95 % intervals over networks and images.",
        ),
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        decided(
            f"In {layer_name(name)}, units on the object matter more than those on the background.",
            [effect(found["more"]), effect(found["beyond"])],
            f"margin falls by {mean(found['object']['drop'])} against {mean(found['background']['drop'])}; "
            f"with half of the units zeroed: by {number(_half(found['object']))} against "
            f"{number(_half(found['background']))}; difference of the drops {mean(found['more'])}, with "
            f"masks of images of other classes {mean(found['null'])}, beyond these {mean(found['beyond'])}",
        )
        for name, found in metrics.items()
    ]


def _half(found: dict[str, Any]) -> float:
    return found["margin"][0] - found["margin"][len(found["margin"]) // 2]
