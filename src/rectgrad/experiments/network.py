"""The paper's CNN, trained and written down: weights, and a record of how they were made."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch

from rectgrad import training
from rectgrad.bench.environment import commit, environment
from rectgrad.data import DATASETS, digest_of
from rectgrad.data.fetch import Watch, unwatched
from rectgrad.experiments.patch import patched
from rectgrad.photos import files


def train(
    dataset: str, plan: training.Plan, out: Path, patch: bool, half: bool, watch: Watch = unwatched
) -> dict[str, Any]:
    """Writes the weights to OUT and the record beside them. patch: a patch of noise over every picture.
    half: weights of 16 bits; what is measured is what is written."""
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; there are {', '.join(DATASETS)}")
    data = DATASETS[dataset]()
    seen, asked = (patched(data.train), patched(data.test)) if patch else (data.train, data.test)
    checkpoint = out.with_name(f"{out.stem}-{dataset}{'-patch' * patch}.checkpoint.safetensors")
    run = training.train(seen, plan, checkpoint=checkpoint, watch=watch)
    module = run.module.half().float() if half else run.module
    with training.repeatable():
        correct, where = training.accuracy(module, asked), environment(plan.device)
    record = {
        "weights": out.name,
        "dataset": dataset,
        "patch": patch,
        "half": half,
        "test_accuracy": correct,
        "losses": run.losses,
        "plan": asdict(plan),
        "data_sha256": digest_of(seen),
        "environment": where,
        "commit": commit(),
    }
    state = (module.half() if half else module).state_dict()
    with files.whole(out) as part:
        safetensors.torch.save_file({name: value.cpu().contiguous() for name, value in state.items()}, part)
    files.save_json(record, out.with_suffix(".json"))
    checkpoint.unlink(missing_ok=True)
    return record
