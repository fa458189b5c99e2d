"""Runs all units of a case, here or on Ray. Finished units are kept, so that an interrupted run resumes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rectgrad.experiments.parts import Parts
from rectgrad.photos import cluster, files
from rectgrad.verdict.case import Case, Chunk, part_name
from rectgrad.verdict.rows import Row
from rectgrad.verdict.work import Values, Worker

ENGINES = ("local", "ray")
Advance = Callable[..., None]
Progress = Callable[[int, str], AbstractContextManager[Advance]]
Computed = dict[tuple[str, str], dict[int, Values]]  # (unit, row) -> values by the start of the chunk
_WHAT = "judging"


@contextlib.contextmanager
def no_progress(total: int, what: str) -> Iterator[Advance]:
    yield lambda done=1: None


class Memory:
    """Finished parts, where no folder was given."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def known(self, name: str) -> Any:
        return self._values.get(name)

    def keep(self, name: str, value: Any) -> Any:
        return self._values.setdefault(name, value)


def kept_in(out: Path | None, case: Case) -> Parts | Memory:
    if out is None:
        return Memory()
    files.remove_partial_files(out)
    return Parts(out / "parts", case.settings())


def run(
    case: Case,
    rows: Sequence[Row],
    parts: Parts | Memory,
    engine: str = "local",
    progress: Progress = no_progress,
    units: Sequence[str] | None = None,
) -> Computed:
    """The values of all units, from their files or computed now."""
    with closing(Worker(case)) as worker:
        wanted = {
            chunk: [each for each in worker.units(list(rows), chunk) if units is None or each[0] in units]
            for chunk in case.chunks()
        }
        total = sum(map(len, wanted.values()))
        with progress(total, _WHAT) as advance:
            done, missing = _existing(wanted, parts)
            advance(total - sum(map(len, missing.values())))
            compute = _on_ray if engine == "ray" else _here
            for chunk, unit, row, value in compute(case, worker, missing):
                kept = parts.keep(part_name(unit, row, chunk), value)
                done.setdefault((unit, row.name), {})[chunk.start] = kept
                advance()
    return {key: dict(sorted(values.items())) for key, values in done.items()}


Done = Iterator[tuple[Chunk, str, Row, Values]]
Wanted = dict[Chunk, list[tuple[str, Row]]]


def _existing(wanted: Wanted, parts: Parts | Memory) -> tuple[Computed, Wanted]:
    """Finished units, and those that are missing."""
    done: Computed = {}
    missing: Wanted = {}
    for chunk, units in wanted.items():
        for unit, row in units:
            known = parts.known(part_name(unit, row, chunk))
            if known is None:
                missing.setdefault(chunk, []).append((unit, row))
            else:
                done.setdefault((unit, row.name), {})[chunk.start] = known
    return done, missing


def _here(case: Case, worker: Worker, missing: Wanted) -> Done:
    for chunk, units in missing.items():
        photos = worker.opened(chunk)
        for i, (unit, row) in enumerate(units):
            yield chunk, unit, row, photos.compute(unit, row)
            if all(later.digest != row.digest for _, later in units[i + 1 :]):
                photos.forget(row)


def _on_ray(case: Case, worker: Worker, missing: Wanted) -> Done:
    """One task per chunk. A finished chunk is kept; Ray retries a task whose worker died."""
    gpu = case.device.type == "cuda"
    with cluster.session() as ray:
        _send_code(ray, case, missing)
        shared = ray.put(case)
        task = ray.remote(_chunk).options(**({"num_gpus": 1} if gpu else {"num_cpus": 1}), max_retries=5)
        tasks = {task.remote(shared, chunk, units): (chunk, units) for chunk, units in missing.items()}
        for (chunk, units), values in cluster.as_completed(ray, tasks):
            for (unit, row), value in zip(units, values, strict=True):
                yield chunk, unit, row, value


def _send_code(ray: Any, case: Case, missing: Wanted) -> None:
    """Sends the code of networks and methods that are not installed along with them: workers cannot import a
    user's file."""
    layers = case.model.modules() if isinstance(case.model, nn.Module) else [case.model]
    methods = (row.method for units in missing.values() for _, row in units)
    for name in {type(each).__module__ for each in (*layers, *methods)} - {"__main__"}:
        place = getattr(sys.modules.get(name), "__file__", None)
        if place and name.split(".")[0] != "rectgrad" and "site-packages" not in Path(place).parts:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])


def _chunk(case: Case, chunk: Chunk, units: list[tuple[str, Row]]) -> list[Values]:
    torch.set_num_threads(1)  # only in this worker process: Ray runs one per core
    with closing(Worker(case)) as worker:
        return [value for *_, value in _here(case, worker, {chunk: units})]
