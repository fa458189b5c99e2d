"""Comparisons with the same post-processing for every method: what is the rule's doing, and what the
post-processing's?

A variant is a choice of four steps: times input, positive part, padding trick, and a cut to the Gini index
that RectGrad's own map has for that image. Every method gets the steps of the variant instead of its own.
Maps that contain the input already (integrated gradients, LRP, DeepLIFT) appear only in variants with "times
input" and are not multiplied again; LRP and DeepLIFT have their own rules for convolutions and do not take
the padding trick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor, nn

from rectgrad.experiments.colours import colour
from rectgrad.experiments.findings import Finding, Table, decided, effect, mean, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import channel_maps, comparison_map, nan_where_zero
from rectgrad.experiments.statistics import difference, estimate
from rectgrad.methods import IntegratedGradients, Method, SmoothGrad
from rectgrad.methods.catalog import METHODS, title_of
from rectgrad.metrics import gini, matching
from rectgrad.verdict.matched import HIGHEST, Matched, Padded, Steps, bare
from rectgrad.verdict.rows import is_gradient

COMPARED = (
    "saliency",
    "deconv",
    "guided_backprop",
    "smoothgrad",
    "integrated_gradients",
    "epsilon_lrp",
    "deeplift",
    "rectgrad",
)
VARIANTS = [Steps(*chosen) for chosen in product((False, True), repeat=4)]
STEPS = ("times input", "positive part", "padding trick", "same Gini index")
BARE, FULL, CUT = Steps(), Steps(True, True, True), Steps(True, True, True, True)


def name_of(steps: Steps) -> str:
    return ", ".join(word for word, used in zip(STEPS, steps, strict=True) if used) or "no post-processing"


def measured(
    lab: Lab, modules: Sequence[nn.Module], x: Tensor, measure: Callable[[Tensor], Tensor], what: str
) -> dict[str, Any]:
    """variant -> method -> the estimate of `measure`, and of its difference to RectGrad's value in the same
    variant, over networks and images."""
    values = np.stack(
        [
            lab.parts.array(f"matched {what} {seed}", partial(_values, lab, module, x, measure))
            for seed, module in zip(lab.seeds, modules, strict=True)
        ]
    )
    ours = values[:, :, COMPARED.index("rectgrad")]
    return {
        name_of(steps): {
            method: {**estimate(values[:, i, k]), "above": difference(values[:, i, k], ours[:, i])}
            for k, method in enumerate(COMPARED)
            if not np.isnan(values[:, i, k]).all()
        }
        for i, steps in enumerate(VARIANTS)
    }


def _values(lab: Lab, module: nn.Module, x: Tensor, measure: Callable[[Tensor], Tensor]) -> np.ndarray:
    """(variants, methods, images); NaN where a method does not take part or a map is zero."""
    found = np.full((len(VARIANTS), len(COMPARED), len(x)), np.nan, dtype=np.float32)
    sparse = gini(comparison_map(module, x, "rectgrad")).clamp(max=HIGHEST)
    with lab.progress(len(COMPARED), f"{lab.experiment}, matched") as advance:
        for k, method in enumerate(COMPARED):
            base = bare(METHODS[method])
            for padding in (False, True):
                maps = channel_maps(module, x, padded(base) if padding else base)
                for i, steps in enumerate(VARIANTS):
                    if steps.padding == padding and (steps.times_input or is_gradient(base)):
                        plane = processed(maps, x, steps, base, sparse)
                        found[i, k] = nan_where_zero(measure(plane), plane)
            advance()
    return found


def padded(base: Method) -> Method:
    """The method with the padding trick, if it has no rule of its own for convolutions."""
    if isinstance(base, (SmoothGrad, IntegratedGradients)):
        return replace(base, over=padded(base.over))
    return base if "conv" in base.rules() else Padded(base)


def processed(maps: Tensor, x: Tensor, steps: Steps, base: Method, sparse: Tensor) -> Tensor:
    """(N, H, W): the maps after the steps, summed over channels."""
    plane = Matched(base, steps.times_input and is_gradient(base), steps.positive).processed(maps, x).sum(1)
    return matching.cut_to_gini(plane, sparse) if steps.cut else plane


def draw(axis: Any, found: dict[str, Any], label: str) -> None:
    """One row per variant, one dot per method, with 95 % intervals."""
    for row, about in enumerate(found.values()):
        axis.axhline(row, color="#e3e3e6", linewidth=0.8, zorder=0)
        for method, value in about.items():
            low, high = value.get("interval", [value["mean"]] * 2)
            axis.plot([low, high], [row, row], color=colour(method), linewidth=2, alpha=0.5)
            size = 9 if method == "rectgrad" else 6
            axis.plot(value["mean"], row, "o", color=colour(method), markersize=size)
    axis.set_yticks(range(len(found)), list(found), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)


def legend(page: Any) -> None:
    from matplotlib.lines import Line2D

    dots = [Line2D([], [], color=colour(m), marker="o", linestyle="", label=title_of(m)) for m in COMPARED]
    page.legend(handles=dots, loc="outside lower center", ncols=4, frameon=False)


def table(found: dict[str, Any], title: str) -> Table:
    rows = [
        [name, *(mean(about[m]) if m in about else "–" for m in COMPARED)] for name, about in found.items()
    ]
    return Table([title, *map(title_of, COMPARED)], rows, "The same post-processing in each row.")


def findings(found: dict[str, Any], what: str) -> list[Finding]:
    claims = {
        BARE: f"Without any post-processing, RectGrad has the lowest {what} of all gradients.",
        FULL: f"With RectGrad's post-processing for every method, RectGrad has the lowest {what}.",
        CUT: f"With the same post-processing and cut to the same Gini index, RectGrad has the lowest {what}.",
    }
    return [_finding(found[name_of(steps)], claim) for steps, claim in claims.items()]


def _finding(about: dict[str, Any], claim: str) -> Finding:
    effects = [effect(value["above"]) for name, value in about.items() if name != "rectgrad"]
    ordered = sorted(about, key=lambda name: about[name]["mean"])
    numbers = ", ".join(f"{title_of(name)} {number(about[name]['mean'])}" for name in ordered)
    return decided(claim, effects, numbers, ours=True)
