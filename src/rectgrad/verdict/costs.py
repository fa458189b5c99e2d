"""Time and memory of each method, as ratios to those of a plain gradient."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rectgrad.bench import measure, memory
from rectgrad.experiments.parts import Parts
from rectgrad.methods import Method, Saliency
from rectgrad.verdict.case import Case
from rectgrad.verdict.rows import Row
from rectgrad.verdict.run import Memory
from rectgrad.verdict.work import Worker

GRADIENT = Row("plain gradient", Saliency())


def costs(case: Case, rows: Sequence[Row], parts: Parts | Memory) -> dict[str, Any]:
    """Seconds per photo, and time and memory divided by those of a plain gradient."""
    found: dict[str, Any] = {}
    worker = Worker(case)
    for row in [GRADIENT, *(row for row in rows if not row.control)]:
        name = f"cost-{row.name}-{row.digest}"
        known = parts.known(name)
        found[row.name] = parts.keep(name, _cost(case, worker, row.method)) if known is None else known
    base = found.pop(GRADIENT.name)
    return {name: _ratios(cost, base) for name, cost in found.items() if cost}


def _cost(case: Case, worker: Worker, method: Method) -> dict[str, float]:
    """Seconds per photo and peak memory in bytes; empty if the method raises an error."""
    inputs = case.inputs[:1].to(case.device)
    target = case.outputs[:1].argmax(1).to(case.device) if case.has_classes else None
    seconds: list[float] = []

    def call() -> None:
        started = time.perf_counter()
        worker.maps(method, inputs, target)
        measure.synchronize(str(case.device))
        seconds.append(time.perf_counter() - started)

    try:
        call()
        on_gpu = case.device.type == "cuda"
        peak = memory.allocated(call, str(case.device)) if on_gpu else memory.resident(call, 1)
    except Exception:
        return {}
    return {"seconds": min(seconds), "bytes": peak.growth if peak is not None else 0}


def _ratios(cost: dict[str, float], base: dict[str, float]) -> dict[str, float | None]:
    def ratio(key: str) -> float | None:
        return cost[key] / base[key] if base.get(key) and cost[key] else None

    return {"seconds": cost["seconds"], "time": ratio("seconds"), "memory": ratio("bytes")}
