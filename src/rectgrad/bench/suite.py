"""Runs all sections of a plan and saves each as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rectgrad.bench.comparison import comparison
from rectgrad.bench.environment import environment
from rectgrad.bench.measure import Progress, no_progress
from rectgrad.bench.plan import Plan, applied
from rectgrad.bench.scaling import scaling
from rectgrad.bench.selection import selection

Section = dict[str, Any]


def run(
    plan: Plan,
    file: Path | None = None,
    progress: Progress = no_progress,
    show: Callable[[str, Section], None] = lambda kind, section: None,
) -> dict[str, Any]:
    """Runs a plan. `file` is updated after each section, and `show` is called with it.

    result = rectgrad.bench.run(rectgrad.bench.Plan(models=("resnet50",), device="cuda", batch=8))
    """
    with applied(plan):
        result: dict[str, Any] = {"environment": environment(plan.device), "plan": asdict(plan)}
        result |= {"models": [], "selection": [], "scaling": []}
        show("environment", result["environment"])
        for kind, section in sections(plan, progress):
            result[kind].append(section)
            if file is not None:
                _save(result, file)
            show(kind, section)
    return result


def sections(plan: Plan, progress: Progress) -> Iterator[tuple[str, Section]]:
    """Yields (kind, section) as they are finished."""
    for name in plan.models:
        yield "models", comparison(plan, name, progress)
    if plan.selection:
        yield "selection", selection(plan, progress)
    for name in plan.models if plan.scaling else ():
        yield "scaling", scaling(plan, name, progress)


def _save(result: dict[str, Any], file: Path) -> None:
    from rectgrad.photos import files

    files.save_json(result, file)
