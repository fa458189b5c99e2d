"""Trains a small network and writes its weights and a training record."""

from __future__ import annotations

import glob
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch

from rectgrad import training
from rectgrad.bench.environment import commit, environment
from rectgrad.data import DATASETS, digest_of
from rectgrad.data.fetch import Progress, no_progress
from rectgrad.experiments.patch import patched
from rectgrad.photos import files


def train(
    dataset: str, plan: training.Plan, out: Path, patch: bool, half: bool, progress: Progress = no_progress
) -> dict[str, Any]:
    """Writes the weights to `out` and the record next to them.

    `patch` adds a patch of noise to every image; `half` saves 16-bit weights, and those are evaluated.
    """
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; datasets are {', '.join(DATASETS)}")
    data = DATASETS[dataset]()
    train, test = (patched(data.train), patched(data.test)) if patch else (data.train, data.test)
    checkpoint = out.with_name(f"{out.stem}-{dataset}{'-patch' * patch}.checkpoint.safetensors")
    run = training.train(train, plan, checkpoint=checkpoint, progress=progress)
    module = run.module.half().float() if half else run.module
    with training.deterministic():
        correct, where = training.accuracy(module, test), environment(plan.device)
    record = {
        "weights": out.name,
        "dataset": dataset,
        "patch": patch,
        "half": half,
        "test_accuracy": correct,
        "losses": run.losses,
        "plan": asdict(plan),
        "data_sha256": digest_of(train),
        "environment": where,
        "commit": commit(),
    }
    state = (module.half() if half else module).state_dict()
    files.remove_partial_files(out.parent, f".{glob.escape(out.stem)}.*")
    with files.atomic(out) as part:
        part.write_bytes(safetensors.torch.save({k: v.cpu().contiguous() for k, v in state.items()}))
    files.save_json(record, out.with_suffix(".json"))
    checkpoint.unlink(missing_ok=True)
    return record
