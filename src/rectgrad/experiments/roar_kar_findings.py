"""The tables and findings of ROAR and KAR, from their areas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rectgrad.experiments.findings import Effect, Finding, Table, decided, effect, methods, number
from rectgrad.experiments.roar_kar_figures import MODES
from rectgrad.experiments.statistics import gap
from rectgrad.methods.catalog import title_of

PAPER_AREAS = {  # ROAR, KAR
    "random": (0.5562, 0.4438),
    "rectgrad": (0.5385, 0.3382),
    "saliency": (0.5568, 0.4455),
    "guided_backprop": (0.5504, 0.4270),
    "smoothgrad": (0.5536, 0.4444),
    "gradient_x_input": (0.5408, 0.4176),
    "integrated_gradients": (0.5428, 0.4185),
    "deeplift": (0.5519, 0.3928),
}


def tables(metrics: dict[str, Any]) -> list[Table]:
    names, fractions = methods(metrics), metrics["fractions"]
    head = [
        "method",
        "ROAR AUC",
        "paper",
        "blurred",
        "KAR AOC",
        "paper",
        "blurred",
        "mask only",
        "ROAD",
        "ordered",
    ]
    note = (
        "Lower is better in ROAR, KAR and ROAD. Mean and 95 % interval over seeds; a value without an "
        "interval has one seed. Mask only: mean accuracy. Ordered: the share of pixels with a value other "
        "than zero. The paper does not state how it normalises areas: compare ranks and gaps, not the third "
        "digit."
    )
    made = [Table(head, [_row(metrics, m) for m in names], note), _controls(metrics), _correlations(metrics)]
    for mode in (*MODES, "mask"):
        rows = [[title_of(m), *map(_interval, metrics[m][mode]["accuracy"])] for m in names]
        action = "kept" if mode == "kar" else "removed"
        title = {"roar": "ROAR", "kar": "KAR", "mask": "mask only"}[mode]
        made.append(Table([f"{title}: accuracy", *(f"{p:g} {action}" for p in fractions)], rows))
    return made


def _row(metrics: dict[str, Any], m: str) -> list[str]:
    row = [title_of(m)]
    for i, mode in enumerate(MODES):
        found = metrics[m][mode]
        paper = f"{PAPER_AREAS[m][i]:.4f}" if m in PAPER_AREAS else "–"
        row += [_interval(found["area"]), paper, _interval(found["blurred"]["area"])]
    road = metrics["road"][m]
    return [
        *row,
        _interval(metrics[m]["mask"]["area"]),
        _interval(road["most"]),
        f"{road['ordered']['mean']:.2f}",
    ]


def _controls(metrics: dict[str, Any]) -> Table:
    """Ties, swapped regions and numbers of samples."""
    rows = [[f"RectGrad, {tie}", *_pair(found)] for tie, found in metrics["ties"].items()]
    for m, found in metrics["swapped"].items():
        rows.append([f"{title_of(m)}, regions of other pictures", *_pair(found)])
    for m, counts in metrics["samples"].items():
        rows += [[f"{title_of(m)}, {count} evaluations", *_pair(found)] for count, found in counts.items()]
    return Table(["control", "ROAR AUC", "KAR AOC"], rows, "Mean and 95 % interval over seeds.")


def _pair(found: Mapping[str, Any]) -> list[str]:
    return [_interval(found[mode]["area"]) if mode in found else "–" for mode in MODES]


def _correlations(metrics: dict[str, Any]) -> Table:
    rows = [[name, _r(found)] for name, found in metrics["correlations"].items()]
    note = "Spearman's correlation over methods; leak is the mean accuracy from the mask alone."
    return Table(["pair", "r"], rows, note)


def _r(found: Mapping[str, Any]) -> str:
    if found["r"] is None:
        return "undefined"
    return f"{found['r']:.2f}" + (f" (p = {number(found['p'])})" if found["p"] is not None else "")


def _interval(found: Mapping[str, Any]) -> str:
    if "interval" not in found:
        return f"{found['mean']:.4f}"
    return f"{found['mean']:.4f} [{found['interval'][0]:.4f}, {found['interval'][1]:.4f}]"


# --- findings ----------------------------------------------------------------------------------------------


def findings(metrics: dict[str, Any]) -> list[Finding]:
    names = methods(metrics)
    masks = {m: max(a["mean"] for a in metrics[m]["mask"]["accuracy"]) for m in names}
    total = sum(metrics["random"][mode]["area"]["mean"] for mode in MODES)
    found = [
        _lowest(metrics, "roar", "RectGrad has the lowest ROAR area under the curve."),
        _lowest(metrics, "kar", "RectGrad has the lowest KAR area over the curve."),
        Finding(
            "The shape of the removed region reveals nothing about the class (control).",
            max(masks.values()) < 0.15,
            f"highest accuracy from the mask only: {_list(masks)}; chance is 0.1",
            ours=True,
        ),
        Finding(
            "The two areas of the random baseline add up to 1, as expected (within 0.02).",
            abs(total - 1) < 0.02,
            f"their sum is {total:.4f}",
            ours=True,
        ),
    ]
    return found + [each for mode in MODES for each in _ours(metrics, mode)] + _agreement(metrics)


def _ours(metrics: dict[str, Any], mode: str) -> list[Finding]:
    """RectGrad against the controls."""
    name, base = mode.upper(), metrics["rectgrad"][mode]["area"]
    found = [
        _below(
            f"RectGrad has a lower {name} area than a blurred random map.",
            base,
            metrics["random"][mode]["blurred"]["area"],
        )
    ]
    if "rectgrad_gated" in metrics:
        gated = metrics["rectgrad_gated"][mode]["area"]
        found.append(_below(f"Class-gated RectGrad has a lower {name} area than RectGrad.", gated, base))
    regions = {"roar": "any other pictures", "kar": "other pictures of the same class"}[mode]
    for m, swapped in metrics["swapped"].items():
        claim = f"{title_of(m)} has a lower {name} area than with the regions of {regions}."
        found.append(_below(claim, metrics[m][mode]["area"], swapped[mode]["area"]))
    for tie, other in metrics["ties"].items():
        area = other[mode]["area"]
        claim = f"RectGrad's {name} area is lower with {tie} than with random ties."
        found.append(_below(claim, area, base))
    for m, counts in metrics["samples"].items() if mode == "roar" else ():
        for count, other in counts.items():
            usual = metrics[m][mode]["area"]
            way = "more" if int(count) > 50 else "fewer"
            claim = f"{title_of(m)} has a lower {name} area with {way} evaluations ({count} instead of 50)."
            found.append(_below(claim, other[mode]["area"], usual))
    return found


def _below(claim: str, area: Mapping[str, Any], other: Mapping[str, Any]) -> Finding:
    because = f"{_interval(area)} against {_interval(other)}"
    return decided(claim, [effect(gap(other, area))], because, ours=True)


def _lowest(metrics: dict[str, Any], mode: str, claim: str) -> Finding:
    """RectGrad compared with all other methods except its own variants."""
    areas = {m: metrics[m][mode]["area"] for m in methods(metrics)}
    others = [found for m, found in areas.items() if not m.startswith("rectgrad")]
    ordered = sorted(areas, key=lambda m: areas[m]["mean"])
    because = ", ".join(f"{title_of(m)} {areas[m]['mean']:.4f}" for m in ordered)
    return decided(claim, [effect(gap(other, areas["rectgrad"])) for other in others], because)


def _agreement(metrics: dict[str, Any]) -> list[Finding]:
    claims = {
        "roar, leak": "Methods whose masks reveal more about the class have a higher ROAR area.",
        "kar, leak": "Methods whose masks reveal more about the class have a lower KAR area.",
        "roar, road": "ROAR orders the methods as ROAD does.",
        "kar, road": "KAR orders the methods as ROAD does.",
        "roar, road given leak": "ROAR orders the methods as ROAD does, given what their masks reveal.",
        "kar, road given leak": "KAR orders the methods as ROAD does, given what their masks reveal.",
    }
    found = []
    for pair, claim in claims.items():
        about = metrics["correlations"][pair]
        sign = -1 if pair == "kar, leak" else 1
        because = f"Spearman's correlation over methods: {_r(about)}"
        found.append(decided(claim, [Effect(sign * (about["r"] or 0.0), about["p"])], because, ours=True))
    return found


def _list(values: dict[str, float]) -> str:
    return ", ".join(
        f"{title_of(m)} {number(v)}" for m, v in sorted(values.items(), key=lambda item: -item[1])
    )
