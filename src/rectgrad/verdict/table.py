"""The statistics of a verdict: means with intervals, all pairs of rows, ranks, and how far measures agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rectgrad.metrics import statistics
from rectgrad.verdict.measures import MEASURES
from rectgrad.verdict.presets import ALPHA

Array = NDArray[np.float64]
Json = dict[str, Any]
FINE = 40  # random signs for each test, so that the smallest p can survive the correction: 1 / 40 < ALPHA


def cells(values: Mapping[str, Array], seed: int) -> dict[str, Json]:
    """Mean, 95 % interval over photos and number of photos, for each row of a measure."""
    found = statistics.bootstrap(np.stack(list(values.values()), 1), seed=seed)
    columns = zip(*(each.tolist() for each in found), strict=True)
    return {
        row: {"mean": mean, "low": low, "high": high, "n": n}
        for row, (mean, low, high, n) in zip(values, columns, strict=True)
        if n
    }


def pairs(values: Mapping[str, Mapping[str, Array]], seed: int) -> list[Json]:
    """All pairs of rows (a, b) in all measures that have a better side: the mean of a - b over photos that
    both have, its interval, and p-values corrected by Holm's method over all of these tests. `better`: the
    better row if the corrected p is below 0.05."""
    compared = {
        measure: {
            (a, b): rows[a] - rows[b]
            for a, b in combinations(rows, 2)
            if np.isfinite(rows[a] - rows[b]).any()
        }
        for measure, rows in values.items()
        if MEASURES[measure].better is not None
    }
    draws = max(20_000, FINE * sum(map(len, compared.values())))
    found = [pair for measure, own in compared.items() if own for pair in _pairs(measure, own, draws, seed)]
    for pair, corrected in zip(found, statistics.holm([pair["p"] for pair in found]), strict=True):
        gain = MEASURES[pair["measure"]].sign * pair["difference"]
        significant = corrected < ALPHA and gain != 0
        better = pair["a"] if gain > 0 else pair["b"]
        pair |= {"holm": float(corrected), "better": better if significant else None}
    return found


def _pairs(measure: str, own: Mapping[tuple[str, str], Array], draws: int, seed: int) -> list[Json]:
    """The pairs of one measure, before the correction."""
    differences = np.stack(list(own.values()), 1)
    interval = statistics.bootstrap(differences, seed=seed)
    p = statistics.sign_flip_test(differences, draws, seed)
    needed = statistics.photos_needed(differences)
    return [
        {
            "measure": measure,
            "a": a,
            "b": b,
            "difference": float(interval.mean[i]),
            "low": float(interval.low[i]),
            "high": float(interval.high[i]),
            "n": int(interval.n[i]),
            "p": float(p[i]),
            "photos_needed": int(needed[i]) if np.isfinite(needed[i]) else None,
        }
        for i, (a, b) in enumerate(own)
    ]


def ranks(rows: Sequence[str], table: Mapping[str, Mapping[str, Json]], found: Sequence[Json]) -> Json:
    """Ranks with ties for each ranked measure, the share of comparisons that each row won, tied and lost, and
    the order of the rows: by wins minus losses, then by the mean rank of the plain means; rows that were not
    compared come last."""
    measures = [name for name in table if MEASURES[name].ranked and len(table[name]) > 1]
    won, lost, compared = (dict.fromkeys(rows, 0) for _ in range(3))
    by_measure: dict[str, dict[str, int]] = {}
    for name in measures:
        own = [pair for pair in found if pair["measure"] == name]
        worse = {row: 0 for row in rows if row in table[name]}
        for pair in own:
            for row in (pair["a"], pair["b"]):
                compared[row] += 1
                won[row] += pair["better"] == row
                lost[row] += pair["better"] not in (None, row)
                worse[row] += pair["better"] not in (None, row)
        by_measure[name] = {row: 1 + count for row, count in worse.items()}
    plain = {name: _positions(name, table[name]) for name in measures}
    mean = {row: np.mean([plain[m][row] for m in measures if row in plain[m]] or [np.inf]) for row in rows}
    net = {row: (won[row] - lost[row]) / compared[row] if compared[row] else -np.inf for row in rows}
    order = sorted(rows, key=lambda row: (-net[row], mean[row]))
    shares = {
        row: {
            "won": won[row] / compared[row],
            "tied": 1 - (won[row] + lost[row]) / compared[row],
            "lost": lost[row] / compared[row],
        }
        for row in rows
        if compared[row]
    }
    agreeing = agreement({name: table[name] for name in measures})
    return {"order": order, "by_measure": by_measure, "shares": shares, "agreement": agreeing}


def places(shares: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """The place of each row that was compared: 1 plus the number of rows with more wins minus losses. Equal
    rows share a place."""
    net = {row: round(own["won"] - own["lost"], 5) for row, own in shares.items()}
    return {row: 1 + sum(other > mine for other in net.values()) for row, mine in net.items()}


def _positions(measure: str, means: Mapping[str, Json]) -> dict[str, float]:
    """The rank of each row by its mean alone, 1 for the best; equal means share theirs."""
    sign = MEASURES[measure].sign
    values = {row: sign * cell["mean"] for row, cell in means.items()}
    return {
        row: 1 + sum(b > a for b in values.values()) + (sum(b == a for b in values.values()) - 1) / 2
        for row, a in values.items()
    }


def agreement(table: Mapping[str, Mapping[str, Json]]) -> Json:
    """Spearman's correlation between the rankings by two measures, over the rows that both have."""
    return {a: {b: _correlation((a, table[a]), (b, table[b])) for b in table} for a in table}


def _correlation(*measures: tuple[str, Mapping[str, Json]]) -> float | None:
    common = set.intersection(*(set(means) for _, means in measures))
    own = [_positions(name, {row: means[row] for row in means if row in common}) for name, means in measures]
    x, y = (np.array([ranks[row] for row in sorted(common)]) for ranks in own)
    if len(common) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
