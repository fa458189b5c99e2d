"""Bars of medians with quartiles, two a name: what most of the experiments' figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COLOURS = ("#3b6fb6", "#c9733a")


def bars(axis: Any, names: Sequence[str], groups: Mapping[str, Sequence[dict[str, Any]]], label: str) -> None:
    """groups: what the bars of one colour are called -> the `spread` of each name."""
    for i, (group, spreads) in enumerate(groups.items()):
        low, median, high = np.array([found["quartiles"] for found in spreads]).T
        at = np.arange(len(names)) + 0.4 * i - 0.2
        axis.bar(at, median, 0.38, yerr=[median - low, high - median], label=group, color=COLOURS[i])
    turned = {"rotation": 40, "ha": "right"} if len(names) > 4 else {}
    axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], **turned)
    axis.set_ylabel(label)
    axis.margins(y=0.2)


def both(metrics: dict[str, Any], names: Sequence[str], key: str) -> dict[str, list[dict[str, Any]]]:
    """A measure of each method, without and with the final threshold."""
    kinds = {"as it is": key, "with final threshold": f"{key}_thresholded"}
    return {said: [metrics[name][each] for name in names] for said, each in kinds.items()}
