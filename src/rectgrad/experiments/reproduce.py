"""Runs an experiment and writes its record and figures; both whole, or not at all."""

from __future__ import annotations

import functools
import importlib
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from rectgrad import files
from rectgrad.bench.environment import environment
from rectgrad.data.fetch import Watch, unwatched
from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.lab import DATASETS, Lab


def experiment(name: str) -> ModuleType:
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"rectgrad.experiments.{EXPERIMENTS[name]}")


def reproduce(
    name: str,
    dataset: str = "shapes",
    preset: str = "quick",
    out: Path = Path("results"),
    device: str = "cpu",
    seed: int = 0,
    watch: Watch = unwatched,
) -> Path:
    """The record of an experiment: made now, gone on with, or as it is where it is finished."""
    module = experiment(name)
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; there are {', '.join(DATASETS)}")
    if preset not in module.PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(module.PRESETS)}")
    folder = out / dataset
    lab = Lab(name, dataset, preset, module.PRESETS[preset], folder, device, seed, watch)
    path = folder / f"{name}.json"
    if _finished(path, lab):
        return path
    started = time.monotonic()
    metrics = module.run(lab)
    pictures = [_saved(lab, key, page) for key, page in module.draw(lab, metrics).items()]
    record = {
        "experiment": name,
        "title": module.TITLE,
        "dataset": dataset,
        "preset": preset,
        "settings": lab.settings(),
        "seed": seed,
        "environment": environment(device),
        "commit": commit(),
        "seconds": round(time.monotonic() - started, 1),  # of the last start
        "figures": pictures,
        "metrics": metrics,
    }
    files.save_json(record, path)
    lab.parts.clear()
    return path


def _finished(path: Path, lab: Lab) -> bool:
    known: dict[str, Any] = files.load_json(path) or {}
    there = all((path.parent / name).exists() for name in known.get("figures", ()))
    return bool(known) and known.get("settings") == lab.settings() and there


def _saved(lab: Lab, key: str, page: Any) -> str:
    name = f"{lab.experiment}-{key}.png" if key else f"{lab.experiment}.png"
    with files.whole(lab.out / name) as part:
        page.savefig(part, format="png", dpi=110)
    return name


@functools.cache
def commit() -> str | None:
    """Of the source that runs, where it lies in a repository."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
