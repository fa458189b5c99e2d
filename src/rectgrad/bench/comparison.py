"""Compares all contenders on one network."""

from __future__ import annotations

import warnings
from typing import Any

from rectgrad.bench import measure, memory, paths, peers
from rectgrad.bench.case import Case, case_of, side
from rectgrad.bench.contenders import Contender, contenders, plain
from rectgrad.bench.plan import Plan
from rectgrad.methods.catalog import METHODS

Row = dict[str, Any]


def comparison(plan: Plan, model: str, progress: measure.Progress = measure.no_progress) -> dict[str, Any]:
    """Measures times in interleaved rounds, then memory and sparse layers of each contender separately."""
    case = case_of(plan, model, side(plan, model), plan.batch)
    field = {each.name: each for each in contenders(case, plan)}
    with progress(measure.steps(len(field), plan.rounds) + len(field), model) as advance:
        times = measure.race({n: each.run for n, each in field.items()}, plan.rounds, plan.device, advance)
        rows = measure.rows(times)
        for row in rows:
            _complete(row, field[row["name"]], plan, model, case)
            advance()
        for _ in times.failed:
            advance()
    return {
        "model": model,
        "batch": plan.batch,
        "pixels": side(plan, model),
        "parameters": sum(p.numel() for p in case.module.parameters()),
        "rows": _relative(rows),
        "failed": [{**each, "group": field[each["name"]].group} for each in measure.failures(times)],
    }


def _complete(row: Row, contender: Contender, plan: Plan, model: str, case: Case) -> None:
    """Adds what is not measured in the interleaved rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # already reported
        row["group"] = contender.group
        row["memory"] = memory.peak(contender.run, plan, model, contender.name)
        row["sparse_share"] = _sparse_share(case, contender.name)
        if contender.group == "captum":  # Captum warns about its hooks each time
            has_no_effect = peers.has_no_effect(contender.name, contender.run, case.inputs, plain(case))
            row["note"] = "no change to this network's backward pass" if has_no_effect else None


def _sparse_share(case: Case, name: str) -> float | None:
    one_pass = name in METHODS and METHODS[name].one_backward
    return paths.sparse_share(paths.trace_of(case, name)) if one_pass else None


def _relative(rows: list[Row]) -> list[Row]:
    """The rows with their memory relative to the first row."""
    base = rows[0]["memory"] if rows else None
    for row in rows:
        row["memory"] = _relative_memory(row["memory"], base)
    return rows


def _relative_memory(mine: memory.Peak | None, base: memory.Peak | None) -> dict[str, Any] | None:
    """Bytes allocated by the call, and in total."""
    if mine is None or base is None:
        return None
    return {
        "growth": mine.growth,
        "total": mine.most,
        "growth_ratio": mine.growth / base.growth if base.growth else None,
        "total_ratio": mine.most / base.most,
    }
