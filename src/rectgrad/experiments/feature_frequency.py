"""How often units on the object and on the background are active: the question that the paper left open.

For each picture with a known mask and each convolution: the share of units above zero on the object, and on
the background. Over the pictures: the mean difference with a 95 % bootstrap interval, the paired effect size
d = mean / standard deviation of the differences, and p of a sign-flip test. The paper expects no difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad.experiments.bars import bars
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import spread

TITLE = "How often units are active on the object and on the background"
PRESETS = {"quick": {"each": 10}, "paper": {"each": 10}}
LAYERS = ("relu1", "relu2", "relu3", "relu4")
DRAWS = 10_000


def run(lab: Lab) -> dict[str, Any]:
    return lab.parts.part("all", lambda: _measured(lab))


def _measured(lab: Lab) -> dict[str, Any]:
    x, objects, _ = lab.masked(lab.numbers["each"])
    active = activations(lab.network, x.to(lab.device))
    return {f"conv{i + 1}": compared(*frequencies(active[name], objects)) for i, name in enumerate(LAYERS)}


@torch.no_grad()
def activations(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What comes out of each ReLU after a convolution."""
    found: dict[str, Tensor] = {}
    hooks = [
        getattr(module, name).register_forward_hook(lambda _, __, y, name=name: found.update({name: y.cpu()}))
        for name in LAYERS
    ]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def resized(masks: Tensor, side: int) -> Tensor:
    """Masks for a layer of lower resolution: true where at least half of a pixel's area is."""
    return F.avg_pool2d(masks.float().unsqueeze(1), masks.shape[-1] // side).squeeze(1) >= 0.5


def frequencies(activation: Tensor, objects: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """For each picture the share of active units on the object, and on the background."""
    where = resized(objects, activation.shape[-1])
    active = (activation > 0).float().mean(1)
    inside, outside = (active * w for w in (where, ~where))
    counts = where.flatten(1).sum(1), (~where).flatten(1).sum(1)
    shares = [_per_picture(part, n) for part, n in zip((inside, outside), counts, strict=True)]
    both = (counts[0] > 0) & (counts[1] > 0)
    return shares[0][both].numpy(), shares[1][both].numpy()


def _per_picture(values: Tensor, n: Tensor) -> Tensor:
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


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Figure]:
    """Shares of active units with quartiles, and the difference with its interval."""
    page = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = page.subplots(1, 2)
    where = {name: [found[name] for found in metrics.values()] for name in ("object", "background")}
    bars(left, list(metrics), where, "share of active units")
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
