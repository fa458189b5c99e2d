"""Table 1, Appendix F: ROAR and KAR. Networks are retrained on images without their most important pixels
(ROAR), or with only those (KAR). The map of a method defines the importance.

Removed pixels get the mean colour of the training set. If a method finds what matters, accuracy falls fast in
ROAR and stays high in KAR, so the area under ROAR's curve and the area over KAR's curve are low
(trapezoids over the fractions, divided by their range). Controls that are not in the paper:

    mask        networks see only which pixels were removed: how much their shape reveals about the class
    blurred     maps are blurred first
    ties        RectGrad marks only a part of the pixels; what orders the others is varied (default: noise)
    swapped     the removed regions of other pictures. ROAR: of any picture; they reveal nothing about the
                class, which helps the method less, so that a difference is what it found in the picture. KAR:
                of the same class; they reveal the class as much. Both make it harder for the method.
    samples     SmoothGrad and integrated gradients with fewer and more evaluations
    road        a measure without retraining, which leaks less (see `leak`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rectgrad.experiments import leak
from rectgrad.experiments.findings import methods
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.retraining import Cell, accuracies, method_of
from rectgrad.experiments.roar_kar_figures import MODES
from rectgrad.experiments.roar_kar_figures import draw as draw
from rectgrad.experiments.roar_kar_findings import findings as findings
from rectgrad.experiments.roar_kar_findings import tables as tables
from rectgrad.experiments.statistics import over_networks
from rectgrad.models.fingerprint import weights_digest

RAY = True
TITLE = "Remove and retrain, keep and retrain (Table 1, Appendix F)"
METHODS = [
    "random",
    "rectgrad",
    "rectgrad_prr",
    "rectgrad_gated",
    "saliency",
    "guided_backprop",
    "smoothgrad",
    "gradient_x_input",
    "integrated_gradients",
    "deeplift",
]
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "methods": ["random", "rectgrad", "saliency"],
        "fractions": [0.1, 0.5, 0.9],
        "seeds": 1,
        "retraining": {"pictures": 1_000, "epochs": 3},
        "blurred": [],
        "ties": [],
        "swapped": [],
        "samples": {},
        "road": 200,
    },
    "paper": {
        "methods": METHODS,
        "fractions": [0.1, 0.3, 0.5, 0.7, 0.9],
        "seeds": 3,
        "retraining": {"pictures": 50_000, "epochs": 20},
        "blurred": ["random", "rectgrad"],  # with all seeds; the others with one
        "ties": ["ties by gradient", "ties by distance"],
        "swapped": ["rectgrad", "rectgrad_gated", "gradient_x_input"],
        "samples": {"smoothgrad": [10, 200], "integrated_gradients": [10, 200]},
        "road": 1_000,
    },
}
PAPER = "RectGrad has the lowest area in both, in KAR by far."
CAPTIONS = {
    "": "Test accuracy after retraining, over the fraction of pixels removed (ROAR, left: lower is better) "
    "or kept (KAR, middle: higher is better); means over seeds, bars are 95 % intervals. Dashed: accuracy on "
    "unmodified images. Right: a control with networks that saw only which pixels were removed. Accuracy "
    "above chance (dotted) comes from the shape of the mask, not from the image.",
    "blurred": "The same with blurred maps (dashed) and the original maps (solid). If blurring improves a "
    "curve, the rank of the method says less about what it found.",
    "controls": "Areas, lower is better; bars are 95 % intervals over seeds. "
    "Left: what orders the pixels that RectGrad leaves at zero. Middle: the regions of other pictures. "
    "Right: the number of samples or steps.",
    "leak": "Each point is a method. First three: areas over the accuracy that the mask alone gives. Last: "
    "ROAR over ROAD. r is Spearman's correlation.",
}
SWAPS = {"roar": "any picture", "kar": "same class"}
UNMODIFIED = ("random", "roar", 0.0)  # method, mode, fraction


def cells(numbers: dict[str, Any]) -> list[Cell]:
    """The cells of the table, then those of the controls."""
    names, fractions, seeds = numbers["methods"], numbers["fractions"], range(numbers["seeds"])
    grid = [(method, fraction) for method in names for fraction in fractions]
    found = [Cell(m, mode, p, seed) for seed in seeds for mode in MODES for m, p in grid]
    found += [Cell(*UNMODIFIED, seed) for seed in seeds]
    found += [Cell(m, "mask", p, 0) for m, p in grid]
    found += [Cell(m, mode, p, 0, "blurred") for mode in MODES for m, p in grid]
    again = [(m, p) for m, p in grid if m in numbers["blurred"]]
    found += [Cell(m, mode, p, seed, "blurred") for seed in seeds[1:] for mode in MODES for m, p in again]
    found += [
        Cell("rectgrad", mode, p, seed, tie)
        for seed in seeds
        for tie in numbers["ties"]
        for mode in MODES
        for p in fractions
    ]
    found += [
        Cell(m, mode, p, seed, SWAPS[mode])
        for seed in seeds
        for m in numbers["swapped"]
        for mode in MODES
        for p in fractions
    ]
    more = [f"{name} {count}" for name, counts in numbers["samples"].items() for count in counts]
    return found + [Cell(name, "roar", p, seed) for seed in seeds for name in more for p in fractions]


def run(lab: Lab) -> dict[str, Any]:
    lab.parts.same("weights", weights_digest(lab.network))
    metrics = summarise(accuracies(lab, cells(lab.numbers)), lab.numbers)
    metrics["road"] = leak.measured(lab, lab.numbers["methods"])
    metrics["correlations"] = leak.correlations(columns(metrics))
    return metrics


# --- from accuracies to areas ------------------------------------------------------------------------------


def summarise(accuracies: Mapping[Cell, float], numbers: dict[str, Any]) -> dict[str, Any]:
    fractions, all_seeds = numbers["fractions"], range(numbers["seeds"])

    def curves(method: str, mode: str, variant: str = "") -> dict[str, Any]:
        """Accuracies and area, over the seeds that were trained."""
        seeds = [s for s in all_seeds if Cell(method, mode, fractions[0], s, variant) in accuracies]
        found = [[accuracies[Cell(method, mode, p, seed, variant)] for p in fractions] for seed in seeds]
        return {
            "accuracy": [over_networks(values) for values in zip(*found, strict=True)],
            "each": found,
            "area": over_networks([area(curve, fractions, mode) for curve in found]),
        }

    metrics: dict[str, Any] = {"fractions": fractions}
    metrics["unmodified"] = over_networks([accuracies[Cell(*UNMODIFIED, seed)] for seed in all_seeds])
    for method in numbers["methods"]:
        metrics[method] = {
            **{mode: {**curves(method, mode), "blurred": curves(method, mode, "blurred")} for mode in MODES},
            "mask": curves(method, "mask"),
        }
    ties = {tie: {mode: curves("rectgrad", mode, tie) for mode in MODES} for tie in numbers["ties"]}
    swapped = {m: {mode: curves(m, mode, SWAPS[mode]) for mode in MODES} for m in numbers["swapped"]}
    samples = {
        name: {str(count): {"roar": curves(f"{name} {count}", "roar")} for count in counts}
        for name, counts in numbers["samples"].items()
    }
    used = {
        f"{m} {n}": repr(method_of(f"{m} {n}")) for m, counts in numbers["samples"].items() for n in counts
    }
    return {**metrics, "ties": ties, "swapped": swapped, "samples": samples, "options": used}


def area(accuracy: Sequence[float], fractions: Sequence[float], mode: str) -> float:
    """The area under ROAR's curve or over KAR's: the mean accuracy or error over the fractions."""
    x, y = np.array(fractions), np.array(accuracy)
    under = float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / (x[-1] - x[0]))
    return 1 - under if mode == "kar" else under


def columns(metrics: dict[str, Any]) -> dict[str, list[float]]:
    """One value per method: the areas of ROAR, KAR and ROAD, and the mean accuracy from the mask alone."""
    names = methods(metrics)
    found = {mode: [metrics[m][mode]["area"]["mean"] for m in names] for mode in MODES}
    found["road"] = [metrics["road"][m]["most"]["mean"] for m in names]
    found["leak"] = [metrics[m]["mask"]["area"]["mean"] for m in names]
    return found
