"""Tables and findings of an experiment: which of the paper's claims the numbers support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rectgrad.methods.catalog import METHODS, title_of

Metrics = dict[str, Any]


class Finding(NamedTuple):
    """A claim of the paper (or of later papers), whether the numbers support it, and the numbers.

    `holds` is None if the numbers are inconclusive.
    """

    claim: str
    holds: bool | None
    because: str


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def number(value: float) -> str:
    """Three significant digits; one for values below 0.001."""
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"


def mean(found: Mapping[str, Any]) -> str:
    """A mean with its 95 % interval, or with its standard deviation if there are few values."""
    if not found["n"]:
        return "undefined"
    if "interval" not in found:
        return f"{number(found['mean'])} ± {number(found['std'])}"
    low, high = found["interval"]
    return f"{number(found['mean'])} [{number(low)}, {number(high)}]"


def methods(metrics: Metrics) -> list[str]:
    """The methods that were measured."""
    return [name for name in metrics if name in METHODS]


def by_method(metrics: Metrics, columns: Mapping[str, str], note: str = "") -> Table:
    """One row per method; `columns` maps the key of a spread to the title of its column. Columns that a
    record of an earlier version lacks are omitted."""
    names = methods(metrics)
    kept = [key for key in columns if all(key in metrics[name] for name in names)]
    rows = [[title_of(name), *(mean(metrics[name][key]) for key in kept)] for name in names]
    return Table(["method", *(columns[key] for key in kept)], rows, note)


def order(metrics: Metrics, key: str, first: int = 4) -> str:
    """The methods with the lowest mean of a measure, as text."""
    names = sorted(methods(metrics), key=lambda n: metrics[n][key]["mean"])
    return ", ".join(f"{title_of(n)} {number(metrics[n][key]['mean'])}" for n in names[:first])


def below(metrics: Metrics, key: str, method: str) -> bool | None:
    """Whether RectGrad's mean of a measure is below that of another method; None if the 95 % interval of the
    paired difference includes zero."""
    low, high = metrics[method]["above"][key].get("interval", (-1.0, 1.0))
    return None if low <= 0 <= high else low > 0


def below_all(metrics: Metrics, key: str, exclude: Sequence[str] = ()) -> bool | None:
    """Whether RectGrad's mean of a measure is below that of all other methods."""
    others = [name for name in methods(metrics) if name not in ("rectgrad", *exclude)]
    answers = [below(metrics, key, name) for name in others]
    return False if False in answers else (None if None in answers else True)


def least(metrics: Metrics, key: str, method: str) -> bool | None:
    """Whether a method has the lowest mean of a measure; None if 95 % intervals overlap."""
    low, high = metrics[method][key].get("interval", (-1.0, 1.0))
    others = [metrics[n][key].get("interval", (-1.0, 1.0)) for n in methods(metrics) if n != method]
    if any(other[1] < low for other in others):
        return False
    return True if all(other[0] > high for other in others) else None
