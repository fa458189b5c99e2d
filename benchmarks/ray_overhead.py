"""Measures the overhead of Ray tasks: the same cells of ROAR and KAR, one by one and as tasks.

    python benchmarks/ray_overhead.py [--cells 8] [--pictures 2000] [--epochs 4]

Both train the same networks with the same number of threads; on a machine with two cores, one task at a time.
Starting Ray and the first import in the workers are measured separately. Writes
results/bench/ray-overhead.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rectgrad.bench.environment import commit, environment
from rectgrad.experiments import ray_engine
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.retraining import Cell, trained
from rectgrad.photos import cluster, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    retraining = {"pictures": given.pictures, "epochs": given.epochs}
    lab = Lab("roar-kar", "shapes", "quick", {"retraining": retraining}, Path("results/bench"))
    cells = [Cell("saliency", "roar", 0.1, seed) for seed in range(given.cells)]
    lab.network  # noqa: B018 - trained, or from the cache
    local, here = timed(lambda: dict(trained(lab, cells)))
    started = time.monotonic()
    with cluster.session():
        dict(ray_engine.trained(lab, [Cell("saliency", "roar", 0.9, 0)]))  # warm-up: the workers import torch
        start = time.monotonic() - started - here / len(cells)
        found, there = timed(lambda: dict(ray_engine.trained(lab, cells)))
    record = {
        "cells": len(cells),
        "retraining": retraining,
        "seconds_a_cell_local": here / len(cells),
        "seconds_a_cell_ray": there / len(cells),
        "overhead": there / here - 1,
        "seconds_to_start": start,
        "same_accuracies": found == local,
        "environment": environment("cpu"),
        "commit": commit(),
    }
    files.save_json(record, Path("results/bench/ray-overhead.json"))
    print({key: record[key] for key in list(record)[:7]})


def timed(work):
    started = time.monotonic()
    return work(), time.monotonic() - started


if __name__ == "__main__":
    main()
