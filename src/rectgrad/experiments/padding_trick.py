"""The price of the padding trick: how much attribution it removes along the border, and from what.

A ring is a seventh of the shorter side wide: 32 pixels of a photo with 224. For RectGrad and gradient x
input, with and without the padding trick, we measure the share of absolute attribution in each ring, beside
the ring's share of the area. On images with masks we also measure how the outer ring's attribution is split:
what is on the background is noise that the trick removes, what is on the object is evidence that it hides.
Images are grouped by whether the object reaches into the outer ring.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.colours import colour
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import comparison_map, nan_where_zero
from rectgrad.experiments.statistics import difference, estimate, spread
from rectgrad.methods import GradientXInput, Method, RectGrad, Saliency
from rectgrad.metrics import inside, outside
from rectgrad.verdict.matched import Matched, Padded

TITLE = "The price of the padding trick"
PHOTOS = True
PRESETS = {
    "quick": {"images": 50, "per_class": 10, "photo_count": 4},
    "paper": {"images": 1_000, "per_class": 10, "photo_count": 100},
}
PAPER = "The padding trick removes spurious lines along the border of an image."
CAPTIONS = {
    "": "Share of absolute attribution by ring, from the border to the centre, with (solid) and without "
    "(dashed) the padding trick, on the dataset and on photos; dotted: the ring's share of the area.",
    "object": "Images with masks: attribution in the outer ring on the background (which the trick should "
    "remove) and on the object (which it should not), for images whose object reaches into the ring and "
    "for others.",
}
RINGS = 4  # of a width of a seventh of the side, the last one with the centre
METHODS: dict[str, tuple[Method, Method]] = {  # with and without
    "rectgrad": (RectGrad(), RectGrad(padding_trick=False)),
    "gradient_x_input": (Matched(Padded(Saliency()), times_input=True), GradientXInput()),
}
TITLES = {"rectgrad": "RectGrad", "gradient_x_input": "gradient × input"}
KINDS = ("with", "without")
REACHES = 0.05  # of the object's area in the outer ring


def run(lab: Lab) -> dict[str, Any]:
    networks = lab.networks()
    metrics: dict[str, Any] = {"dataset": _rings(lab, "dataset", networks, lab.test()[0])}
    if lab.gallery:
        photos = lab.gallery.x[: lab.numbers["photo_count"]]
        metrics["photos"] = _rings(lab, "photos", [lab.gallery.model.module], photos)
    x, objects, _ = lab.masked()
    each = [
        lab.parts.part(f"objects {i}", partial(_objects, module, x, objects))
        for i, module in enumerate(networks)
    ]
    return {**metrics, "objects": _split(each, reaching(objects).numpy())}


def ring_of(height: int, width: int) -> Tensor:
    """(height, width): the number of the ring, 0 at the border."""
    rows, columns = (torch.minimum(torch.arange(n), n - 1 - torch.arange(n)) for n in (height, width))
    depth = torch.minimum(rows[:, None], columns)
    return (7 * depth // min(height, width)).clamp(max=RINGS - 1)


def _rings(lab: Lab, what: str, modules: list[nn.Module], x: Tensor) -> dict[str, Any]:
    ring = ring_of(*x.shape[-2:])
    found: dict[str, Any] = {"area": [float((ring == r).float().mean()) for r in range(RINGS)]}
    for name in METHODS:
        each = [
            lab.parts.part(f"{what} {name} {i}", partial(_shares, module, x, name, ring))
            for i, module in enumerate(modules)
        ]
        values = {kind: np.array([one[kind] for one in each], dtype=float) for kind in KINDS}
        found[name] = {kind: [spread(v) for v in values[kind].swapaxes(0, 1)] for kind in KINDS}
        found[name]["removed"] = difference(values["without"][:, 0], values["with"][:, 0])
    return found


def _shares(module: nn.Module, x: Tensor, name: str, ring: Tensor) -> dict[str, list[list[float]]]:
    """With and without: for each ring, one share per image."""
    found = {}
    for kind, method in zip(KINDS, METHODS[name], strict=True):
        maps = comparison_map(module, x, method)
        found[kind] = [nan_where_zero(inside(maps, ring == r, share=True), maps) for r in range(RINGS)]
    return found


def reaching(objects: Tensor) -> Tensor:
    """Whether a part of the object is in the outer ring."""
    outer = ring_of(*objects.shape[-2:]) == 0
    area = objects.flatten(1).sum(1).clamp(min=1)
    return (objects & outer).flatten(1).sum(1) / area >= REACHES


def _objects(module: nn.Module, x: Tensor, objects: Tensor) -> dict[str, dict[str, list[float]]]:
    """RectGrad's shares in the outer ring, on the object and on the background, and outside the object."""
    outer, found = ring_of(*objects.shape[-2:]) == 0, {}
    for kind, method in zip(KINDS, METHODS["rectgrad"], strict=True):
        maps = comparison_map(module, x, method)
        places = {"object": objects & outer, "background": ~objects & outer}
        found[kind] = {
            key: nan_where_zero(inside(maps, where, share=True), maps) for key, where in places.items()
        }
        found[kind]["outside"] = nan_where_zero(outside(maps, objects, share=True), maps)
    return found


def _split(each: list[dict[str, Any]], reaches: np.ndarray) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group, rows in (("reaching", reaches), ("inside", ~reaches)):
        found[group] = {"n": int(rows.sum())}
        for key in ("object", "background", "outside"):
            values = {
                kind: np.array([one[kind][key] for one in each], dtype=float)[:, rows] for kind in KINDS
            }
            found[group][key] = {kind: estimate(v) for kind, v in values.items()}
            found[group][key]["removed"] = difference(values["without"], values["with"])
    return found


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    kinds = [what for what in ("dataset", "photos") if what in metrics]
    page = Figure(figsize=(5.5 * len(kinds), 3.8), layout="constrained")
    axes = page.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    names = ["outer", *(f"ring {r + 1}" for r in range(1, RINGS - 1)), "centre"]
    for axis, what in zip(axes, kinds, strict=True):
        for method in METHODS:
            for kind, style in zip(KINDS, ("-", "--"), strict=True):
                means = [each.get("mean", np.nan) for each in metrics[what][method][kind]]
                label = f"{TITLES[method]}, {kind}"
                axis.plot(names, means, style, marker="o", color=colour(method), label=label)
        axis.plot(names, metrics[what]["area"], ":", color="grey", label="area")
        axis.set_title("photos" if what == "photos" else lab.dataset_name)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of attribution")
    axes[0].legend(frameon=False, fontsize=8)
    return {"": page, "object": _object_figure(metrics["objects"])}


def _object_figure(found: dict[str, Any]) -> Figure:
    page = Figure(figsize=(8, 3.6), layout="constrained")
    for axis, place in zip(page.subplots(1, 2, sharey=True), ("background", "object"), strict=True):
        for i, group in enumerate(("reaching", "inside")):
            for k, kind in enumerate(KINDS):
                value = found[group][place][kind]
                at = i + 0.3 * (k - 0.5)
                axis.bar(at, value.get("mean", 0), 0.28, color=colour("rectgrad"), alpha=(1, 0.5)[k])
                axis.plot([at] * 2, value.get("interval", [value.get("mean", 0)] * 2), color="#1c1d21")
        axis.set_xticks((0, 1), ("object reaches the ring", "object inside"))
        axis.set_title(f"on the {place}")
        axis.spines[["top", "right"]].set_visible(False)
    page.axes[0].set_ylabel("share in the outer ring")
    for kind, alpha in zip(KINDS, (1, 0.5), strict=True):
        page.axes[1].bar(0, 0, color=colour("rectgrad"), alpha=alpha, label=f"{kind} the trick")
    page.axes[1].legend(frameon=False)
    return page


def tables(metrics: dict[str, Any]) -> list[Table]:
    made = []
    for what in ("dataset", "photos"):
        if what in metrics:
            rows = [
                [f"{TITLES[method]}, {kind}", *map(mean, metrics[what][method][kind])]
                for method in METHODS
                for kind in KINDS
            ]
            rows.append(["area", *(f"{area:.3f}" for area in metrics[what]["area"])])
            made.append(
                Table([what, "outer ring", "ring 2", "ring 3", "centre"], rows, "Share of attribution.")
            )
    rows = [
        [f"{group}, n = {found['n']}", key, *(mean(found[key][each]) for each in (*KINDS, "removed"))]
        for group, found in metrics["objects"].items()
        for key in ("background", "object", "outside")
    ]
    note = (
        "RectGrad. Background and object: share of attribution in the outer ring; outside: outside the "
        "object in the whole image. Reaching: at least 5 % of the object is in the outer ring."
    )
    return [*made, Table(["object", "place", "with", "without", "removed by the trick"], rows, note)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    reaching, photos = metrics["objects"]["reaching"], metrics.get("photos")
    seen = {"dataset": metrics["dataset"], **({"photos": photos} if photos else {})}
    shares = "; ".join(
        f"{what}: {mean(found['rectgrad']['without'][0])} without, {mean(found['rectgrad']['with'][0])} "
        f"with, {found['area'][0]:.2f} of the area"
        for what, found in seen.items()
    )
    return [
        decided(
            "The padding trick removes attribution along the border.",
            [effect(metrics["dataset"]["rectgrad"]["removed"])],
            f"RectGrad's share in the outer ring: {shares}",
        ),
        decided(
            "Where the object reaches the border, it also removes attribution on the object there.",
            [effect(reaching["object"]["removed"])],
            f"share on the object in the outer ring: {mean(reaching['object']['without'])} without, "
            f"{mean(reaching['object']['with'])} with; on the background there: "
            f"{mean(reaching['background']['without'])} without, {mean(reaching['background']['with'])} "
            f"with; {reaching['n']} images",
            ours=True,
        ),
        decided(
            "It hides the object where the object reaches the border: the object's share of the "
            "whole map falls.",
            [effect(reaching["outside"]["removed"], sign=-1)],
            f"share outside the object: {mean(reaching['outside']['without'])} without, "
            f"{mean(reaching['outside']['with'])} with; {reaching['n']} images",
            ours=True,
        ),
        decided(
            "It lowers the share outside the object where the object does not reach the border.",
            [effect(metrics["objects"]["inside"]["outside"]["removed"])],
            f"{mean(metrics['objects']['inside']['outside']['without'])} without, "
            f"{mean(metrics['objects']['inside']['outside']['with'])} with; where it does: "
            f"{mean(reaching['outside']['without'])} without, {mean(reaching['outside']['with'])} with",
            ours=True,
        ),
    ]
