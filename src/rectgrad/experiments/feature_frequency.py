"""How often units are active on the object and on the background, which the paper left as future work.

For each image with a mask and each convolution we measure the share of units above zero on the object and on
the background. Over the images we report the mean difference with a 95 % bootstrap interval, the paired
effect size d = mean / standard deviation of the differences, and p of a sign-flip test. The paper expects no
difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from rectgrad.experiments.boxes import boxes
from rectgrad.experiments.findings import Finding, Table, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.statistics import FEW, spread
from rectgrad.experiments.units import activations, resized

TITLE = "How often units are active on the object and on the background"
PRESETS = {"quick": {"per_class": 10}, "paper": {"per_class": 10}}
PAPER = (
    "Left as future work. Judging by feature maps, the paper expects units to be active as often on the "
    "background as on the object."
)
CAPTIONS = {
    "": "Left: share of active units on the object and on the background, over the images with masks. "
    "Right: the paired difference per layer with its 95 % interval and effect size d (about 0.2 is small, "
    "0.5 medium, 0.8 large). An interval that excludes the dotted line is a difference."
}
DRAWS = 10_000


def run(lab: Lab) -> dict[str, Any]:
    return lab.parts.part("all", lambda: _measure(lab))


def _measure(lab: Lab) -> dict[str, Any]:
    x, objects, _ = lab.masked()
    active = activations(lab.network, x.to(lab.device))
    return {name: compared(*frequencies(each, objects)) for name, each in active.items()}


def frequencies(activation: Tensor, objects: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The share of active units on the object and on the background, for each image."""
    where = resized(objects, activation.shape[-1])
    active = (activation > 0).float().mean(1)
    inside, outside = (active * w for w in (where, ~where))
    counts = where.flatten(1).sum(1), (~where).flatten(1).sum(1)
    shares = [_per_image(part, n) for part, n in zip((inside, outside), counts, strict=True)]
    both = (counts[0] > 0) & (counts[1] > 0)
    return shares[0][both].numpy(), shares[1][both].numpy()


def _per_image(values: Tensor, n: Tensor) -> Tensor:
    return values.flatten(1).sum(1) / n.clamp(min=1)


def compared(inside: np.ndarray, outside: np.ndarray) -> dict[str, Any]:
    difference = (inside - outside).astype(np.float64)
    rng = np.random.default_rng(0)
    n, mean = len(difference), difference.mean()
    means = difference[rng.integers(0, n, (DRAWS, n))].mean(1)
    flipped = (rng.choice((-1.0, 1.0), (DRAWS, n)) * difference).mean(1)
    deviation = difference.std(ddof=1)
    return {
        "object": spread(inside),
        "background": spread(outside),
        "difference": float(mean),
        "interval": [float(q) for q in np.percentile(means, (2.5, 97.5))],
        "effect": float(mean / deviation) if deviation else 0.0,
        "p": float((1 + (np.abs(flipped) >= abs(mean)).sum()) / (1 + DRAWS)),
        "n": n,
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = page.subplots(1, 2)
    where = {name: [found[name] for found in metrics.values()] for name in ("object", "background")}
    boxes(left, list(metrics), where, "share of active units")
    left.legend(frameon=False, ncols=2)
    for i, found in enumerate(metrics.values()):
        low, high = found["interval"]
        right.plot([i, i], [low, high], color="#333333")
        right.plot(i, found["difference"], "o", color="#333333")
        right.annotate(f"d = {found['effect']:.2f}", (i, high), ha="center", va="bottom", fontsize=8)
    right.axhline(0, color="grey", linestyle=":")
    right.set_xticks(range(len(metrics)), list(metrics))
    right.set_xlim(-0.5, len(metrics) - 0.5)
    right.margins(y=0.15)
    right.set_ylabel("object minus background, 95 % interval")
    return {"": page}


def tables(metrics: dict[str, Any]) -> list[Table]:
    head = ["layer", "active on the object", "on the background", "difference, 95 % interval", "d", "p", "n"]
    rows = [
        [
            name,
            mean(found["object"]),
            mean(found["background"]),
            _difference(found),
            f"{found['effect']:.2f}",
            _p(found),
            str(found["n"]),
        ]
        for name, found in metrics.items()
    ]
    return [Table(head, rows, "d is the paired effect size, p that of a sign-flip test with 10,000 draws.")]


def _p(found: dict[str, Any]) -> str:
    return "< 0.001" if found["p"] < 0.001 else f"= {found['p']:.3f}"


def _difference(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{number(found['difference'])} [{number(low)}, {number(high)}]"


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        Finding(
            f"In {name}, units are active as often on the background as on the object.",
            _as_often(found),
            f"difference {_difference(found)}, d = {found['effect']:.2f}, p {_p(found)}",
        )
        for name, found in metrics.items()
    ]


def _as_often(found: dict[str, Any]) -> bool | None:
    """False if the interval excludes zero, True if it is within 0.02 of zero, else None (inconclusive)."""
    low, high = found["interval"]
    if found["n"] < FEW:
        return None
    if low > 0 or high < 0:
        return False
    return True if max(-low, high) < 0.02 else None
