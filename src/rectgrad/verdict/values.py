"""Collects the values of finished units: one column per measure and row, and what failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rectgrad.checks import are_probabilities
from rectgrad.verdict.case import Case
from rectgrad.verdict.matched import without_variant
from rectgrad.verdict.measures import MEASURES
from rectgrad.verdict.rows import Row
from rectgrad.verdict.run import Computed
from rectgrad.verdict.units import says_nothing

Columns = dict[str, dict[str, NDArray[np.float64]]]  # measure -> row -> one value per photo, NaN if undefined


def columns(case: Case, computed: Computed) -> Columns:
    found: Columns = {}
    for (unit, row), chunks in computed.items():
        n = case.preset.composites if unit == "grid" else len(case.inputs)
        measures = {key for values in chunks.values() for key in values if key in case.measures}
        for measure in measures:
            column = np.full(n, np.nan)
            for start, values in chunks.items():
                own = values.get(measure, ())
                column[start : start + len(own)] = own
            if np.isfinite(column).any():
                found.setdefault(measure, {})[row] = column
    return {measure: found[measure] for measure in case.measures if measure in found}


def times(computed: Computed) -> dict[str, dict[str, float]]:
    """Seconds of each unit and row, over all chunks and starts."""
    found: dict[str, dict[str, float]] = {}
    for (unit, row), chunks in computed.items():
        seconds = sum(values.get("seconds", 0) for values in chunks.values())
        own, method = found.setdefault(unit, {}), without_variant(row)  # variants of a method are added up
        own[method] = round(own.get(method, 0) + seconds, 2)
    return found


def failures(case: Case, rows: Sequence[Row], computed: Computed) -> list[dict[str, str]]:
    """What could not be judged: measures, methods, and maps that are zero."""
    found = [
        {"kind": "measure", "what": MEASURES[name].title, "why": why}
        for name, why in case.unavailable.items()
        if MEASURES[name].needs != ("positions", "masks") or case.masks is not None
    ]
    useless = int(says_nothing(case.masks).sum()) if case.masks is not None else 0
    if useless:
        several = "masks are" if useless > 1 else "mask is"
        why = f"{useless} {several} empty or cover{'' if useless > 1 else 's'} the whole photo, and left out"
        found.append({"kind": "masks", "what": "the masks", "why": why})
    if case.has_classes and are_probabilities(case.outputs):
        why = "its outputs look like probabilities; measures need the values before the softmax"
        found.append({"kind": "network", "what": "the network", "why": why})
    for row in rows:
        own = {unit: chunks for (unit, name), chunks in computed.items() if name == row.name}
        errors = [
            values["error"] for chunks in own.values() for values in chunks.values() if "error" in values
        ]
        different: dict[str, str] = {}
        for why in errors:
            different.setdefault(re.sub(r"\d+", "", why), why)  # once, if only shapes differ
        found += [{"kind": "method", "what": row.name, "why": why} for why in different.values()]
        zero = sum(values.get("zero", 0) for values in own.get("maps", {}).values())
        if zero:
            several = f"maps of {zero} photos are" if zero > 1 else "map of 1 photo is"
            why = f"the {several} zero, and left out"
            found.append({"kind": "method", "what": row.name, "why": why})
    return found
