"""Table 1, Appendix F: ROAR and KAR. Networks are retrained on images without their most important pixels
(ROAR), or with only those (KAR). The map of a method defines the importance.

Removed pixels get the mean colour of the training set. If a method finds what matters, accuracy falls fast in
ROAR and stays high in KAR, so the area under ROAR's curve and the area over KAR's curve are low
(trapezoids over the fractions, divided by their range). There are two controls that are not in the paper:
networks that see only the mask of removed pixels (how much its shape reveals), and maps that are blurred
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad import many
from rectgrad.data import Images
from rectgrad.experiments.findings import Finding, Table, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.rankings import ranking
from rectgrad.experiments.statistics import spread
from rectgrad.methods.catalog import title_of
from rectgrad.training import Plan, deterministic

RAY = True
TITLE = "Remove and retrain, keep and retrain (Table 1, Appendix F)"
METHODS = [
    "random",
    "rectgrad",
    "rectgrad_prr",
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
    },
    "paper": {
        "methods": METHODS,
        "fractions": [0.1, 0.3, 0.5, 0.7, 0.9],
        "seeds": 3,
        "retraining": {"pictures": 50_000, "epochs": 20},
    },
}
PAPER = "RectGrad has the lowest area in both, in KAR by far."
PAPER_AREAS = {  # ROAR, KAR
    "random": (0.5562, 0.4438),
    "rectgrad": (0.5385, 0.3382),
    "saliency": (0.5568, 0.4455),
    "guided_backprop": (0.5504, 0.4270),
    "smoothgrad": (0.5536, 0.4444),
    "gradient_x_input": (0.5408, 0.4176),
    "integrated_gradients": (0.5428, 0.4185),
    "deeplift": (0.5519, 0.3928),
}
CAPTIONS = {
    "": "Test accuracy after retraining, over the fraction of pixels removed (ROAR, left: lower is better) "
    "or kept (KAR, middle: higher is better); means over seeds, bars are standard deviations. Right: a "
    "control with networks that saw only which pixels were removed. Accuracy above 0.1 there comes from the "
    "shape of the mask, not from the image.",
    "blurred": "The same with blurred maps (dashed) and the original maps (solid). If blurring improves a "
    "curve, the rank of the method says less about what it found.",
}
MODES = ("roar", "kar")


class Cell(NamedTuple):
    """One network to train. `mode` is roar, kar, or mask (only the mask is visible)."""

    method: str
    mode: str
    fraction: float
    seed: int
    blurred: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}{' blurred' * self.blurred} {self.method} {self.fraction} {self.seed}"

    def hidden(self, ranking: int) -> many.Hidden:
        """The pixels to hide: the most important ones for roar and mask, all others for kar."""
        most = round(self.fraction * 1024)
        low, high = (most, 1024) if self.mode == "kar" else (0, most)
        return many.Hidden(ranking, low, high, self.mode == "mask")


def cells(numbers: dict[str, Any]) -> list[Cell]:
    """The cells of the table, then those of the controls, with one seed each."""
    methods, fractions = numbers["methods"], numbers["fractions"]
    grid = [(method, fraction) for method in methods for fraction in fractions]
    main = [Cell(m, mode, p, seed) for seed in range(numbers["seeds"]) for mode in MODES for m, p in grid]
    masks = [Cell(m, "mask", p, 0) for m, p in grid]
    return main + masks + [Cell(m, mode, p, 0, True) for mode in MODES for m, p in grid]


def run(lab: Lab) -> dict[str, Any]:
    needed = cells(lab.numbers)
    known = {cell: lab.parts.known(cell.name) for cell in needed}
    missing = [cell for cell in needed if known[cell] is None]
    with lab.progress(len(missing), "roar-kar") as advance:
        for cell, accuracy in trained(lab, missing):
            known[cell] = lab.parts.keep(cell.name, accuracy)
            advance()
    return summarise(known, lab.numbers)


def trained(lab: Lab, missing: Sequence[Cell]) -> Iterator[tuple[Cell, float]]:
    """Yields cells with their accuracies as they complete."""
    if lab.engine == "ray":
        from rectgrad.experiments import ray_engine

        yield from ray_engine.trained(lab, missing)
        return
    sets = pictures(lab)
    for group in groups(lab, missing):
        orders = [_order(lab, sets, *kind) for kind in kinds(group)]
        yield from zip(group, train_group(sets, group, plan(lab), orders), strict=True)


def _order(lab: Lab, sets: tuple[Images, Images], method: str, blurred: bool) -> tuple[Tensor, Tensor]:
    """`ranked`, cached with the finished parts: for some methods it takes longer than training."""
    name = f"order{' blurred' * blurred} {method}"
    both = lab.parts.array(name, lambda: torch.cat(ranked(lab.network, sets, method, blurred)).numpy())
    first, second = torch.from_numpy(both).split([len(each) for each in sets])
    return first, second


def pictures(lab: Lab) -> tuple[Images, Images]:
    """The images for retraining, and the test images."""
    return lab.dataset.train.rows(slice(0, lab.numbers["retraining"]["pictures"])), lab.dataset.test


def plan(lab: Lab) -> Plan:
    return Plan(epochs=lab.numbers["retraining"]["epochs"], device=lab.device)


def groups(lab: Lab, missing: Sequence[Cell]) -> list[Sequence[Cell]]:
    """Groups of as many cells as the device trains at once."""
    size = many.at_once(lab.device)
    return [missing[start : start + size] for start in range(0, len(missing), size)]


def kinds(group: Sequence[Cell]) -> list[tuple[str, bool]]:
    """The maps that a group needs: (method, blurred)."""
    return list(dict.fromkeys((cell.method, cell.blurred) for cell in group))


def ranked(
    module: nn.Module, sets: tuple[Images, Images], method: str, blurred: bool
) -> tuple[Tensor, Tensor]:
    """The ranking of the pixels of the training and test images."""
    with many.fixed_threads(), deterministic():
        first, second = (
            ranking(module, images, method, blurred, seed) for seed, images in enumerate(sets, start=1)
        )
    return first, second


def train_group(
    sets: tuple[Images, Images], group: Sequence[Cell], plan: Plan, orders: Sequence[tuple[Tensor, Tensor]]
) -> list[float]:
    """The accuracy of each cell; `orders` has the rankings for each of `kinds(group)`."""
    hidden = [cell.hidden(kinds(group).index((cell.method, cell.blurred))) for cell in group]
    mean = torch.tensor(mean_colour(sets[0]))
    train, test = (
        many.Occluded(images, torch.stack(ranks), hidden, mean, plan.device)
        for images, ranks in zip(sets, zip(*orders, strict=True), strict=True)
    )
    with deterministic():
        return many.train(train, test, [cell.seed for cell in group], plan)


def mean_colour(images: Images) -> list[float]:
    """The mean of all pixels, scaled to -1..1."""
    return [float(v) for v in images.pixels.mean((0, 1, 2), dtype=np.float64) / 127.5 - 1]


# --- from accuracies to areas ------------------------------------------------------------------------------


def summarise(accuracies: dict[Cell, float], numbers: dict[str, Any]) -> dict[str, Any]:
    fractions, seeds = numbers["fractions"], range(numbers["seeds"])
    metrics: dict[str, Any] = {"fractions": fractions}
    for method in numbers["methods"]:
        found: dict[str, Any] = {}
        for mode in MODES:
            curves = [[accuracies[Cell(method, mode, p, seed)] for p in fractions] for seed in seeds]
            blurred = [accuracies[Cell(method, mode, p, 0, True)] for p in fractions]
            found[mode] = {
                "accuracy": [spread(values) for values in zip(*curves, strict=True)],
                "each": curves,
                "area": {**spread([area(curve, fractions, mode) for curve in curves])},
                "blurred": {"accuracy": blurred, "area": area(blurred, fractions, mode)},
            }
        found["mask"] = {"accuracy": [accuracies[Cell(method, "mask", p, 0)] for p in fractions]}
        metrics[method] = found
    return metrics


def area(accuracy: Sequence[float], fractions: Sequence[float], mode: str) -> float:
    """The area under ROAR's curve or over KAR's: the mean accuracy or error over the fractions."""
    x, y = np.array(fractions), np.array(accuracy)
    under = float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / (x[-1] - x[0]))
    return under if mode == "roar" else 1 - under


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    methods, x = [name for name in metrics if name in METHODS], metrics["fractions"]
    page = Figure(figsize=(14, 4.6), layout="constrained")
    axes = page.subplots(1, 3)
    for i, method in enumerate(methods):
        style = {
            "color": f"C{i}",
            "label": title_of(method),
            "linewidth": 2.2 if "rectgrad" in method else 1.2,
        }
        for axis, mode in zip(axes, MODES, strict=False):
            found = metrics[method][mode]["accuracy"]
            axis.errorbar(x, [f["mean"] for f in found], [f["std"] for f in found], capsize=2, **style)
        axes[2].plot(x, metrics[method]["mask"]["accuracy"], **style)
    titles = ("ROAR: important pixels removed", "KAR: important pixels kept", "control: mask only")
    _finish(axes, titles)
    axes[1].set_xlabel("fraction of pixels kept")
    page.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    blurred = Figure(figsize=(11, 4.6), layout="constrained")
    pair = blurred.subplots(1, 2)
    for i, method in enumerate(methods):
        for axis, mode in zip(pair, MODES, strict=True):
            found = metrics[method][mode]
            axis.plot(x, [f["mean"] for f in found["accuracy"]], color=f"C{i}", label=title_of(method))
            axis.plot(x, found["blurred"]["accuracy"], "--", color=f"C{i}")
    _finish(pair, titles)
    pair[1].set_xlabel("fraction of pixels kept")
    blurred.legend(*pair[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return {"": page, "blurred": blurred}


def _finish(axes: Any, titles: Sequence[str]) -> None:
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title)
        axis.set_xlabel("fraction of pixels removed")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy")


def tables(metrics: dict[str, Any]) -> list[Table]:
    methods, fractions = [name for name in metrics if name in METHODS], metrics["fractions"]
    areas = [
        [title_of(m), *(cell for i, mode in enumerate(MODES) for cell in _areas(metrics[m][mode], m, i))]
        for m in methods
    ]
    head = ["method", "ROAR AUC", "paper", "blurred", "KAR AOC", "paper", "blurred"]
    note = (
        "Lower is better in both. Mean and standard deviation over seeds; blurred: one seed. The paper does "
        "not state how it normalises areas: compare ranks and gaps, not the third digit."
    )
    made = [Table(head, areas, note)]
    for mode in (*MODES, "mask"):
        rows = [[title_of(m), *_accuracies(metrics[m][mode]["accuracy"])] for m in methods]
        action = "kept" if mode == "kar" else "removed"
        names = {"roar": "ROAR", "kar": "KAR", "mask": "mask only"}
        made.append(Table([f"{names[mode]}: accuracy", *(f"{p:g} {action}" for p in fractions)], rows))
    return made


def _areas(found: dict[str, Any], method: str, which: int) -> list[str]:
    """Our area, the paper's, and that of blurred maps."""
    paper = f"{PAPER_AREAS[method][which]:.4f}" if method in PAPER_AREAS else "–"
    ours = _with_spread(found["area"])
    return [ours, paper, f"{found['blurred']['area']:.4f}"]


def _accuracies(found: Sequence[Any]) -> list[str]:
    return [f"{f:.4f}" if isinstance(f, float) else _with_spread(f) for f in found]


def _with_spread(found: dict[str, Any]) -> str:
    return f"{found['mean']:.4f}" + (f" ± {found['std']:.4f}" if found["n"] > 1 else "")


def findings(metrics: dict[str, Any]) -> list[Finding]:
    methods = [name for name in metrics if name in METHODS]
    total = metrics["random"]["roar"]["area"]["mean"] + metrics["random"]["kar"]["area"]["mean"]
    masks = {m: max(metrics[m]["mask"]["accuracy"]) for m in methods}
    most = max(masks, key=masks.__getitem__)
    return [
        _lowest(metrics, methods, "roar", "RectGrad has the lowest ROAR area under the curve."),
        _lowest(metrics, methods, "kar", "RectGrad has the lowest KAR area over the curve."),
        Finding(
            "The shape of the removed region reveals nothing about the class (control).",
            masks[most] < 0.15,
            f"highest accuracy from the mask only: {_list(masks)}; chance is 0.1",
        ),
        Finding(
            "The two areas of the random baseline add up to 1, as expected (within 0.02).",
            abs(total - 1) < 0.02,
            f"their sum is {total:.4f}",
        ),
    ]


def _list(values: dict[str, float]) -> str:
    return ", ".join(
        f"{title_of(m)} {number(v)}" for m, v in sorted(values.items(), key=lambda item: -item[1])
    )


def _lowest(metrics: dict[str, Any], methods: Sequence[str], mode: str, claim: str) -> Finding:
    """RectGrad compared with the best other method except PRR. Inconclusive with fewer than three seeds, or
    if the 95 % interval of the difference includes zero (Student's t, four degrees of freedom)."""
    areas = {m: metrics[m][mode]["area"] for m in methods}
    other = min((m for m in methods if not m.startswith("rectgrad")), key=lambda m: areas[m]["mean"])
    ours, theirs = areas["rectgrad"], areas[other]
    gap, error = theirs["mean"] - ours["mean"], np.hypot(theirs["std"], ours["std"]) / ours["n"] ** 0.5
    holds = None if ours["n"] < 3 or abs(gap) < 2.78 * error else bool(gap > 0)
    ordered = sorted(methods, key=lambda m: areas[m]["mean"])
    return Finding(claim, holds, ", ".join(f"{title_of(m)} {areas[m]['mean']:.4f}" for m in ordered))
