"""Figure 8: how much attribution lies outside the object, and how rough maps are.

Paper: RectGrad is lowest in both. Amounts are in each method's own units; shares are what compares.
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from rectgrad.experiments.bars import bars, both
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, finally_thresholded, spread
from rectgrad.metrics import outside, total_variation

TITLE = "Attribution outside the object, and total variation (Figure 8)"
PRESETS = {"quick": {"each": 10, "images": 200}, "paper": {"each": 10, "images": 10_000}}
CHUNK = 1_000


def run(lab: Lab) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    with lab.watch(len(COMPARED), "noise-level") as advance:
        for method in COMPARED:
            metrics[method] = {**_outside(lab, method), **_roughness(lab, method)}
            advance()
    return metrics


def _outside(lab: Lab, method: str) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        x, objects, _ = lab.masked(lab.numbers["each"])
        maps = comparison_map(lab.network, x, method)
        cut = finally_thresholded(maps)
        return {
            "outside": spread(outside(maps, objects)),
            "outside_share": spread(outside(maps, objects, share=True)),
            "outside_thresholded": spread(outside(cut, objects)),
            "outside_share_thresholded": spread(outside(cut, objects, share=True)),
            "background": float((~objects).float().mean()),
        }

    return lab.parts.part(f"outside {method}", make)


def _roughness(lab: Lab, method: str) -> dict[str, Any]:
    x, _ = lab.test()
    plain, cut = [], []
    for i, rows in enumerate(x.split(CHUNK)):

        def make(rows: torch.Tensor = rows) -> dict[str, list[float]]:
            maps = comparison_map(lab.network, rows, method)
            rough = total_variation(maps, normalize=True)
            return {"plain": rough.tolist(), "cut": total_variation(finally_thresholded(maps), True).tolist()}

        found = lab.parts.part(f"roughness {method} {i}", make)
        plain += found["plain"]
        cut += found["cut"]
    return {"total_variation": spread(plain), "total_variation_thresholded": spread(cut)}


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Figure]:
    """Bars of shares outside the object and of roughness, with quartiles."""
    page = Figure(figsize=(11, 4.2), layout="constrained")
    axes = page.subplots(1, 2)
    bars(axes[0], COMPARED, both(metrics, COMPARED, "outside_share"), "share outside the object")
    rough = both(metrics, COMPARED, "total_variation")
    bars(axes[1], COMPARED, rough, "total variation of maps scaled to 1")
    axes[0].axhline(metrics[COMPARED[0]]["background"], color="grey", linestyle=":", label="area outside")
    axes[0].set_ylim(0, 1.3)
    axes[0].legend(frameon=False, ncols=3)
    return {"": page}
