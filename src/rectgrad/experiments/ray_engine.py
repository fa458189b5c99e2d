"""Cells of ROAR and KAR as Ray tasks: on a laptop's cores, on a node's GPUs or on a cluster.

Pictures and rankings are placed in the object store once. A task whose worker dies is run again by Ray; a
cell is kept as soon as it comes in, so that a restart begins where this one ended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rectgrad import many
from rectgrad.experiments import roar_kar
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.roar_kar import Cell
from rectgrad.photos import cluster


def trained(lab: Lab, missing: Sequence[Cell]) -> Iterator[tuple[Cell, float]]:
    with cluster.session() as ray:
        sets, network = ray.put(roar_kar.pictures(lab)), ray.put(copy.deepcopy(lab.network).cpu())
        device, needs = _task(lab.device, ray.cluster_resources())
        order, work = (ray.remote(each).options(**needs) for each in (_ranked, _trained))
        kinds = roar_kar.kinds(missing)
        orders = {kind: order.remote(network, sets, device, *kind) for kind in kinds}
        tasks = {}
        for group in roar_kar.groups(lab, missing):
            ranks = [orders[kind] for kind in roar_kar.kinds(group)]
            tasks[work.remote(sets, group, replace(roar_kar.plan(lab), device=device), *ranks)] = group
        for group, found in cluster.as_they_come(ray, tasks):
            yield from zip(group, found, strict=True)


def _task(device: str, there: dict[str, float]) -> tuple[str, dict[str, Any]]:
    """A task's device, which a worker sees as its only one; its share of a machine, and how often it is tried
    again when its worker dies."""
    if torch.device(device).type != "cuda":
        return device, {"num_cpus": min(many.THREADS, int(there.get("CPU", 1))), "max_retries": 5}
    if not there.get("GPU"):
        raise ValueError(f"--device {device}: Ray knows no GPU here")
    return "cuda", {"num_gpus": 1, "max_retries": 5}


# Ray's processes are named after these.


def _ranked(network: Any, sets: Any, device: str, method: str, blurred: bool) -> Any:
    return roar_kar.ranked(network.to(device), sets, method, blurred)


def _trained(sets: Any, group: Sequence[Cell], plan: Any, *orders: Any) -> list[float]:
    return roar_kar.train_group(sets, group, plan, orders)
