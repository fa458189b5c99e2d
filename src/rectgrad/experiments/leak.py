"""ROAD beside ROAR and KAR: does the order of the methods survive when the shape of the removed region is
controlled for?

ROAD (Rong et al. 2022) fills removed pixels in from their neighbours and does not retrain, so that the shape
reveals little. Its area is the mean share of pictures that keep their class while pixels are removed, the
most important ones first; lower is better, as in ROAR and KAR. The leak of a method is the mean accuracy of
networks that see only the mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rectgrad.data import Images, scaled
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import comparison_map
from rectgrad.experiments.rankings import rankings
from rectgrad.experiments.statistics import over_networks, student_p
from rectgrad.metrics import rank_correlation, road
from rectgrad.training import deterministic


def measured(lab: Lab, methods: Sequence[str]) -> dict[str, Any]:
    """For each method: ROAD's areas over networks, most and least important pixels first, and the share of
    pixels that its maps order, those with a value other than zero."""
    images = lab.dataset.test.rows(slice(0, lab.numbers["road"]))
    found: dict[str, Any] = {}
    with lab.progress(len(lab.seeds) * len(methods), "ROAD") as advance:
        for method in methods:
            parts = []
            for seed, module in zip(lab.seeds, lab.networks(), strict=True):
                parts.append(lab.parts.part(f"road {method} {seed}", partial(_road, module, images, method)))
                advance()
            found[method] = {key: over_networks([each[key] for each in parts]) for key in parts[0]}
    return found


def _road(module: nn.Module, images: Images, method: str) -> dict[str, float]:
    device = next(module.parameters()).device
    x = scaled(images.pixels)
    with deterministic():
        (ranks,) = rankings(module, images, method)
        order = -ranks.reshape(-1, 1, 32, 32).float().to(device)
        most, least = (float(road(module, x.to(device), each).correct.mean()) for each in (order, -order))
        ordered = comparison_map(module, x, method).ne(0).float().mean()
    return {"most": most, "least": least, "difference": least - most, "ordered": float(ordered)}


def correlations(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Spearman's correlations over methods between the columns (roar, kar, road, leak), and the partial ones
    of ROAR and KAR with ROAD given the leak."""
    pairs = [("roar", "road"), ("kar", "road"), ("roar", "leak"), ("kar", "leak"), ("road", "leak")]
    n = len(values["roar"])
    r = {pair: _spearman(values[pair[0]], values[pair[1]]) for pair in pairs}
    found = {f"{a}, {b}": _tested(value, n, n - 2) for (a, b), value in r.items()}
    for mode in ("roar", "kar"):
        value = partial_correlation(r[mode, "road"], r[mode, "leak"], r["road", "leak"])
        found[f"{mode}, road given leak"] = _tested(value, n, n - 3)
    return found


def partial_correlation(xy: float, xz: float, yz: float) -> float:
    """The correlation of x and y given z."""
    rest = (1 - xz**2) * (1 - yz**2)
    return float(np.clip((xy - xz * yz) / rest**0.5, -1, 1)) if rest > 1e-12 else float("nan")


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    one, other = (torch.tensor([list(each)], dtype=torch.float64) for each in (a, b))
    return float(rank_correlation(one, other))


def _tested(r: float, n: int, df: int) -> dict[str, Any]:
    """A correlation of n ranks with its two-sided p: Student's t, but at least 2 / n!, the share of the equal
    and the opposite order among all orders. Three methods show nothing."""
    if df < 1 or not np.isfinite(r):
        return {"r": r if np.isfinite(r) else None, "p": None, "df": df}
    t = abs(r) * (df / max(1 - r**2, 1e-12)) ** 0.5
    return {"r": r, "p": max(student_p(t, df), 2 / math.factorial(n)), "df": df}
