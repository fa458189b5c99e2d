"""Measures the time to compute maps of all 60,000 CIFAR-10 images with the methods of ROAR and KAR.

    python benchmarks/attribution.py [--device cuda] [--pictures 60000] [--out FILE]

Measures twice: in full float32 with deterministic kernels, as in the experiment, and with torch's default
settings, where convolutions on a GPU use TF32. Each method explains a thousand images as a warm-up;
compilation is reported separately. Needs CIFAR-10. Writes results/bench/h200-attribution.json by default.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import torch

from rectgrad.bench.environment import commit, environment
from rectgrad.data import cifar10, scaled
from rectgrad.experiments.maps import comparison_map
from rectgrad.experiments.roar_kar import METHODS
from rectgrad.models import load
from rectgrad.photos import files
from rectgrad.training import deterministic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pictures", type=int, default=60_000)
    parser.add_argument("--out", type=Path, default=Path("results/bench/h200-attribution.json"))
    given = parser.parse_args()
    dataset = cifar10.load()
    x = torch.cat([scaled(part.pixels) for part in (dataset.train, dataset.test)])[: given.pictures]
    module = load("cifar10_cnn").module.to(given.device).eval()
    record: dict[str, Any] = {"environment": environment(given.device), "commit": commit()}
    record["pictures"] = len(x)
    ways = {"float32, repeatable": deterministic, "torch's settings": contextlib.nullcontext}
    for way, settings in ways.items():
        found: dict[str, Any] = {"seconds": {}, "first_thousand": {}}
        for method in METHODS:
            with settings():
                found["first_thousand"][method] = seconds(module, x[:1000], method)
                found["seconds"][method] = seconds(module, x, method)
        found["together"] = sum(found["seconds"].values())
        record[way] = found
        files.save_json(record, given.out)
        print(way, found, flush=True)


def seconds(module: Any, x: torch.Tensor, method: str) -> float:
    """The time from images in memory to maps in memory."""
    started = time.perf_counter()
    comparison_map(module, x, method)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
