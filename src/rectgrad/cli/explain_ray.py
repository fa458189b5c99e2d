"""Explains photos as Ray tasks. Each worker loads the model once and writes its own results.

On a cluster, photos and results must be on a disk that all machines share.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rectgrad.cli.run import Done, Plan, run, waiting
from rectgrad.models import ImageModel, load
from rectgrad.photos import UnreadableImageError, cluster, files, names
from rectgrad.photos.files import Source
from rectgrad.photos.stream import batches

CHUNK = 64  # photos per task


class ModelSpec(NamedTuple):
    """How a worker loads the model."""

    name: str
    weights: Path | None
    labels: Path | None


def run_on_ray(spec: ModelSpec, plan: Plan, sources: Iterable[Source], done: Done) -> int:
    """Like `run`, but on Ray."""
    missing = list(waiting(plan, sources, done))
    sent = replace(plan, model=None, recompute=True)  # type: ignore[arg-type]
    resources = {"num_gpus": 1} if torch.device(plan.device).type == "cuda" else {"num_cpus": 1}
    computed = 0
    with cluster.session() as ray:
        task = ray.remote(_run_chunk).options(**resources, max_retries=5)
        folder = os.getcwd()
        tasks = {task.remote(folder, spec, sent, chunk): chunk for chunk in batches(missing, CHUNK)}
        for chunk, results in cluster.as_completed(ray, tasks):
            if isinstance(results, cluster.FailedTaskError) and len(chunk) > 1:
                tasks |= {task.remote(folder, spec, sent, [each]): [each] for each in chunk}
                continue  # one at a time: only the photo that fails is lost
            failed = isinstance(results, cluster.FailedTaskError)
            found = [f"{names.readable(chunk[0].path)}: {results}"] if failed else results
            for source, result in zip(chunk, found, strict=True):
                done(source, UnreadableImageError(result) if isinstance(result, str) else result)
                computed += not isinstance(result, str)
    files.remove_partial_files(plan.out)  # of workers that were killed
    return computed


def _run_chunk(folder: str, spec: ModelSpec, plan: Plan, chunk: list[Source]) -> list[Any]:
    """Returns the record of each photo, or an error message. Paths are relative to the caller's folder."""
    os.chdir(folder)
    results: dict[str, Any] = {}
    plan = replace(plan, model=_load(spec))
    run(plan, chunk, lambda source, result: results.update({source.name: result}))
    ordered = (results[source.name] for source in chunk)
    return [str(result) if isinstance(result, BaseException) else result for result in ordered]


@functools.lru_cache(maxsize=2)
def _load(spec: ModelSpec) -> ImageModel:
    torch.set_num_threads(1)  # only in this worker process: Ray runs one per core
    return load(spec.name, weights=spec.weights, labels=spec.labels)
