"""Grouped box plots, the most common figure of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rectgrad.experiments.colours import GREY, colour
from rectgrad.methods.catalog import METHODS, title_of

COLOURS = ("#3b6fb6", "#c9733a")


def boxes(
    axis: Any, names: Sequence[str], groups: Mapping[str, Sequence[dict[str, Any]]], label: str
) -> None:
    """Draws one box per name and group; `groups` maps the label of a group to the `spread` of each name.

    A box shows the quartiles, its line the median, its whiskers the 5th and 95th percentile, the cross the
    mean. Methods have their own colours, and their second group is lighter; other names are coloured by
    group.
    """
    width, methods = 0.8 / len(groups), all(name in METHODS for name in names)
    for i, (group, spreads) in enumerate(groups.items()):
        for k, (name, found) in enumerate(zip(names, spreads, strict=True)):
            shade = colour(name) if methods else COLOURS[i]
            _draw(axis, found, k + width * (i + 0.5) - 0.4, 0.85 * width, shade, 0.45 if methods and i else 1)
        axis.plot(
            [],
            [],
            "s",
            color=GREY if methods else COLOURS[i],
            alpha=0.45 if methods and i else 1,
            label=group,
        )
    rotated = {"rotation": 40, "ha": "right"} if len(names) > 4 else {}
    axis.set_xticks(range(len(names)), [title_of(n) if n in METHODS else n for n in names], **rotated)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_ylabel(label)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def _draw(axis: Any, found: dict[str, Any], at: float, width: float, shade: str, alpha: float) -> None:
    if "quartiles" not in found:
        return
    q1, median, q3 = found["quartiles"]
    low, high = found["whiskers"]
    axis.bxp(
        [{"q1": q1, "med": median, "q3": q3, "whislo": low, "whishi": high, "mean": found["mean"]}],
        positions=[at],
        widths=width,
        patch_artist=True,
        showfliers=False,
        showmeans=True,
        boxprops={"facecolor": shade, "edgecolor": "none", "alpha": alpha},
        medianprops={"color": "white"},
        meanprops={"marker": "x", "markeredgecolor": "#1c1d21", "markersize": 4},
        whiskerprops={"color": shade, "alpha": alpha},
        capprops={"color": shade, "alpha": alpha},
    )


def both(metrics: dict[str, Any], names: Sequence[str], key: str) -> dict[str, list[dict[str, Any]]]:
    """A measure of each method, without and with the final threshold."""
    kinds = {"no threshold": key, "with final threshold": f"{key}_thresholded"}
    return {label: [metrics[name][each] for name in names] for label, each in kinds.items()}
