"""Figure 7, Appendix A.2: does noise accumulate from the output to the input?

The attribution at a rectified layer is a * R before the rule, averaged over channels; at the input it is x *
R, summed over channels. We measure the share of absolute attribution outside the object at each layer, over
the images with masks. Growth is measured relative to the background's share of the area at each resolution,
because masks of a lower resolution have slightly less background.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from rectgrad import image
from rectgrad.api import attribute, layer_attributions
from rectgrad.experiments import sheets
from rectgrad.experiments.findings import Finding, Table, mean
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import shown
from rectgrad.experiments.statistics import difference, spread
from rectgrad.experiments.units import resized
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import outside

TITLE = "Noise accumulation from layer to layer (Figure 7, Appendix A.2)"
PHOTOS = True
PRESETS = {"quick": {"per_class": 10}, "paper": {"per_class": 10}}
PAPER = "For saliency, noise grows towards the input; RectGrad removes it at every layer."
CAPTIONS = {
    "": "Share of attribution outside the object, from the layer nearest to the output to the input; bands "
    "are 95 % intervals. A line that rises to the right accumulates noise. The dotted line is the "
    "background's share of the area, the value of uniform attribution.",
    "photos": "Attribution of photos at layers from the output (left) to the input (right), for saliency "
    "(upper row of each photo) and RectGrad (lower row).",
    "pictures": "Attribution of images of the dataset at layers of the CNN, from the output (left) to the "
    "input (right), for saliency (upper row of each image) and RectGrad (lower row).",
}
METHODS = ("saliency", "guided_backprop", "rectgrad", "rectgrad_prr")
COLOURS = {
    "saliency": "#3b6fb6",
    "guided_backprop": "#5b8c5a",
    "rectgrad": "#c9733a",
    "rectgrad_prr": "#9b4f96",
}
# Shown as gradient times input at the input, even if the map of the method is not multiplied by the input.
SHOWN = ("saliency", "rectgrad")


def run(lab: Lab) -> dict[str, Any]:
    return {method: lab.parts.part(method, partial(_measure, lab, method)) for method in METHODS}


def _measure(lab: Lab, method: str) -> dict[str, Any]:
    x, objects, _ = lab.masked()
    planes = layers(lab.network, x.to(lab.device), method)
    values, areas = {}, {}
    for name, plane in planes.items():
        where = resized(objects, plane.shape[-1])
        values[name] = outside(plane.cpu(), where, share=True)
        areas[name] = (~where).float().flatten(1).mean(1)
    *_, first = values
    last = next(iter(values))
    return {
        "layers": {
            name: {**spread(found), "area": float(areas[name].mean())} for name, found in values.items()
        },
        "growth": {
            **difference(values[first] - areas[first], values[last] - areas[last]),
            "from": last,
            "to": first,
        },
    }


def layers(module: Any, x: Tensor, method: str) -> dict[str, Tensor]:
    """(N, H, W) at each spatial layer, from the output to the input, including the input."""
    chosen = shown(method)
    found = {name: plane for name, plane in layer_attributions(module, x, chosen) if plane.dim() == 3}
    raw = attribute(module, x, chosen)
    product = raw if method.startswith("rectgrad") else raw * x
    return {**found, "input": product.sum(1)}


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(7, 4), layout="constrained")
    axis = page.subplots()
    for method, found in metrics.items():
        names = list(found["layers"])
        about = [found["layers"][name] for name in names]
        axis.plot(names, [a["mean"] for a in about], "o-", color=COLOURS[method], label=title_of(method))
        low, high = np.array([a.get("interval", [a["mean"]] * 2) for a in about]).T
        axis.fill_between(range(len(names)), low, high, color=COLOURS[method], alpha=0.2)
    axis.plot(names, [a["area"] for a in about], ":", color="grey", label="background area")
    axis.set_ylabel("share outside the object")
    axis.set_ylim(0, 1)
    axis.legend(frameon=False, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)
    x, _, images = lab.masked()
    rows = list(range(0, len(x), max(1, len(x) // 4)))[:4]
    pictures = [sheets.picture(images.pixels[row]) for row in rows]
    drawn: dict[str, Any] = {"": page, "pictures": _sheet(lab, lab.network, x[rows], pictures, sheets.CELL)}
    if lab.gallery:
        module, crops = lab.gallery.model.module, lab.gallery.crops[:4]
        drawn["photos"] = _sheet(lab, module, lab.gallery.x[:4], crops, sheets.CELL)
    return drawn


def _sheet(
    lab: Lab, module: Any, x: Tensor, pictures: list[Image.Image], cell: int, count: int = 8
) -> Image.Image:
    found: list[list[image.Panel]] = [[] for _ in range(len(SHOWN) * len(pictures))]
    for k, method in enumerate(SHOWN):
        planes = layers(module, x.to(lab.device), method)
        step = max((len(planes) - 1) / (count - 1), 1)
        names = [list(planes)[round(i * step)] for i in range(min(count, len(planes)))]
        for row, picture in enumerate(pictures):
            panels = [
                image.Panel(
                    image.colour(planes[name][row].cpu().numpy(), "signed"), _short(name) if k == 0 else ""
                )
                for name in names
            ]
            first = image.Panel(picture, title_of(method), smooth=picture.width > 64)
            found[row * len(SHOWN) + k] = [first, *panels]
    return image.sheet(found, cell=cell)


def _short(name: str) -> str:
    return name if len(name) < 16 else f"…{name[-14:]}"


def tables(metrics: dict[str, Any]) -> list[Table]:
    names = list(metrics[METHODS[0]]["layers"])
    rows = [
        [title_of(method), *(mean(found["layers"][name]) for name in names), mean(found["growth"])]
        for method, found in metrics.items()
    ]
    rows.append(["area", *(f"{metrics[METHODS[0]]['layers'][name]['area']:.3f}" for name in names), ""])
    head = ["method", *names, "growth beyond the background's"]
    return [Table(head, rows, "From the output (left) to the input. Mean with its 95 % interval.")]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        _finding("For saliency, noise grows towards the input.", metrics["saliency"], True),
        _finding("For RectGrad, noise does not grow towards the input.", metrics["rectgrad"], False),
    ]


def _finding(claim: str, found: dict[str, Any], grows: bool) -> Finding:
    growth = found["growth"]
    low, high = growth.get("interval", (-1.0, 1.0))
    holds = None if low <= 0 <= high else (low > 0) == grows
    shares = (
        f"{mean(found['layers'][growth['from']])} at {growth['from']}, {mean(found['layers'][growth['to']])}"
    )
    return Finding(
        claim, holds, f"{shares} at the input; paired growth beyond the background's {mean(growth)}"
    )
