"""Tables and findings of an experiment: which of the paper's claims the numbers support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rectgrad.experiments.statistics import p_value
from rectgrad.methods.catalog import METHODS, title_of
from rectgrad.metrics.statistics import holm

Metrics = dict[str, Any]
ALPHA = 0.05
VERDICTS = {True: "holds", False: "does not hold", None: "inconclusive"}


class Finding(NamedTuple):
    """A claim of the paper (or of later papers), whether the numbers support it, and the numbers.

    `holds` is None if the numbers are inconclusive. `p` is that of the test that decides; None for a claim
    that is true or false without a test, such as an equality. `ours`: a claim that the paper does not make.
    """

    claim: str
    holds: bool | None
    because: str
    p: float | None = None
    ours: bool = False


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Effect(NamedTuple):
    """An estimate as evidence for a claim: positive means support it. p is None with fewer than two networks,
    which is not enough for a claim about a method."""

    mean: float
    p: float | None


def effect(found: Mapping[str, Any], against: float = 0.0, sign: int = 1) -> Effect:
    """The evidence that a mean is above a value; with sign = -1, that it is below."""
    if "error" not in found or found.get("networks", 1) < 2:
        return Effect(sign * (found.get("mean", against) - against), None)
    return Effect(sign * (found["mean"] - against), p_value(found, against))


def decided(claim: str, effects: Iterable[Effect], because: str, ours: bool = False) -> Finding:
    """The claim that all effects are positive.

    It holds if all are, with the largest of their p (intersection-union test). It does not hold if one is
    negative, with the smallest p of the negative ones times the number of effects (Bonferroni). Inconclusive
    if p is 0.05 or more.
    """
    found = list(effects)
    known = [(each.mean, each.p) for each in found if each.p is not None]
    if not known or len(known) < len(found):
        return Finding(claim, None, because, None, ours)
    negative = [p for mean, p in known if mean <= 0]
    p = min(min(negative) * len(known), 1.0) if negative else max(p for _, p in known)
    return Finding(claim, not negative if p < ALPHA else None, because, p, ours)


def corrected(found: Sequence[Finding]) -> list[Finding]:
    """The findings of a report with Holm's correction of their p: what is no longer below 0.05 becomes
    inconclusive."""
    given = [each.p for each in found if each.p is not None]
    adjusted = iter(holm(given).tolist() if given else ())
    return [each if each.p is None else _with_p(each, next(adjusted)) for each in found]


def _with_p(found: Finding, p: float) -> Finding:
    return found._replace(p=p, holds=found.holds if p < ALPHA else None)


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
    """One row per method; `columns` maps the key of a spread to the title of its column."""
    rows = [[title_of(name), *(mean(metrics[name][key]) for key in columns)] for name in methods(metrics)]
    return Table(["method", *columns.values()], rows, note)


def order(metrics: Metrics, key: str, first: int = 4) -> str:
    """The methods with the lowest mean of a measure, as text."""
    names = sorted(methods(metrics), key=lambda n: metrics[n][key].get("mean", float("inf")))
    return ", ".join(
        f"{title_of(n)} {number(metrics[n][key].get('mean', float('nan')))}" for n in names[:first]
    )


def others(
    metrics: Metrics,
    key: str,
    base: str = "rectgrad",
    exclude: Sequence[str] = ("rectgrad_prr",),
    sign: int = 1,
) -> list[Effect]:
    """The evidence that a method has a lower mean than each other method; higher with sign = -1."""
    names = [name for name in methods(metrics) if name not in (base, *exclude)]
    return [effect(metrics[name]["above"][base][key], sign=sign) for name in names]
