"""A whole benchmark: every section of a plan in turn, each written as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rectgrad.bench.comparison import comparison
from rectgrad.bench.environment import environment
from rectgrad.bench.measure import Watch, unwatched
from rectgrad.bench.plan import Plan, in_force
from rectgrad.bench.scaling import scaling
from rectgrad.bench.selection import selection

Section = dict[str, Any]


def run(
    plan: Plan,
    file: Path | None = None,
    watch: Watch = unwatched,
    show: Callable[[str, Section], None] = lambda kind, section: None,
) -> dict[str, Any]:
    """Measure what `plan` says. `file` holds what is finished at any time; `show` is given each part.

    result = rectgrad.bench.run(rectgrad.bench.Plan(models=("resnet50",), device="cuda", batch=8))
    """
    with in_force(plan):
        result: dict[str, Any] = {"environment": environment(plan.device), "plan": asdict(plan)}
        result |= {"models": [], "selection": [], "scaling": []}
        show("environment", result["environment"])
        for kind, section in sections(plan, watch):
            result[kind].append(section)
            if file is not None:
                _save(result, file)
            show(kind, section)
    return result


def sections(plan: Plan, watch: Watch) -> Iterator[tuple[str, Section]]:
    """(kind, numbers), as they come."""
    for name in plan.models:
        yield "models", comparison(plan, name, watch)
    if plan.selection:
        yield "selection", selection(plan, watch)
    for name in plan.models if plan.scaling else ():
        yield "scaling", scaling(plan, name, watch)


def _save(result: dict[str, Any], file: Path) -> None:
    from rectgrad.photos import files

    files.save_json(result, file)
