"""Not in the paper: does a map depend on what the network learned?

Layers get fresh random weights, from the output downwards one more each time (cascading), and each layer
alone. A map that tells about the network must change: rank correlation, rank correlation of absolute
values and SSIM with the map of the trained network, for the class that this one predicts (Adebayo et al.,
2018). Later papers report weak sensitivity for RectGrad; what is true is in the numbers.
"""

from __future__ import annotations

import copy
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
from rectgrad.models.cifar import CifarCNN
from rectgrad.training import logits

TITLE = "Maps of networks with random weights (sanity checks)"
PRESETS = {"quick": {"images": 25, "draws": 1}, "paper": {"images": 500, "draws": 3}}
PAPER = "Not in the paper. Later papers report that RectGrad's maps depend only weakly on the weights."
CAPTIONS = {
    "": "How alike the maps of the trained network and of one with random layers are: rank correlation "
    "(upper row) and SSIM (lower row). Left: layers lose their weights one after the other from the output "
    "to the input. Right: each layer alone. A method passes where its curve falls to zero.",
}
LAYERS = ("dense2", "dense1", "conv4", "conv3", "conv2", "conv1")  # from the output
METHODS = (*COMPARED, "rectgrad_mod")
KINDS = ("cascading", "alone")
MEASURES = {"rank": "rank correlation", "rank_absolute": "rank correlation, absolute", "ssim": "SSIM"}


def randomised(module: nn.Module, layers: tuple[str, ...], seed: int) -> nn.Module:
    """A copy whose layers are as a fresh network has them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10_000 + seed)
        fresh = CifarCNN()
    changed = copy.deepcopy(module)
    for name in layers:
        getattr(changed, name).load_state_dict(getattr(fresh, name).state_dict())
    return changed.requires_grad_(False)


def run(lab: Lab) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    draws = range(lab.numbers["draws"])
    with lab.watch(len(METHODS) * len(draws), "sanity") as advance:
        for method in METHODS:
            found = []
            for draw in draws:
                found.append(lab.parts.part(f"{method} {draw}", partial(_measured, lab, method, draw)))
                advance()
            metrics[method] = {
                kind: {key: _joined([each[kind][key] for each in found]) for key in MEASURES}
                for kind in KINDS
            }
    return metrics


def _joined(draws: list[list[list[float]]]) -> list[dict[str, Any]]:
    """For each layer, over the pictures; a picture's value is the mean over draws of random weights."""
    found = []
    for layer in zip(*draws, strict=True):
        values = np.array(layer, dtype=np.float64)  # draws, pictures
        told = ~np.isnan(values)
        means = np.where(told, values, 0).sum(0) / np.where(told.any(0), told.sum(0), np.nan)
        each = [
            float(row[keep].mean()) if keep.any() else None for row, keep in zip(values, told, strict=True)
        ]
        found.append({**spread(means), "draws": each})
    return found


def _measured(lab: Lab, method: str, draw: int) -> dict[str, dict[str, list[list[float]]]]:
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
            after = comparison_map(randomised(lab.network, layers, draw), x, method, target)
            for key, values in _alike(before, after).items():
                found[kind][key].append(values.tolist())
    return found


def _alike(a: Tensor, b: Tensor) -> dict[str, Tensor]:
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
            said = "from the output up to" if kind == "cascading" else "alone:"
            note = f"{MEASURES[key]}, layers random {said} the one named."
            made.append(Table(["method", *LAYERS], rows, note))
    return made


def findings(metrics: dict[str, Any]) -> list[Finding]:
    said = {
        "rank": "RectGrad's maps depend less on the weights than saliency's: with all layers random they are "
        "more like the trained network's (rank correlation).",
        "rank_absolute": "They are more like them also where signs do not count (rank correlation of "
        "absolute values).",
        "ssim": "They are more like them also by SSIM (which is high between maps that share zeros).",
    }
    return [Finding(claim, *_less_sensitive(metrics, key)) for key, claim in said.items()]


def _less_sensitive(metrics: dict[str, Any], key: str) -> tuple[bool | None, str]:
    """By the intervals with all layers random: apart, or the numbers do not tell."""
    ends = {name: found["cascading"][key][-1] for name, found in metrics.items()}
    ours, theirs = (ends[name].get("interval", (-1.0, 1.0)) for name in ("rectgrad", "saliency"))
    told = True if ours[0] > theirs[1] else (False if ours[1] < theirs[0] else None)
    if len(ends["rectgrad"].get("draws", LAYERS)) < 2:
        told = None  # one random network is one random network
    ordered = sorted(ends, key=lambda name: -ends[name].get("mean", -1.0))
    values = ", ".join(f"{title_of(name)} {number(ends[name].get('mean', np.nan))}" for name in ordered)
    return told, f"{MEASURES[key]} with all layers random: {values}"
