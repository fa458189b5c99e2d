"""Figure 8: how much attribution lies outside the object, and how rough maps are.

Paper: RectGrad is lowest in both. Amounts are in each method's own units; shares are what compares.
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, amount, comparison_map, finally_thresholded, share, spread
from rectgrad.metrics import total_variation

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
            "outside": spread(amount(maps, ~objects)),
            "outside_share": spread(share(maps, ~objects)),
            "outside_thresholded": spread(amount(cut, ~objects)),
            "outside_share_thresholded": spread(share(cut, ~objects)),
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
    sides = {
        "outside_share": "share outside the object",
        "total_variation": "total variation of maps scaled to 1",
    }
    for axis, (key, label) in zip(axes, sides.items(), strict=True):
        for offset, suffix, colour in ((-0.2, "", "#3b6fb6"), (0.2, "_thresholded", "#c9733a")):
            quartiles = [metrics[method][key + suffix]["quartiles"] for method in COMPARED]
            low, median, high = (list(column) for column in zip(*quartiles, strict=True))
            error = [
                [m - a for m, a in zip(median, low, strict=True)],
                [b - m for m, b in zip(median, high, strict=True)],
            ]
            named = "with final threshold" if suffix else "as it is"
            axis.bar(
                [i + offset for i in range(len(COMPARED))],
                median,
                0.38,
                yerr=error,
                label=named,
                color=colour,
            )
        axis.set_xticks(
            range(len(COMPARED)), [m.replace("_", " ") for m in COMPARED], rotation=40, ha="right"
        )
        axis.set_ylabel(label)
    axes[0].axhline(metrics[COMPARED[0]]["background"], color="grey", linestyle=":", label="area outside")
    axes[0].set_ylim(0, 1.3)
    axes[0].legend(frameon=False, ncols=3)
    return {"": page}
