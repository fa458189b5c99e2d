"""Sanity checks, not in the paper: does a map depend on what the network learned?

Layers are re-initialised one after the other from the output to the input (cascading), and each layer alone.
If a map explains the network, it must change. We measure rank correlation, rank correlation of absolute
values and SSIM with the map of the trained network, for the class that the trained network predicts (Adebayo
et al., 2018). Later papers report that RectGrad is not very sensitive.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.findings import Finding, Table, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map
from rectgrad.experiments.statistics import spread
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import rank_correlation, ssim
from rectgrad.metrics.random_weights import randomised
from rectgrad.models.cifar import CifarCNN
from rectgrad.training import logits

TITLE = "Maps of networks with random weights (sanity checks)"
PRESETS = {"quick": {"images": 25, "draws": 1}, "paper": {"images": 500, "draws": 3}}
PAPER = "Not in the paper. Later papers report that RectGrad's maps depend only weakly on the weights."
CAPTIONS = {
    "": "Similarity of the maps of the trained network and of a network with randomised layers: rank "
    "correlation (upper row) and SSIM (lower row). Left: layers are randomised one after the other from the "
    "output to the input. Right: each layer alone. A method passes if its curve falls to zero.",
}
LAYERS = ("dense2", "dense1", "conv4", "conv3", "conv2", "conv1")  # from the output to the input
METHODS = (*COMPARED, "rectgrad_mod")
KINDS = ("cascading", "alone")
MEASURES = {"rank": "rank correlation", "rank_absolute": "rank correlation, absolute", "ssim": "SSIM"}


def reinitialised(module: nn.Module, layers: tuple[str, ...], seed: int) -> nn.Module:
    """A copy of the network with the named layers re-initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10_000 + seed)
        fresh = CifarCNN()
    return randomised(module, layers, fresh=fresh)


def run(lab: Lab) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    draws = range(lab.numbers["draws"])
    with lab.progress(len(METHODS) * len(draws), "sanity") as advance:
        for method in METHODS:
            found = []
            for draw in draws:
                found.append(lab.parts.part(f"{method} {draw}", partial(_measure, lab, method, draw)))
                advance()
            metrics[method] = {
                kind: {key: _combine([each[kind][key] for each in found]) for key in MEASURES}
                for kind in KINDS
            }
    return metrics


def _combine(draws: list[list[list[float]]]) -> list[dict[str, Any]]:
    """The spread over images for each layer; the value of an image is the mean over random draws."""
    found = []
    for layer in zip(*draws, strict=True):
        values = np.array(layer, dtype=np.float64)  # draws, images
        valid = ~np.isnan(values)
        means = np.where(valid, values, 0).sum(0) / np.where(valid.any(0), valid.sum(0), np.nan)
        each = [
            float(row[keep].mean()) if keep.any() else None for row, keep in zip(values, valid, strict=True)
        ]
        found.append({**spread(means), "draws": each})
    return found


def _measure(lab: Lab, method: str, draw: int) -> dict[str, dict[str, list[list[float]]]]:
    x, _ = lab.test()
    target = logits(lab.network, x).argmax(1)
    before = comparison_map(lab.network, x, method, target)
    sets: dict[str, list[tuple[str, ...]]] = {
        "cascading": [LAYERS[: i + 1] for i in range(len(LAYERS))],
        "alone": [(name,) for name in LAYERS],
    }
    found: dict[str, dict[str, list[list[float]]]] = {}
    for kind, chosen in sets.items():
        found[kind] = {key: [] for key in MEASURES}
        for layers in chosen:
            after = comparison_map(reinitialised(lab.network, layers, draw), x, method, target)
            for key, values in _similarities(before, after).items():
                found[kind][key].append(values.tolist())
    return found


def _similarities(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {
        "rank": rank_correlation(a, b),
        "rank_absolute": rank_correlation(a, b, absolute=True),
        "ssim": ssim(a, b),
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(12, 7), layout="constrained")
    axes = page.subplots(2, 2, sharey="row")
    styles = {name: ("-" if name.startswith("rectgrad") else "--") for name in metrics}
    for row, key in zip(axes, ("rank", "ssim"), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            for i, (method, found) in enumerate(metrics.items()):
                means = [each.get("mean", np.nan) for each in found[kind][key]]
                colour = f"C{i}" if i < 10 else "#1c1d21"
                axis.plot(LAYERS, means, styles[method], marker=".", label=title_of(method), color=colour)
            axis.axhline(0, color="grey", linestyle=":")
            axis.set_title(f"{kind}, from the output" if kind == "cascading" else "each layer alone")
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"{MEASURES[key]} with the trained network's map")
    page.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return {"": page}


def tables(metrics: dict[str, Any]) -> list[Table]:
    made = []
    for kind in KINDS:
        for key in MEASURES:
            rows = [
                [title_of(method), *(mean(each) for each in found[kind][key])]
                for method, found in metrics.items()
            ]
            which = "the layers from the output to" if kind == "cascading" else "only"
            note = f"{MEASURES[key]}; {which} the named layer randomised."
            made.append(Table(["method", *LAYERS], rows, note))
    return made


def findings(metrics: dict[str, Any]) -> list[Finding]:
    claims = {
        "rank": "RectGrad's maps depend less on the weights than saliency maps: with all layers randomised "
        "they are more similar to those of the trained network (rank correlation).",
        "rank_absolute": "They are also more similar if signs are ignored (rank correlation of absolute "
        "values).",
        "ssim": "They are also more similar by SSIM (which is high for maps that share zeros).",
    }
    return [Finding(claim, *_less_sensitive(metrics, key)) for key, claim in claims.items()]


def _less_sensitive(metrics: dict[str, Any], key: str) -> tuple[bool | None, str]:
    """Compares the values with all layers randomised; None (inconclusive) if the intervals overlap."""
    ends = {name: found["cascading"][key][-1] for name, found in metrics.items()}
    ours, theirs = (ends[name].get("interval", (-1.0, 1.0)) for name in ("rectgrad", "saliency"))
    holds = True if ours[0] > theirs[1] else (False if ours[1] < theirs[0] else None)
    if len(ends["rectgrad"].get("draws", LAYERS)) < 2:
        holds = None  # a single random network is not enough
    ordered = sorted(ends, key=lambda name: -ends[name].get("mean", -1.0))
    values = ", ".join(f"{title_of(name)} {number(ends[name].get('mean', np.nan))}" for name in ordered)
    return holds, f"{MEASURES[key]} with all layers randomised: {values}"
