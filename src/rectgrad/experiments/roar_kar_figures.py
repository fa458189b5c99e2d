"""The figures of ROAR and KAR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from rectgrad.experiments.colours import GREY, colour
from rectgrad.experiments.findings import methods
from rectgrad.experiments.lab import Lab
from rectgrad.methods.catalog import title_of

MODES = ("roar", "kar")
TITLES = ("ROAR: important pixels removed", "KAR: important pixels kept", "control: mask only")
AREAS = {"roar": "ROAR area", "kar": "KAR area", "road": "ROAD area"}


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    found = {"": _curves(metrics), "blurred": _blurred(metrics), "leak": _leak(metrics)}
    return found | ({"controls": _controls(metrics)} if metrics["ties"] else {})


def _curves(metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(14, 4.6), layout="constrained")
    axes = page.subplots(1, 3, sharey=True)
    for method in methods(metrics):
        style = {"linewidth": 2.2 if "rectgrad" in method else 1.2, "label": title_of(method)}
        for axis, mode in zip(axes, (*MODES, "mask"), strict=True):
            _line(axis, metrics["fractions"], metrics[method][mode]["accuracy"], colour(method), **style)
    _finish(page, axes, metrics)
    return page


def _blurred(metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(11, 4.6), layout="constrained")
    axes = page.subplots(1, 2, sharey=True)
    for method in methods(metrics):
        for axis, mode in zip(axes, MODES, strict=True):
            found, x = metrics[method][mode], metrics["fractions"]
            _line(axis, x, found["accuracy"], colour(method), label=title_of(method))
            _line(axis, x, found["blurred"]["accuracy"], colour(method), linestyle="--")
    _finish(page, axes, metrics)
    return page


def _line(axis: Any, x: Sequence[float], found: Sequence[Mapping[str, Any]], ink: str, **style: Any) -> None:
    axis.errorbar(x, [f["mean"] for f in found], [_reach(f) for f in found], color=ink, capsize=2, **style)


def _reach(found: Mapping[str, Any]) -> float:
    """Half of the 95 % interval; 0 if there is none."""
    return float(found["interval"][1] - found["mean"]) if "interval" in found else 0.0


def _finish(page: Figure, axes: Sequence[Any], metrics: dict[str, Any]) -> None:
    for axis, title in zip(axes, TITLES, strict=False):
        axis.set_title(title)
        axis.set_xlabel("fraction of pixels kept" if title is TITLES[1] else "fraction of pixels removed")
        axis.axhline(0.1, color=GREY, linestyle=":", linewidth=1)
        if title is not TITLES[2]:
            axis.axhline(metrics["unmodified"]["mean"], color=GREY, linestyle="--", linewidth=1)
        axis.set_ylim(0, None)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy")
    page.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)


def _controls(metrics: dict[str, Any]) -> Figure:
    """Areas of ROAR (filled) and KAR (open) with varied ties, other pictures' regions and more samples."""
    page = Figure(figsize=(14, 4.6), layout="constrained")
    axes = page.subplots(1, 3, sharey=True)
    base = metrics["rectgrad"]
    ties = [("noise", "rectgrad", base)] + [
        (k[8:], "rectgrad", found) for k, found in metrics["ties"].items()
    ]
    swapped = [
        (f"{title_of(m)}, {kind}", m, found)
        for m, other in metrics["swapped"].items()
        for kind, found in (("own", metrics[m]), ("others'", other))
    ]
    samples = [
        (f"{title_of(m)}, {count}", m, found)
        for m, counts in metrics["samples"].items()
        for count, found in sorted({**counts, "50": metrics[m]}.items(), key=lambda item: int(item[0]))
    ]
    titles = ("ties of RectGrad broken by", "regions of other pictures", "number of evaluations")
    for axis, title, rows in zip(axes, titles, (ties, swapped, samples), strict=True):
        for i, (_, method, found) in enumerate(rows):
            for mode, fill in zip(MODES, ("full", "none"), strict=True):
                if mode in found and not (rows is samples and mode == "kar"):
                    area = found[mode]["area"]
                    style = {"color": colour(method), "fmt": "o", "fillstyle": fill, "capsize": 2}
                    axis.errorbar([i], [area["mean"]], [_reach(area)], **style)
        axis.set_title(title)
        axis.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=40, ha="right")
        axis.set_xlim(-0.5, len(rows) - 0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("area (filled: ROAR, open: KAR)")
    return page


def _leak(metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(15, 4.2), layout="constrained")
    panels = [("leak", "roar"), ("leak", "kar"), ("leak", "road"), ("road", "roar")]
    for axis, (x, y) in zip(page.subplots(1, 4), panels, strict=True):
        for method in methods(metrics):
            at = _value(metrics, method, x), _value(metrics, method, y)
            axis.plot(*at, "o", color=colour(method), label=title_of(method))
        axis.set_xlabel(AREAS.get(x, "accuracy from the mask alone"))
        axis.set_ylabel(AREAS[y])
        r = metrics["correlations"][f"{y}, {x}"]["r"]
        axis.set_title("" if r is None else f"r = {r:.2f}")
        axis.spines[["top", "right"]].set_visible(False)
    page.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return page


def _value(metrics: dict[str, Any], method: str, key: str) -> float:
    if key == "road":
        return float(metrics["road"][method]["most"]["mean"])
    return float(metrics[method]["mask" if key == "leak" else key]["area"]["mean"])
