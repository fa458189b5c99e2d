"""Runs all units of a case, here or on Ray. Finished units are kept, so that an interrupted run resumes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rectgrad.experiments.parts import Parts
from rectgrad.kernels.device import has_graphs
from rectgrad.photos import cluster, files
from rectgrad.verdict.case import Case, Chunk, part_name
from rectgrad.verdict.measures import MEASURES
from rectgrad.verdict.rows import Row
from rectgrad.verdict.units import Values
from rectgrad.verdict.work import Worker

ENGINES = ("local", "ray")
Advance = Callable[..., None]
Progress = Callable[[int, str], AbstractContextManager[Advance]]
Computed = dict[tuple[str, str], dict[int, Values]]  # (unit, row) -> values by the start of the chunk
MANY_MAPS = ("maps", "stability", "randomisation")  # units
SAME = 1e-3  # outputs of one network, from start to start, as a share of the largest
_WHAT = "judging"


@contextlib.contextmanager
def no_progress(total: int, what: str) -> Iterator[Advance]:
    yield lambda done=1: None


class Memory:
    """Finished parts in memory, if no folder was given."""

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
    parts = Parts(out / "parts", case.settings())
    outputs = case.outputs.numpy()
    before = parts.array("outputs", lambda: outputs)
    if before.shape != outputs.shape or not np.allclose(before, outputs, atol=SAME * np.abs(outputs).max()):
        parts.clear()  # the network is another one: a function, or one that calls functions
        parts.array("outputs", lambda: outputs)
    return parts


def run(
    case: Case,
    rows: Sequence[Row],
    parts: Parts | Memory,
    engine: str = "local",
    progress: Progress = no_progress,
) -> Computed:
    """The values of all units, from their files or computed now."""
    worker = Worker(case)
    wanted = {chunk: list(worker.units(list(rows), chunk)) for chunk in case.chunks()}
    total = sum(map(len, wanted.values()))
    with progress(total, _WHAT) as advance:
        done, missing = _existing(wanted, parts)
        advance(total - sum(map(len, missing.values())))
        compute = _on_ray if engine == "ray" else _here
        for chunk, unit, row, value in compute(case, worker, missing):
            kept = parts.keep(part_name(unit, row, chunk), value)
            done.setdefault((unit, row.name), {})[chunk.start] = kept
            advance()
    keys = dict.fromkeys((unit, row.name) for units in wanted.values() for unit, row in units)
    return {key: dict(sorted(done[key].items())) for key in keys}  # whatever was computed first


Done = Iterator[tuple[Chunk, str, Row, Values]]
Wanted = dict[Chunk, list[tuple[str, Row]]]


def _existing(wanted: Wanted, parts: Parts | Memory) -> tuple[Computed, Wanted]:
    """The finished units, and those that are missing or failed, which are tried again."""
    done: Computed = {}
    missing: Wanted = {}
    for chunk, units in wanted.items():
        for unit, row in units:
            known = parts.known(part_name(unit, row, chunk))
            if not _is_whole(known, chunk):
                missing.setdefault(chunk, []).append((unit, row))
            else:
                done.setdefault((unit, row.name), {})[chunk.start] = known
    return done, missing


def _is_whole(known: Any, chunk: Chunk) -> bool:
    """Whether a part has the form of a finished unit: a number, or nothing, for each photo and measure. What
    failed is tried again."""
    if not isinstance(known, dict) or "error" in known:
        return False
    columns = [known[name] for name in known.keys() & MEASURES.keys()]
    return all(
        isinstance(each, list)
        and len(each) == chunk.stop - chunk.start
        and all(value is None or isinstance(value, (int, float)) for value in each)
        for each in columns
    )


def _here(case: Case, worker: Worker, missing: Wanted) -> Done:
    """Chunk by chunk, because the rows of a chunk share most evaluations of the network. Where there are CUDA
    graphs, units that compute many maps follow row by row, so that one capture serves all chunks."""
    shared, by_row = _split(missing) if has_graphs(case.device) else (missing, {})
    yield from _in_order(worker, shared)
    for own in by_row.values():
        with worker.capturing():
            yield from _in_order(worker, own)


def _split(missing: Wanted) -> tuple[Wanted, dict[str, Wanted]]:
    shared: Wanted = {}
    by_row: dict[str, Wanted] = {}
    for chunk, units in missing.items():
        for unit, row in units:
            replays = unit in MANY_MAPS and row.method.one_backward and row.method.runs_model
            place = by_row.setdefault(row.name, {}) if replays else shared
            place.setdefault(chunk, []).append((unit, row))
    return shared, by_row


def _in_order(worker: Worker, missing: Wanted) -> Done:
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
        name = lambda item: f"photos {item[0].start} to {item[0].stop - 1}"  # noqa: E731
        for (chunk, units), values in cluster.completed(ray, tasks, name):
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
    found = {(unit, row.name): value for _, unit, row, value in _here(case, Worker(case), {chunk: units})}
    return [found[unit, row.name] for unit, row in units]
