"""How often units are active on the object and on the background, which the paper left as future work.

For each image with a mask and each convolution we compare the share of units above zero on the object and on
the background, in four stages, because two things speak for the object without being about it: zero padding
changes the activity along the border, where there is mostly background, and activity depends on the position,
while objects are in the middle.

    all positions        the plain difference
    without the border   positions that the zero padding reaches are left out
    equal distances      object and background are compared at equal distances from the centre
    beyond other masks   the last one minus its value for the masks of images of other classes, the null

Intervals are over networks and images; d = mean / standard deviation of the images' differences. The paper
expects no difference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.boxes import boxes
from rectgrad.experiments.colours import layer_name
from rectgrad.experiments.findings import ALPHA, Finding, Table, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.statistics import p_value, spread
from rectgrad.experiments.units import LAYERS, activations, of_other_classes, resized

TITLE = "How often units are active on the object and on the background"
PRESETS = {"quick": {"per_class": 10}, "paper": {"per_class": 10}}
PAPER = (
    "Left as future work. Judging by feature maps, the paper expects units to be active as often on the "
    "background as on the object."
)
CAPTIONS = {
    "": "Left: share of active units on the background and on the object, over the images with masks. "
    "Right: the paired difference per layer with its 95 % interval, first plain, then with one confound "
    "after the other removed. Only the last stage answers the question; the number above it is its effect "
    "size d (about 0.2 is small, 0.5 medium, 0.8 large)."
}
BORDER = {"conv1": 1, "conv2": 2, "conv3": 2, "conv4": 3}  # positions that zero padding reaches
STAGES = {
    "plain": "all positions",
    "inner": "without the border",
    "centred": "equal distances",
    "beyond": "beyond other masks",
}
EQUAL = 0.02  # difference of shares that counts as none
SHADES = ("#c3c5cc", "#8fa9cf", "#5f86bf", "#1c3f73")


def run(lab: Lab) -> dict[str, Any]:
    x, objects, images = lab.masked()
    others = of_other_classes(images.labels)
    each = [
        lab.parts.part(f"network {seed}", partial(_measure, module, x.to(lab.device), objects, others))
        for seed, module in zip(lab.seeds, lab.networks(), strict=True)
    ]
    found = {
        name: {key: spread(np.array([one[name][key] for one in each], dtype=float)) for key in each[0][name]}
        for name in LAYERS
    }
    for about in found.values():
        for stage in STAGES:
            deviation = about[stage].get("std", 0)
            about[stage]["effect"] = about[stage]["mean"] / deviation if deviation else 0.0
    return found


def _measure(
    module: nn.Module, x: Tensor, objects: Tensor, others: Tensor
) -> dict[str, dict[str, list[float]]]:
    active = activations(module, x)
    return {name: compared(each, objects, BORDER[name], others) for name, each in active.items()}


def compared(activation: Tensor, objects: Tensor, border: int, others: Tensor) -> dict[str, list[float]]:
    """One value per image: the shares on the object and on the background, and the difference by stage.
    `others` (n, N) are the images whose masks are the null."""
    where, active = resized(objects, activation.shape[-1]), (activation > 0).float().mean(1)
    everywhere = torch.ones(1, *active.shape[1:])
    inner = distances(active.shape[-1], border)
    on, off = frequencies(activation, objects)
    centred = difference(active, where, inner)
    other = torch.stack([difference(active, where[rows], inner) for rows in others]).nanmean(0)
    return {
        "object": on.tolist(),
        "background": off.tolist(),
        "plain": difference(active, where, everywhere).tolist(),
        "inner": difference(active, where, inner.sum(0, keepdim=True)).tolist(),
        "centred": centred.tolist(),
        "beyond": (centred - other).tolist(),
    }


def frequencies(activation: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """The share of active units on the object and on the background of each image; NaN if it has none."""
    where, active = resized(objects, activation.shape[-1]), (activation > 0).float().mean(1)
    on, off = ((active * w).flatten(1).sum(1) / w.flatten(1).sum(1) for w in (where, ~where))
    return on, off


def distances(side: int, border: int) -> Tensor:
    """(rings, side, side): the positions at each distance from the centre, in steps of one, without the
    border."""
    at = torch.arange(side) - (side - 1) / 2
    ring = (at[:, None].square() + at.square()).sqrt().floor().long()
    inner = torch.zeros(side, side)
    inner[border : side - border, border : side - border] = 1
    return torch.stack([(ring == r) * inner for r in range(int(ring.max()) + 1)])


def difference(active: Tensor, where: Tensor, rings: Tensor) -> Tensor:
    """Mean activity on the object minus that on the background, ring by ring: the mean over rings, weighted
    by the smaller of the two numbers of positions. NaN if no ring has both."""
    on, off = (torch.einsum("nhw,rhw->nr", active * w, rings) for w in (where, ~where))
    n_on, n_off = (torch.einsum("nhw,rhw->nr", w.float(), rings) for w in (where, ~where))
    weight = torch.minimum(n_on, n_off)
    gap = on / n_on.clamp(min=1) - off / n_off.clamp(min=1)
    return (weight * gap).sum(1) / weight.sum(1)


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(12, 3.9), layout="constrained")
    left, right = page.subplots(1, 2, width_ratios=(1, 1.1))
    names = [layer_name(name) for name in metrics]
    where = {name: [found[name] for found in metrics.values()] for name in ("background", "object")}
    boxes(left, names, where, "share of active units")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, ncols=2)
    for k, (stage, label) in enumerate(STAGES.items()):
        for i, found in enumerate(metrics.values()):
            about, at = found[stage], i + 0.18 * (k - 1.5)
            right.plot([at, at], about.get("interval", [about["mean"]] * 2), color=SHADES[k], linewidth=2)
            right.plot(at, about["mean"], "o", color=SHADES[k], label=label if i == 0 else None)
            if stage == "beyond":
                top = about.get("interval", [about["mean"]] * 2)[1]
                right.annotate(f"{about['effect']:.2f}", (at, top), ha="center", va="bottom", fontsize=8)
    right.axhline(0, color="grey", linestyle=":")
    right.set_xticks(range(len(metrics)), names)
    right.margins(y=0.15)
    right.set_ylabel("object minus background")
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    return {"": page}


def tables(metrics: dict[str, Any]) -> list[Table]:
    head = ["layer", "active on the object", "on the background", *STAGES.values(), "d of the last", "p", "n"]
    rows = [
        [layer_name(name), mean(found["object"]), mean(found["background"])]
        + [mean(found[stage]) for stage in STAGES]
        + [f"{found['beyond']['effect']:.2f}", _p(found["beyond"]), str(found["beyond"]["n"])]
        for name, found in metrics.items()
    ]
    note = "Differences object minus background with 95 % intervals over networks and images; p before Holm."
    return [Table(head, rows, note)]


def _p(found: dict[str, Any]) -> str:
    p = found.get("p", 1.0)
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        _finding(
            f"In {layer_name(name)}, units are active as often on the background as on the object.",
            found["beyond"],
            f"difference {mean(found['plain'])} at all positions, {mean(found['inner'])} without the border, "
            f"{mean(found['centred'])} at equal distances from the centre, {mean(found['beyond'])} beyond "
            f"masks of images of other classes (d = {found['beyond']['effect']:.2f})",
        )
        for name, found in metrics.items()
    ]


def _finding(claim: str, found: dict[str, Any], because: str) -> Finding:
    """Does not hold if the difference is not 0; holds if it is within 0.02 of 0 (two one-sided tests)."""
    if "error" not in found or found.get("networks", 1) < 2:
        return Finding(claim, None, because)
    p = p_value(found)
    if p < ALPHA:
        return Finding(claim, False, because, p)
    inside = abs(found["mean"]) < EQUAL
    equal = max(p_value(found, EQUAL), p_value(found, -EQUAL)) / 2 if inside else 1.0
    return Finding(
        claim, True if equal < ALPHA else None, f"{because}; equal means within {number(EQUAL)}", equal
    )
