"""Sanity checks, not in the paper: does a map depend on what the network learned?

Layers are re-initialised one after the other from the output to the input (cascading), and each layer alone.
If a map explains the network, it must change. We measure rank correlation, rank correlation of absolute
values and SSIM with the map of the trained network, for the class that the trained network predicts (Adebayo
et al., 2018). Later papers report that RectGrad is not very sensitive.

Maps of one method have something in common whatever they explain, such as zeros in the same places. The floor
of each method is the similarity of its maps of unrelated images; methods are compared by what is beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.colours import colour, layer_name
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map
from rectgrad.experiments.repeated import measured
from rectgrad.experiments.statistics import difference, spread
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import rank_correlation, ssim, unrelated
from rectgrad.metrics.random_weights import randomised
from rectgrad.models.cifar import CifarCNN
from rectgrad.training import logits

TITLE = "Maps of networks with random weights (sanity checks)"
PRESETS = {"quick": {"images": 25}, "paper": {"images": 200}}
PAPER = "Not in the paper. Later papers report that RectGrad's maps depend only weakly on the weights."
CAPTIONS = {
    "": "Similarity of the maps of the trained network and of a network with randomised layers: rank "
    "correlation (upper row) and SSIM (lower row). Left: layers are randomised one after the other from the "
    "output to the input. Right: each layer alone. A method passes if its curve falls to "
    "the value for unrelated images (last column of the tables).",
}
LAYERS = ("dense2", "dense1", "conv4", "conv3", "conv2", "conv1")  # from the output to the input
METHODS = (*COMPARED, "rectgrad_mod")
KINDS = ("cascading", "alone")
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rank": rank_correlation,
    "rank_absolute": partial(rank_correlation, absolute=True),
    "ssim": ssim,
}
MEASURES = {"rank": "rank correlation", "rank_absolute": "rank correlation, absolute", "ssim": "SSIM"}


def reinitialised(module: nn.Module, layers: tuple[str, ...], seed: int) -> nn.Module:
    """A copy of the network with the named layers re-initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10_000 + seed)
        fresh = CifarCNN()
    return randomised(module, layers, fresh=fresh)


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    values = measured(lab, lab.networks(), METHODS, partial(_measure, lab, x), "similarity")
    metrics = {method: _summary(found) for method, found in values.items()}
    if {"rectgrad", "saliency"} <= set(values):
        ours, theirs = values["rectgrad"], values["saliency"]
        metrics["rectgrad"]["above saliency"] = {
            key: difference(beyond_floor(ours, key), beyond_floor(theirs, key)) for key in MEASURES
        }
    return metrics


def beyond_floor(values: dict[str, np.ndarray], key: str) -> np.ndarray:
    """(networks, images): the similarity with all layers randomised, minus that of unrelated images."""
    found: np.ndarray = values[f"cascading {key}"][:, -1] - values[f"floor {key}"]
    return found


def _summary(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """kind -> measure -> the spread at each layer; values are (networks, layers, images)."""
    return {
        kind: {key: [spread(v) for v in values[f"{kind} {key}"].swapaxes(0, 1)] for key in MEASURES}
        for kind in KINDS
    } | {"floor": {key: spread(values[f"floor {key}"]) for key in MEASURES}}


def _measure(lab: Lab, x: Tensor, module: nn.Module, method: str) -> dict[str, Any]:
    """For each kind and measure, one row of values per layer. Every network has its own random weights."""
    target = logits(module, x).argmax(1)
    before, draw = comparison_map(module, x, method, target), lab.networks().index(module)
    sets: dict[str, list[tuple[str, ...]]] = {
        "cascading": [LAYERS[: i + 1] for i in range(len(LAYERS))],
        "alone": [(name,) for name in LAYERS],
    }
    found: dict[str, Any] = {f"{kind} {key}": [] for kind in KINDS for key in MEASURES}
    for kind, chosen in sets.items():
        for layers in chosen:
            after = comparison_map(reinitialised(module, layers, draw), x, method, target)
            for key, values in _similarities(before, after).items():
                found[f"{kind} {key}"].append(values.tolist())
    floors = {f"floor {key}": unrelated(measure, before).tolist() for key, measure in COMPARISONS.items()}
    return found | floors


def _similarities(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {key: measure(a, b) for key, measure in COMPARISONS.items()}


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(12, 7), layout="constrained")
    axes = page.subplots(2, 2, sharey="row")
    styles = {name: ("-" if name.startswith("rectgrad") else "--") for name in metrics}
    for row, key in zip(axes, ("rank", "ssim"), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            for method, found in metrics.items():
                means = [each.get("mean", np.nan) for each in found[kind][key]]
                names = [layer_name(name) for name in LAYERS]
                axis.plot(
                    names, means, styles[method], marker=".", label=title_of(method), color=colour(method)
                )
            axis.axhline(0, color="grey", linestyle=":")
            axis.tick_params(axis="x", rotation=20)
            axis.set_title(f"{kind}, from the output" if kind == "cascading" else "each layer alone")
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(MEASURES[key])
    page.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return {"": page}


def tables(metrics: dict[str, Any]) -> list[Table]:
    made = []
    for kind in KINDS:
        for key in MEASURES:
            rows = [
                [title_of(method), *(mean(each) for each in found[kind][key]), mean(found["floor"][key])]
                for method, found in metrics.items()
            ]
            which = "the layers from the output to" if kind == "cascading" else "only"
            note = f"{MEASURES[key]}; {which} the named layer randomised."
            made.append(Table(["method", *map(layer_name, LAYERS), "unrelated images"], rows, note))
    return made


def findings(metrics: dict[str, Any]) -> list[Finding]:
    claims = {
        "rank": "RectGrad's maps depend less on the weights than saliency maps: with all layers randomised "
        "they are more similar to those of the trained network, beyond the similarity of unrelated images "
        "(rank correlation).",
        "rank_absolute": "They are also more similar if signs are ignored (rank correlation of absolute "
        "values).",
        "ssim": "They are also more similar by SSIM.",
    }
    return [
        decided(
            claim,
            [effect(metrics["rectgrad"]["above saliency"][key])],
            f"difference beyond unrelated images {mean(metrics['rectgrad']['above saliency'][key])}; "
            + _points(metrics, key),
            ours=True,
        )
        for key, claim in claims.items()
    ]


def _points(metrics: dict[str, Any], key: str) -> str:
    """All points of RectGrad's curve, its floor, and the last point of every method."""
    curve = metrics["rectgrad"]["cascading"][key]
    points = ", ".join(
        f"{number(each.get('mean', np.nan))} down to {layer_name(name)}"
        for name, each in zip(LAYERS, curve, strict=True)
    )
    ends = {name: found["cascading"][key][-1].get("mean", np.nan) for name, found in metrics.items()}
    ordered = sorted(ends, key=lambda name: -ends[name])
    return (
        f"RectGrad's {MEASURES[key]}, layers randomised from the output: {points}; unrelated images "
        f"{mean(metrics['rectgrad']['floor'][key])}, for saliency "
        f"{mean(metrics['saliency']['floor'][key])}; with all layers randomised: "
        + ", ".join(f"{title_of(name)} {number(ends[name])}" for name in ordered)
    )
