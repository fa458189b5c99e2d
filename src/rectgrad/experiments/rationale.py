"""Appendix B: why the product of activation and gradient is compared, on the paper's example of four units.

y = 1 a1 + 10 a2 - 100 a3 + 1000 a4 at a = (3, 2, 1, 0), q = 74: PR1 passes unit 2, PR2 unit 3, PR3 unit 1,
PR4 unit 4. Only unit 2 is evidence: unit 3 is the strongest against, unit 1 is active and hardly counts, unit
4 counts much and is not active.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from rectgrad.experiments.lab import Lab
from rectgrad.records import attribute

TITLE = "What is compared with the threshold (Appendix B)"
PRESETS: dict[str, dict[str, Any]] = {"quick": {"q": 74}, "paper": {"q": 74}}
WEIGHTS, ACTIVATIONS = (1.0, 10.0, -100.0, 1000.0), (3.0, 2.0, 1.0, 0.0)
PAPER = {"PR1": 2, "PR2": 3, "PR3": 1, "PR4": 4}


def run(lab: Lab) -> dict[str, Any]:
    return {rule: lab.parts.part(rule, partial(_passed, rule, lab.numbers["q"])) for rule in PAPER}


def _passed(rule: str, q: float) -> dict[str, Any]:
    weights, a = torch.tensor(WEIGHTS), torch.tensor([ACTIVATIONS])
    raw: dict[str, Any] = {"multiply_by_input": False, "positive_only": False, "padding_trick": False}
    map_ = attribute(lambda x: (F.relu(x) * weights).sum(1), a, "rectgrad", rule=rule, q=q, **raw)[0]
    return {
        "gradient": map_.tolist(),
        "units": [i + 1 for i, r in enumerate(map_.tolist()) if r],
        "paper": [PAPER[rule]],
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Figure]:
    page = Figure(figsize=(7, 2.6), layout="constrained")
    axis = page.subplots()
    axis.axis("off")
    rows = [
        [rule, *("passes" if i + 1 in found["units"] else "" for i in range(4))]
        for rule, found in metrics.items()
    ]
    units = [
        f"unit {i + 1}\nw = {w:g}, a = {a:g}"
        for i, (w, a) in enumerate(zip(WEIGHTS, ACTIVATIONS, strict=True))
    ]
    table = axis.table(rows, colLabels=["", *units], loc="center", cellLoc="center")
    table.scale(1, 1.9)
    return {"": page}
