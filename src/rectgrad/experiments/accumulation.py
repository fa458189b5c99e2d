"""Figure 7, Appendix A.2: does noise accumulate from the output to the input?

The attribution at a rectified layer is a * R before the rule, averaged over channels; at the input it is x *
R, summed over channels. Beside it we measure the gradient itself, the sum of |R| over channels, at the same
places. The measure is the share outside the object, over the images with masks. Its null is the share outside
the masks of other images with about the same area at that resolution: growth is measured beyond the growth of
the null, because masks of a lower resolution have slightly less background and attribution is not uniform.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from rectgrad import image
from rectgrad.api import attribute, layer_attributions, propagate
from rectgrad.experiments import sheets
from rectgrad.experiments.colours import colour, layer_name
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import nan_where_zero, shown
from rectgrad.experiments.statistics import difference, estimate
from rectgrad.experiments.units import resized
from rectgrad.methods.catalog import METHODS as ALL
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import outside

TITLE = "Noise accumulation from layer to layer (Figure 7, Appendix A.2)"
PHOTOS = True
PRESETS = {"quick": {"per_class": 10}, "paper": {"per_class": 10}}
PAPER = "For saliency, noise grows towards the input; RectGrad removes it at every layer."
CAPTIONS = {
    "": "Share outside the object, from the layer nearest to the output to the input, of activation times "
    "gradient (left) and of the absolute gradient (right); bands are 95 % intervals over networks and "
    "images. Dashed: the same maps and masks of other images of the same area, the null. A "
    "line that rises to the right more than its dashed line accumulates noise. Dotted: the background's "
    "share of the area.",
    "photos": "Attribution of photos at layers from the output (left) to the input (right), for saliency "
    "(upper row of each photo) and RectGrad (lower row).",
    "pictures": "Attribution of images of the dataset at layers of the CNN, from the output (left) to the "
    "input (right), for saliency (upper row of each image) and RectGrad (lower row).",
}
METHODS = ("saliency", "guided_backprop", "rectgrad", "rectgrad_prr")
QUANTITIES = {"product": "activation times gradient", "gradient": "absolute gradient"}
ALIKE = 5  # masks of other images with the nearest area
# Shown as gradient times input at the input, even if the map of the method is not multiplied by the input.
SHOWN = ("saliency", "rectgrad")


def run(lab: Lab) -> dict[str, Any]:
    return {method: _summary(_values(lab, method)) for method in METHODS}


def _values(lab: Lab, method: str) -> list[dict[str, Any]]:
    x, objects, _ = lab.masked()
    return [
        lab.parts.part(f"{method} {seed}", partial(_measure, module, x.to(lab.device), objects, method))
        for seed, module in zip(lab.seeds, lab.networks(), strict=True)
    ]


def _measure(module: nn.Module, x: Tensor, objects: Tensor, method: str) -> dict[str, Any]:
    planes = {"product": layers(module, x, method), "gradient": gradients(module, x, method)}
    return {
        key: {name: shares(plane.cpu(), objects) for name, plane in found.items()}
        for key, found in planes.items()
    }


def shares(plane: Tensor, objects: Tensor) -> dict[str, list[float]]:
    """One value per image: the share outside the object, outside masks of the same area, and the area."""
    where = resized(objects, plane.shape[-1])
    null = torch.stack([outside(plane, where[rows], share=True) for rows in alike(where)]).mean(0)
    return {
        "share": nan_where_zero(outside(plane, where, share=True), plane),
        "null": nan_where_zero(null, plane),
        "area": (~where).float().flatten(1).mean(1).tolist(),
    }


def alike(where: Tensor) -> Tensor:
    """(n, N): the images whose masks have the nearest areas, for each image, itself left out."""
    area = where.flatten(1).sum(1)
    gaps = (area[:, None] - area).abs().float().fill_diagonal_(torch.inf)
    return gaps.argsort(dim=1, stable=True)[:, : min(ALIKE, len(area) - 1)].T


def _summary(each: list[dict[str, Any]]) -> dict[str, Any]:
    """quantity -> the layers with share, null and area, and the growth beyond the null's."""
    found: dict[str, Any] = {}
    for key in QUANTITIES:
        values = {
            name: {k: np.array([one[key][name][k] for one in each], dtype=float) for k in about}
            for name, about in each[0][key].items()
        }
        last, first = next(iter(values)), list(values)[-1]
        beyond = {name: about["share"] - about["null"] for name, about in values.items()}
        found[key] = {
            "layers": {
                name: {
                    **estimate(about["share"]),
                    "null": estimate(about["null"]),
                    "area": float(about["area"].mean()),
                }
                for name, about in values.items()
            },
            "growth": {**difference(beyond[first], beyond[last]), "from": last, "to": first},
        }
    return found


def layers(module: Any, x: Tensor, method: str) -> dict[str, Tensor]:
    """(N, H, W) at each spatial layer, from the output to the input, including the input."""
    chosen = shown(method)
    found = {name: plane for name, plane in layer_attributions(module, x, chosen) if plane.dim() == 3}
    raw = attribute(module, x, chosen)
    product = raw if method.startswith("rectgrad") else raw * x
    return {**found, "input": product.sum(1)}


def gradients(module: nn.Module, x: Tensor, method: str) -> dict[str, Tensor]:
    """(N, H, W), the sum over channels of |R|, at the same places as `layers`."""
    x, outputs = x.clone().requires_grad_(), {}
    names = [name for name, layer in module.named_children() if isinstance(layer, nn.ReLU)]
    hooks = [
        getattr(module, name).register_forward_hook(lambda _, __, y, name=name: outputs.update({name: y}))
        for name in names
    ]
    try:
        with propagate(ALL[method].rules()), torch.enable_grad():
            scores = module(x)
            spatial = {name: y for name, y in reversed(outputs.items()) if y.dim() == 4}
            found = torch.autograd.grad(scores.amax(1).sum(), [*spatial.values(), x])
    finally:
        for hook in hooks:
            hook.remove()
    return {name: R.abs().sum(1) for name, R in zip([*spatial, "input"], found, strict=True)}


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(12, 4.4), layout="constrained")
    for axis, (key, title) in zip(page.subplots(1, 2, sharey=True), QUANTITIES.items(), strict=True):
        _curves(axis, metrics, key)
        axis.set_title(title)
    page.axes[0].set_ylabel("share outside the object")
    page.axes[0].legend(frameon=False, ncols=2, fontsize=8)
    x, _, images = lab.masked()
    rows = list(range(0, len(x), max(1, len(x) // 4)))[:4]
    pictures = [sheets.picture(images.pixels[row]) for row in rows]
    drawn: dict[str, Any] = {"": page, "pictures": _sheet(lab, lab.network, x[rows], pictures, sheets.CELL)}
    if lab.gallery:
        module, crops = lab.gallery.model.module, lab.gallery.crops[:4]
        drawn["photos"] = _sheet(lab, module, lab.gallery.x[:4], crops, sheets.CELL)
    return drawn


def _curves(axis: Any, metrics: dict[str, Any], key: str) -> None:
    for method, found in metrics.items():
        about = list(found[key]["layers"].values())
        names = [layer_name(name) for name in found[key]["layers"]]
        axis.plot(names, [a["mean"] for a in about], "o-", color=colour(method), label=title_of(method))
        low, high = np.array([a.get("interval", [a["mean"]] * 2) for a in about]).T
        axis.fill_between(range(len(names)), low, high, color=colour(method), alpha=0.2)
        axis.plot(names, [a["null"]["mean"] for a in about], "--", color=colour(method), linewidth=1)
    axis.plot(names, [a["area"] for a in about], ":", color="grey", label="background area")
    axis.set_ylim(0, 1)
    axis.spines[["top", "right"]].set_visible(False)


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
    name = layer_name(name)
    return name if len(name) < 16 else f"…{name[-14:]}"


def tables(metrics: dict[str, Any]) -> list[Table]:
    return [_table(metrics, key, title) for key, title in QUANTITIES.items()]


def _table(metrics: dict[str, Any], key: str, title: str) -> Table:
    names = list(metrics[METHODS[0]][key]["layers"])
    rows = []
    for method, found in metrics.items():
        about = [found[key]["layers"][name] for name in names]
        rows.append([title_of(method), *map(mean, about), mean(found[key]["growth"])])
        rows.append(["– masks of other images", *(mean(a["null"]) for a in about), ""])
    areas = metrics[METHODS[0]][key]["layers"]
    rows.append(["background's area", *(f"{areas[name]['area']:.3f}" for name in names), ""])
    head = [title, *map(layer_name, names), "growth beyond the null's"]
    return Table(head, rows, "From the output (left) to the input. Mean with its 95 % interval.")


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        _finding(f"For {name}, noise {moves} towards the input ({what}).", metrics[method], key, sign)
        for method, name, moves, sign in (
            ("saliency", "saliency", "grows", 1),
            ("rectgrad", "RectGrad", "falls", -1),
        )
        for key, what in (("product", "a * R, as in Figure 7"), ("gradient", "the gradient itself, |R|"))
    ]


def _finding(claim: str, found: dict[str, Any], key: str, sign: int) -> Finding:
    growth = found[key]["growth"]
    ends = [(layer_name(growth[end]), found[key]["layers"][growth[end]]) for end in ("from", "to")]
    shares = ", ".join(f"{mean(about)} at the {name} (null {mean(about['null'])})" for name, about in ends)
    because = f"share outside: {shares}; growth beyond the null's {mean(growth)}"
    return decided(claim, [effect(growth, sign=sign)], because, ours=key == "gradient")
