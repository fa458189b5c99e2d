"""Appendix B: why the threshold applies to activation times gradient, on the paper's example of four units.

y = 1 a1 + 10 a2 - 100 a3 + 1000 a4 at a = (3, 2, 1, 0), q = 74: PR1 passes unit 2, PR2 unit 3, PR3 unit 1,
PR4 unit 4. Only unit 2 is evidence for y: unit 3 is the strongest evidence against it, unit 1 is active but
has a small weight, unit 4 has a large weight but is not active. Also compares RectGrad with RectGradMod (PR2
below the last layer) on images.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad import image
from rectgrad.api import attribute
from rectgrad.experiments import sheets
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import comparison_map, nan_where_zero
from rectgrad.experiments.statistics import difference, spread
from rectgrad.metrics import outside

TITLE = "What is compared with the threshold (Appendix B)"
PHOTOS = True
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"q": 74, "per_class": 10},
    "paper": {"q": 74, "per_class": 10},
}
PAPER = (
    "PR1 passes unit 2, PR2 unit 3, PR3 unit 1, PR4 unit 4. RectGradMod often misses the object or "
    "highlights the background."
)
CAPTIONS = {
    "photos": "RectGrad and RectGradMod, which compares the absolute score below the last layer. Check "
    "whether RectGradMod highlights the background.",
    "pictures": "RectGrad and RectGradMod on images of the dataset.",
}
WEIGHTS, ACTIVATIONS = (1.0, 10.0, -100.0, 1000.0), (3.0, 2.0, 1.0, 0.0)
UNITS = {"PR1": 2, "PR2": 3, "PR3": 1, "PR4": 4}  # in the paper


def run(lab: Lab) -> dict[str, Any]:
    units = {rule: lab.parts.part(rule, partial(_passed, rule, lab.numbers["q"])) for rule in UNITS}
    return {**units, "outside": lab.parts.part("outside", partial(_outside, lab))}


def _passed(rule: str, q: float) -> dict[str, Any]:
    weights, a = torch.tensor(WEIGHTS), torch.tensor([ACTIVATIONS])
    raw: dict[str, Any] = {"multiply_by_input": False, "positive_only": False, "padding_trick": False}
    map_ = attribute(lambda x: (F.relu(x) * weights).sum(1), a, "rectgrad", rule=rule, q=q, **raw)[0]
    return {
        "gradient": map_.tolist(),
        "units": [i + 1 for i, r in enumerate(map_.tolist()) if r],
        "paper": [UNITS[rule]],
    }


def _outside(lab: Lab) -> dict[str, Any]:
    """The share of attribution outside the object for RectGrad and RectGradMod."""
    x, objects, _ = lab.masked()
    shares = {
        name: np.array([_shares(comparison_map(m, x, name), objects) for m in lab.networks()])
        for name in ("rectgrad", "rectgrad_mod")
    }
    above = difference(shares["rectgrad_mod"], shares["rectgrad"])
    return {**{name: spread(values) for name, values in shares.items()}, "mod_above_rectgrad": above}


def _shares(maps: Tensor, objects: Tensor) -> list[float]:
    return nan_where_zero(outside(maps, objects, share=True), maps)


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    chosen = sheets.methods(("rectgrad", "rectgrad_mod"))
    x, _, images = lab.masked()
    shown = list(range(0, len(x), max(1, len(x) // 5)))[:5]
    pictures = [sheets.picture(images.pixels[row]) for row in shown]
    rows = sheets.rows(pictures, sheets.planes(lab.network, x[shown], chosen))
    drawn = {"pictures": image.sheet(rows, cell=sheets.CELL)}
    if lab.gallery:
        maps = sheets.planes(lab.gallery.model.module, lab.gallery.x[:4], chosen)
        rows = sheets.rows(lab.gallery.crops[:4], maps, lab.gallery.labels())
        drawn["photos"] = image.sheet(rows, cell=sheets.LARGE)
    return drawn


def tables(metrics: dict[str, Any]) -> list[Table]:
    units = [
        f"unit {i + 1}: w = {w:g}, a = {a:g}"
        for i, (w, a) in enumerate(zip(WEIGHTS, ACTIVATIONS, strict=True))
    ]
    rows = [
        [rule, *("passes" if i + 1 in metrics[rule]["units"] else "" for i in range(4)), f"unit {unit}"]
        for rule, unit in UNITS.items()
    ]
    outside_shares = metrics["outside"]
    shares = [
        [name, mean(outside_shares[key])]
        for name, key in (("RectGrad", "rectgrad"), ("RectGradMod", "rectgrad_mod"))
    ]
    return [
        Table(["rule", *units, "in the paper"], rows),
        Table(["", "share of attribution outside the object"], shares),
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    right = all(metrics[rule]["units"] == [unit] for rule, unit in UNITS.items())
    found = "; ".join(f"{rule}: unit {', '.join(map(str, metrics[rule]['units']))}" for rule in UNITS)
    above = metrics["outside"]["mod_above_rectgrad"]
    return [
        Finding("The four rules pass the same units as in the paper.", right, found),
        decided(
            "RectGradMod highlights the background more than RectGrad.",
            [effect(above)],
            f"share outside the object, paired difference {mean(above)}",
        ),
    ]
