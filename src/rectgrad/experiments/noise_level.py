"""Figure 8: attribution outside the object, and total variation of maps.

Amounts are in the units of each method; only shares are comparable. The total variation is that of maps whose
absolute values sum to 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.boxes import both, boxes
from rectgrad.experiments.findings import Finding, Table, below_all, by_method, order
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, nan_where_zero, with_final_threshold
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.metrics import outside, total_variation

TITLE = "Attribution outside the object, and total variation (Figure 8)"
PRESETS = {"quick": {"per_class": 10, "images": 200}, "paper": {"per_class": 10, "images": 10_000}}
PAPER = "RectGrad has the least attribution outside the object and the lowest total variation."
CAPTIONS = {
    "": "Left: share of absolute attribution outside the object, over the images with masks; the dotted "
    "line is the background's share of the area, the value of an uninformative map. Right: total variation "
    "of maps scaled to a sum of 1, over the test images. In both, lower means less noise.",
}
CHUNK = 1_000


def run(lab: Lab) -> dict[str, Any]:
    chunks = lab.test()[0].split(CHUNK)
    shares: dict[str, dict[str, list[float]]] = {}
    rough: dict[str, dict[str, list[float]]] = {method: {} for method in COMPARED}
    with lab.progress(len(COMPARED) * len(chunks), "noise-level") as advance:
        for method in COMPARED:
            shares[method] = lab.parts.part(f"outside {method}", partial(_outside, lab, method))
            for i, x in enumerate(chunks):
                name, make = f"roughness {method} {i}", partial(_roughness, lab.network, x, method)
                for key, found in lab.parts.part(name, make).items():
                    rough[method].setdefault(key, []).extend(found)
                advance()
    area = lab.parts.part("background", lambda: float((~lab.masked()[1]).float().mean()))
    first, second = spreads(shares), spreads(rough)
    joined = {m: {**first[m], **second[m], "above": first[m]["above"] | second[m]["above"]} for m in first}
    return {"background": area, **joined}


def _outside(lab: Lab, method: str) -> dict[str, list[float]]:
    x, objects, _ = lab.masked()
    maps = comparison_map(lab.network, x, method)
    cut = with_final_threshold(maps, method)
    return {
        "outside": outside(maps, objects).tolist(),
        "outside_share": nan_where_zero(outside(maps, objects, share=True), maps),
        "outside_thresholded": outside(cut, objects).tolist(),
        "outside_share_thresholded": nan_where_zero(outside(cut, objects, share=True), cut),
    }


def _roughness(module: nn.Module, x: Tensor, method: str) -> dict[str, list[float]]:
    maps = comparison_map(module, x, method)
    cut = with_final_threshold(maps, method)
    return {
        "total_variation": nan_where_zero(total_variation(maps, normalize=True), maps),
        "total_variation_thresholded": nan_where_zero(total_variation(cut, normalize=True), cut),
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(12, 4.4), layout="constrained")
    axes = page.subplots(1, 2)
    boxes(axes[0], COMPARED, both(metrics, COMPARED, "outside_share"), "share outside the object")
    boxes(axes[1], COMPARED, both(metrics, COMPARED, "total_variation"), "total variation, maps scaled to 1")
    axes[0].axhline(metrics["background"], color="grey", linestyle=":", label="background area")
    axes[0].set_ylim(0, 1.2)
    axes[0].legend(frameon=False, ncols=3)
    return {"": page}


def tables(metrics: dict[str, Any]) -> list[Table]:
    cut = "with final threshold"
    shares = {
        "outside_share": "share outside the object",
        "outside_share_thresholded": f"share, {cut}",
        "outside": "amount (units of the method)",
        "outside_thresholded": f"amount, {cut}",
    }
    rough = {
        "total_variation": "total variation",
        "total_variation_thresholded": f"total variation, {cut}",
    }
    note = f"The background is {metrics['background']:.3f} of the area. Mean with its 95 % interval."
    return [by_method(metrics, shares, note), by_method(metrics, rough)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    claims = {
        "outside_thresholded": "RectGrad has the smallest amount outside the object, in the units of each "
        "method and compared with thresholded baselines (the paper's measure).",
        "outside_share": "RectGrad has the smallest share of attribution outside the object.",
        "outside_share_thresholded": "Its share is also smaller than that of thresholded baselines.",
        "total_variation": "RectGrad has the lowest total variation.",
        "total_variation_thresholded": "It is also lower than that of thresholded baselines.",
    }
    return [
        Finding(claim, below_all(metrics, key, ("rectgrad_prr",)), f"lowest: {order(metrics, key)}")
        for key, claim in claims.items()
    ]
