"""Figure 4: the effect of the percentile q. Shows maps of photos, and curves over q: sparsity, overlap with
q = 98, and for each layer tau and the share of scores that are exactly zero.

The overlap of two maps is the sum over pixels of the smaller share of attribution: 1 for equal maps, 0 for
maps on different pixels. tau is relative to the layer's largest score, so that layers are comparable. The
paper only speculates that tau is near 0 from q = 20 to 80.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad import image, ops
from rectgrad.api import attribute, layer_attributions
from rectgrad.engine.op import Op, Rule, Rules
from rectgrad.experiments import sheets
from rectgrad.experiments.colours import layer_name
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import comparison_map
from rectgrad.experiments.statistics import estimate, spread
from rectgrad.kernels.reference import percentile
from rectgrad.methods import RectGrad
from rectgrad.metrics import gini, zero_share
from rectgrad.rules.rectified import score

TITLE = "The percentile of the threshold (Figure 4)"
PHOTOS = True
LEVELS = [0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 85, 90, 95, 98, 99]
PRESETS = {"quick": {"images": 50, "q": LEVELS}, "paper": {"images": 200, "q": LEVELS}}
PAPER = (
    "Maps are incomprehensible at q = 0, hardly change from 20 to 80, and are sparse above 80; the authors "
    "speculate that tau is close to 0 from 20 to 80, because most activations are zero."
)
CAPTIONS = {
    "": "Means over images as a function of q: sparsity of the maps (first) and overlap with the map at "
    "q = 98 (second), for the CNN on the dataset and for the network of the photos; for each layer of the "
    "CNN, tau relative to the layer's largest score (third) and the share of scores that are exactly zero "
    "(fourth). q does not matter where a curve is flat; tau is zero where its curve meets the dotted line.",
    "photos": "RectGrad on photos: tau = 0 (guided backprop times input, except for the padding trick), then "
    "increasing q. Note where the map stops changing and where only parts of the object remain.",
    "pictures": "RectGrad on images of the dataset: tau = 0, then increasing q, as for photos.",
}
SHOWN = (0, 10, 20, 80, 90, 95, 99)
PHOTOS_MEASURED = 20
NEAR = 0.01  # of the largest score


@dataclass(frozen=True)
class Watching(RectGrad):
    """RectGrad that records tau and the share of zero scores at each rectified activation."""

    seen: Any = None  # a list, filled from the output to the input

    def rules(self) -> Rules:
        return {f: self._noting(r) if f in ops.RECTIFIERS else r for f, r in super().rules().items()}

    def _noting(self, rule: Rule) -> Rule:
        def noting(op: Op, R: Tensor) -> Any:
            rows = score(op, R).reshape(op.batch, -1)
            largest = rows.amax(1).clamp(min=1e-30)
            self.seen.append(
                ((percentile(rows, self.q) / largest).cpu(), (rows == 0).float().mean(1).cpu(), rows.shape[1])
            )
            return rule(op, R)

        return replace(rule, apply=noting)


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    metrics = {"cnn": _curves(lab, "cnn", lab.networks(), x, lab.numbers["q"])}
    if lab.gallery:
        photos = lab.gallery.x[:PHOTOS_MEASURED]
        metrics["photos"] = _curves(lab, "photos", [lab.gallery.model.module], photos, lab.numbers["q"])
    return metrics


def _curves(lab: Lab, what: str, modules: list[nn.Module], x: Tensor, levels: list[float]) -> dict[str, Any]:
    found = []
    with lab.progress(len(levels) * len(modules), f"threshold, {what}") as advance:
        for q in levels:
            each = []
            for i, module in enumerate(modules):
                each.append(lab.parts.part(f"{what} {q} {i}", partial(_measure, module, x, q)))
                advance()
            found.append({key: np.array([one[key] for one in each], dtype=float) for key in each[0]})
    names = lab.parts.part(f"{what} layers", partial(_layers, modules[0], x))
    about = {key: [spread(each[key]) for each in found] for key in ("gini", "zero_share", "overlap")}
    layers = {
        f"{i + 1} {name}": {
            "tau": [estimate(each["tau"][:, i]) for each in found],
            "zeros": [estimate(each["zeros"][:, i]) for each in found],
            "units": int(found[0]["units"][0, i]),
        }
        for i, name in enumerate(names)
    }
    kept = [lab.parts.part(f"{what} 20 to 80 {i}", partial(_kept, m, x)) for i, m in enumerate(modules)]
    overlap = spread(np.array(kept, dtype=float))
    return {"q": levels, **about, "overlap_20_80": overlap, "layers": layers, "n": len(x)}


def _kept(module: nn.Module, x: Tensor) -> list[float]:
    """The overlap of the maps at q = 20 and q = 80, for each image."""
    return overlap(*(comparison_map(module, x, RectGrad(q=q)) for q in (20, 80))).tolist()


def _layers(module: nn.Module, x: Tensor) -> list[str]:
    device = next(module.parameters()).device
    return [name for name, _ in layer_attributions(module, x[:1].to(device), "rectgrad")]


def _measure(module: nn.Module, x: Tensor, q: float, batch: int = 50) -> dict[str, Any]:
    device = next(module.parameters()).device
    maps, usual = [], []
    seen: list[list[Any]] = []
    for rows in x.split(batch):
        seen.append([])
        rows = rows.to(device)
        maps.append(attribute(module, rows, Watching(q=q, seen=seen[-1])).sum(1).cpu())
        usual.append(attribute(module, rows, "rectgrad").sum(1).cpu())
    found = torch.cat(maps)
    layers = list(zip(*seen, strict=True))
    return {
        "gini": gini(found).tolist(),
        "zero_share": zero_share(found).tolist(),
        "overlap": overlap(found, torch.cat(usual)).tolist(),
        "tau": [torch.cat([part[0] for part in layer]).tolist() for layer in layers],
        "zeros": [torch.cat([part[1] for part in layer]).tolist() for layer in layers],
        "units": [layer[0][2] for layer in layers],
    }


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Sum over pixels of the smaller share of attribution, for each pair of maps."""
    shares = [m.flatten(1).abs() / m.flatten(1).abs().sum(1, keepdim=True).clamp(min=1e-30) for m in (a, b)]
    return torch.minimum(*shares).sum(1)


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    x, images = lab.test()
    chosen = {"tau = 0": RectGrad(tau=0.0, positive_only=False)}
    chosen |= {f"q = {q}": RectGrad(q=q, positive_only=False) for q in SHOWN}
    pictures = [sheets.picture(pixels) for pixels in images.pixels[:4]]
    small = sheets.rows(pictures, sheets.planes(lab.network, x[:4], chosen))
    drawn: dict[str, Any] = {"": _curve_figure(metrics), "pictures": image.sheet(small, cell=sheets.CELL)}
    if lab.gallery:
        maps = sheets.planes(lab.gallery.model.module, lab.gallery.x[:4], chosen)
        rows = sheets.rows(lab.gallery.crops[:4], maps, lab.gallery.labels())
        drawn["photos"] = image.sheet(rows, cell=sheets.LARGE)
    return drawn


def _curve_figure(metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(14, 3.6), layout="constrained")
    axes = page.subplots(1, 4)
    for what, label in (("cnn", "CNN"), ("photos", "photos")):
        if what in metrics:
            found = metrics[what]
            axes[0].plot(found["q"], _means(found["gini"]), label=label)
            axes[1].plot(found["q"], _means(found["overlap"]), label=label)
    for key, layer in metrics["cnn"]["layers"].items():
        name = _in_words(key)
        axes[2].plot(metrics["cnn"]["q"], _means(layer["tau"]), label=name)
        axes[3].plot(metrics["cnn"]["q"], _means(layer["zeros"]), label=name)
    axes[2].axhline(0, color="grey", linestyle=":")
    axes[2].set_yscale("symlog", linthresh=1e-3)
    labels = ("Gini index of the map", "overlap with q = 98", "tau / largest score", "share of zero scores")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel("q")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    axes[2].legend(frameon=False, fontsize=7)
    return page


def _in_words(layer: str) -> str:
    """The name of a layer without its number."""
    return layer_name(layer.split(" ")[-1])


def _means(spreads: list[dict[str, Any]]) -> list[float]:
    return [found["mean"] for found in spreads]


def tables(metrics: dict[str, Any]) -> list[Table]:
    made = []
    for what, found in metrics.items():
        kept = [i for i, q in enumerate(found["q"]) if q in (0, 20, 50, 80, 90, 95, 98, 99)]
        head = [f"{what}, n = {found['n']}", *(f"q = {found['q'][i]}" for i in kept)]
        rows = [
            [title, *(number(found[key][i]["mean"]) for i in kept)]
            for key, title in (
                ("gini", "Gini index"),
                ("zero_share", "zero pixels"),
                ("overlap", "overlap with 98"),
            )
        ]
        layers = found["layers"] if len(found["layers"]) <= 8 else {}
        rows += [
            [f"tau / largest, {_in_words(name)}", *(number(v["tau"][i]["mean"]) for i in kept)]
            for name, v in layers.items()
        ]
        rows += [
            [f"zero scores, {_in_words(name)}", *(number(v["zeros"][i]["mean"]) for i in kept)]
            for name, v in layers.items()
        ]
        made.append(Table(head, rows, "Layers from the output to the input."))
    return made


def findings(metrics: dict[str, Any]) -> list[Finding]:
    found = []
    for what, about in metrics.items():
        at = {q: i for i, q in enumerate(about["q"])}
        sparse = _means(about["gini"])
        change, before, after = (abs(sparse[at[b]] - sparse[at[a]]) for a, b in ((20, 80), (0, 20), (80, 99)))
        found.append(
            decided(
                f"{what}: maps hardly change from q = 20 to 80 (overlap above 0.9).",
                [effect(about["overlap_20_80"], against=0.9)],
                f"overlap of the maps at 20 and 80: {mean(about['overlap_20_80'])}; the Gini index changes "
                f"by {number(before)} from 0 to 20, {number(change)} from 20 to 80, {number(after)} from "
                "80 to 99",
            )
        )
        middle = [at[q] for q in (20, 50, 80)]
        near = {
            name: max(abs(layer["tau"][i]["mean"]) for i in middle) for name, layer in about["layers"].items()
        }
        furthest = max(near, key=near.__getitem__)
        within = sum(value < NEAR for value in near.values())
        found.append(
            decided(
                f"{what}: tau is close to 0 from q = 20 to 80 (within 1 % of the layer's largest score).",
                [
                    effect(layer["tau"][i], against=-sign * NEAR, sign=sign)
                    for layer in about["layers"].values()
                    for i in middle
                    for sign in (1, -1)
                ],
                f"true of the means of {within} of {len(near)} layers; furthest: {_in_words(furthest)}, "
                f"{number(near[furthest])}",
            )
        )
    return found
