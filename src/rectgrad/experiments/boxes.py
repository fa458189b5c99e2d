"""Grouped box plots, the most common figure of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rectgrad.methods.catalog import METHODS, title_of

COLOURS = ("#3b6fb6", "#c9733a")


def boxes(
    axis: Any, names: Sequence[str], groups: Mapping[str, Sequence[dict[str, Any]]], label: str
) -> None:
    """Draws one box per name and group; `groups` maps the label of a group to the `spread` of each name.

    A box shows the quartiles, its line the median, its whiskers the 5th and 95th percentile, the cross the
    mean.
    """
    width = 0.8 / len(groups)
    for i, (group, spreads) in enumerate(groups.items()):
        at = [k + width * (i + 0.5) - 0.4 for k in range(len(names))]
        drawn = [_box(found) for found in spreads]
        kept = [(where, box) for where, box in zip(at, drawn, strict=True) if box is not None]
        axis.bxp(
            [box for _, box in kept],
            positions=[where for where, _ in kept],
            widths=0.85 * width,
            patch_artist=True,
            showfliers=False,
            showmeans=True,
            boxprops={"facecolor": COLOURS[i], "edgecolor": "none"},
            medianprops={"color": "white"},
            meanprops={"marker": "x", "markeredgecolor": "#1c1d21", "markersize": 4},
            whiskerprops={"color": COLOURS[i]},
            capprops={"color": COLOURS[i]},
        )
        axis.plot([], [], "s", color=COLOURS[i], label=group)
    rotated = {"rotation": 40, "ha": "right"} if len(names) > 4 else {}
    axis.set_xticks(
        range(len(names)), [title_of(name) if name in METHODS else name for name in names], **rotated
    )
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_ylabel(label)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def _box(found: dict[str, Any]) -> dict[str, float] | None:
    if "quartiles" not in found:
        return None
    q1, median, q3 = found["quartiles"]
    low, high = found["whiskers"]
    return {"q1": q1, "med": median, "q3": q3, "whislo": low, "whishi": high, "mean": found["mean"]}


def both(metrics: dict[str, Any], names: Sequence[str], key: str) -> dict[str, list[dict[str, Any]]]:
    """A measure of each method, without and with the final threshold."""
    kinds = {"no threshold": key, "with final threshold": f"{key}_thresholded"}
    return {label: [metrics[name][each] for name in names] for label, each in kinds.items()}
