"""Repeats a measurement for every method and every network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from rectgrad.experiments.lab import Lab

Measure = Callable[[nn.Module, str], Mapping[str, Any]]


def measured(
    lab: Lab, modules: Sequence[nn.Module], methods: Sequence[str], measure: Measure, what: str
) -> dict[str, dict[str, np.ndarray]]:
    """method -> measure -> values (networks, images), from `measure(module, method)`. Every method and
    network is a part of its own."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with lab.progress(len(methods) * len(modules), f"{lab.experiment}, {what}") as advance:
        for method in methods:
            each = []
            for seed, module in zip(lab.seeds, modules, strict=True):
                each.append(lab.parts.part(f"{what} {method} {seed}", partial(measure, module, method)))
                advance()
            found[method] = {key: np.array([one[key] for one in each], dtype=np.float64) for key in each[0]}
    return found
