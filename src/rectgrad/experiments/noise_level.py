"""Figure 8: attribution outside the object, and total variation of maps.

Amounts are in the units of each method; only shares are comparable. The total variation is that of maps whose
absolute values sum to 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments import matched
from rectgrad.experiments.boxes import both, boxes
from rectgrad.experiments.findings import Finding, Table, by_method, decided, order, others
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, nan_where_zero, with_final_threshold
from rectgrad.experiments.repeated import measured
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.metrics import outside, total_variation

TITLE = "Attribution outside the object, and total variation (Figure 8)"
PRESETS = {
    "quick": {"per_class": 10, "images": 200, "matched": 50},
    "paper": {"per_class": 10, "images": 10_000, "matched": 500},
}
PAPER = "RectGrad has the least attribution outside the object and the lowest total variation."
CAPTIONS = {
    "": "Left: share of absolute attribution outside the object, over the images with masks; the dotted "
    "line is the background's share of the area, the value of an uninformative map. Right: total variation "
    "of maps scaled to a sum of 1, over test images. In both, lower means less noise. Each method with its "
    "own post-processing, as in the paper.",
    "matched": "The same two measures with the same post-processing for every method in each row: dots are "
    "means, bars 95 % intervals over networks and images. Where RectGrad's dot is not the leftmost, its "
    "advantage in the figure above comes from its post-processing. A cut to the same Gini index makes edges, "
    "which raise the total variation of all maps but RectGrad's, which is hardly cut.",
}
EDGES = "; the cut makes edges in the other maps, which raises their total variation: before it, "


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    masked, objects, _ = lab.masked()
    networks, few = lab.networks(), x[: lab.numbers["matched"]]
    shares = spreads(measured(lab, networks, COMPARED, partial(_outside, masked, objects), "outside"))
    rough = spreads(measured(lab, networks, COMPARED, partial(_roughness, x), "roughness"))
    return {
        "background": float((~objects).float().mean()),
        "matched": {
            "outside": matched.measured(
                lab, networks, masked, lambda maps: outside(maps, objects, share=True), "outside"
            ),
            "total_variation": matched.measured(
                lab, networks, few, lambda maps: total_variation(maps, normalize=True), "total variation"
            ),
        },
        **{method: _joined(shares[method], rough[method]) for method in COMPARED},
    }


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    above = {base: found | second["above"][base] for base, found in first["above"].items()}
    return {**first, **second, "above": above}


def _outside(x: Tensor, objects: Tensor, module: nn.Module, method: str) -> dict[str, list[float]]:
    maps = comparison_map(module, x, method)
    cut = with_final_threshold(maps, method)
    return {
        "outside": outside(maps, objects).tolist(),
        "outside_share": nan_where_zero(outside(maps, objects, share=True), maps),
        "outside_thresholded": outside(cut, objects).tolist(),
        "outside_share_thresholded": nan_where_zero(outside(cut, objects, share=True), cut),
    }


def _roughness(x: Tensor, module: nn.Module, method: str) -> dict[str, list[float]]:
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
    axes[1].set_ylim(bottom=0)
    axes[0].legend(frameon=False, ncols=3)
    return {"": page, "matched": _matched(metrics)}


def _matched(metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = page.subplots(1, 2, sharey=True)
    matched.draw(left, metrics["matched"]["outside"], "share outside the object")
    matched.draw(right, metrics["matched"]["total_variation"], "total variation, maps scaled to 1")
    left.axvline(metrics["background"], color="grey", linestyle=":")
    right.invert_yaxis()
    matched.legend(page)
    return page


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
    note = (
        f"The background is {metrics['background']:.3f} of the area. Mean with its 95 % interval over "
        "networks and images."
    )
    found = metrics["matched"]
    return [
        by_method(metrics, shares, note),
        by_method(metrics, rough),
        matched.table(found["outside"], "share outside the object"),
        matched.table(found["total_variation"], "total variation"),
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    claims = {
        "outside_thresholded": "RectGrad has the smallest amount outside the object, in the units of each "
        "method and compared with thresholded baselines (the paper's measure).",
        "outside_share": "RectGrad has the smallest share of attribution outside the object.",
        "outside_share_thresholded": "Its share outside the object is also smaller than that of thresholded "
        "baselines.",
        "total_variation": "RectGrad has the lowest total variation.",
        "total_variation_thresholded": "Its total variation is also lower than that of thresholded "
        "baselines.",
    }
    found = [
        decided(claim, others(metrics, key), f"lowest: {order(metrics, key)}")
        for key, claim in claims.items()
    ]
    found += matched.findings(metrics["matched"]["outside"], "share outside the object")
    bare, full, cut = matched.findings(metrics["matched"]["total_variation"], "total variation")
    return [*found, bare, full, cut._replace(because=f"{cut.because}{EDGES}{full.because}")]
