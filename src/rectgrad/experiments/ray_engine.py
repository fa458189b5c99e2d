"""Runs the cells of ROAR and KAR as Ray tasks, on the cores of a laptop, the GPUs of a node or a cluster.

Images and rankings are put in the object store once. Ray retries a task whose worker died. Each cell is saved
as soon as it completes, so that an interrupted run resumes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rectgrad import many
from rectgrad.experiments import retraining
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.retraining import Cell
from rectgrad.photos import cluster


def trained(lab: Lab, missing: Sequence[Cell]) -> Iterator[tuple[Cell, float]]:
    with cluster.session() as ray:
        sets, network = ray.put(retraining.pictures(lab)), ray.put(copy.deepcopy(lab.network).cpu())
        device, resources = _task(lab.device, ray.cluster_resources())
        order, work = (ray.remote(each).options(**resources) for each in (_ranked, _trained))
        kinds = retraining.kinds(missing)
        orders = {kind: order.remote(network, sets, device, *kind) for kind in kinds}
        tasks = {}
        for group in retraining.groups(lab, missing):
            ranks = [orders[kind] for kind in retraining.kinds(group)]
            tasks[work.remote(sets, group, replace(retraining.plan(lab), device=device), *ranks)] = group
        for group, found in cluster.completed(ray, tasks, lambda group: ", ".join(map(str, group))):
            yield from zip(group, found, strict=True)


def _task(device: str, available: dict[str, float]) -> tuple[str, dict[str, Any]]:
    """The device of a task, as its worker sees it, and the task's resources and retries."""
    if torch.device(device).type != "cuda":
        return device, {"num_cpus": min(many.THREADS, int(available.get("CPU", 1))), "max_retries": 5}
    if not available.get("GPU"):
        raise ValueError(f"--device {device}: Ray has no GPU")
    return "cuda", {"num_gpus": 1, "max_retries": 5}


# Ray names its worker processes after these functions.


def _ranked(network: Any, sets: Any, device: str, method: str, variant: str) -> Any:
    return retraining.ranked(network.to(device), sets, method, [variant])[0]


def _trained(sets: Any, group: Sequence[Cell], plan: Any, *orders: Any) -> list[float]:
    return retraining.train_group(sets, group, plan, orders)
