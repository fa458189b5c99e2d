"""rectgrad train"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import safetensors.torch
import typer

from rectgrad import files, training
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.data import Dataset, cifar10, shapes

train_app = typer.Typer(add_completion=False, rich_markup_mode=None)

DATASETS: dict[str, Callable[[], Dataset]] = {"cifar10": cifar10.load, "shapes": shapes.load}


@train_app.command("train")
def train(
    dataset: Annotated[str, typer.Option(help=", ".join(DATASETS))] = "cifar10",
    epochs: Annotated[int, typer.Option(help="Times over the data.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the first weights.")] = 0,
    device: shared.Device = "auto",
    out: Annotated[Path, typer.Option(help="Weights, as safetensors.")] = Path("cifar10_cnn.safetensors"),
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as JSON.")] = False,
) -> None:
    """Train the paper's CNN. Stopped and started again, it goes on after the last finished epoch.

    Example: rectgrad train --dataset shapes --epochs 5 --out shapes.safetensors
    """
    if dataset not in DATASETS:
        raise ValueError(f"unknown dataset {dataset!r}; there are {', '.join(DATASETS)}")
    plan = training.Plan(epochs=epochs, seed=seed, device=shared.device_of(device))
    data = DATASETS[dataset]()
    checkpoint = out.with_name(f"{out.stem}-{dataset}.checkpoint.safetensors")
    run = training.train(data.train, plan, checkpoint=checkpoint, watch=progress)
    correct = training.accuracy(run.module, data.test)
    state = {name: value.cpu().contiguous() for name, value in run.module.state_dict().items()}
    with files.whole(out) as part:
        safetensors.torch.save_file(state, part)
    checkpoint.unlink(missing_ok=True)
    outcome = {"weights": str(out), "dataset": dataset, "test_accuracy": correct, "losses": run.losses}
    print(json.dumps(outcome) if as_json else f"{out}: {correct:.1%} of the test pictures right")
