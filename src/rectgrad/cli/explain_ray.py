"""Folders of photos explained as Ray tasks: each worker loads the model once and writes its results itself.

On a cluster, photos and results lie on a disk that all machines see.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rectgrad import explanation
from rectgrad.explanation import Plan
from rectgrad.models import ImageModel, load
from rectgrad.photos import UnreadableImageError, cluster
from rectgrad.photos.files import Source
from rectgrad.photos.stream import batches

CHUNK = 64  # photos a task


class Named(NamedTuple):
    """A model that every worker can load for itself."""

    name: str
    weights: Path | None
    labels: Path | None


def explain_with(
    named: Named, plan: Plan, sources: Iterable[Source], done: Callable[[Source, Any], None]
) -> int:
    """`explanation.explain`, on Ray."""
    left = list(explanation.left(plan, sources, done))
    question = replace(plan, model=None, again=True)  # type: ignore[arg-type]
    needs = {"num_gpus": 1} if torch.device(plan.device).type == "cuda" else {"num_cpus": 1}
    fresh = 0
    with cluster.session() as ray:
        task = ray.remote(_explained).options(**needs, max_retries=5)
        tasks = {task.remote(os.getcwd(), named, question, chunk): chunk for chunk in batches(left, CHUNK)}
        for chunk, results in cluster.as_they_come(ray, tasks):
            for source, result in zip(chunk, results, strict=True):
                done(source, UnreadableImageError(result) if isinstance(result, str) else result)
                fresh += not isinstance(result, str)
    return fresh


def _explained(folder: str, named: Named, question: Plan, chunk: list[Source]) -> list[Any]:
    """The record of each photo, or what is wrong with it. Paths are as the user gave them."""
    os.chdir(folder)
    found: dict[str, Any] = {}
    plan = replace(question, model=_model(named))
    explanation.explain(plan, chunk, lambda source, result: found.update({source.name: result}))
    results = [found[source.name] for source in chunk]
    return [str(result) if isinstance(result, BaseException) else result for result in results]


@functools.lru_cache(maxsize=2)
def _model(named: Named) -> ImageModel:
    torch.set_num_threads(1)
    return load(named.name, weights=named.weights, labels=named.labels)
