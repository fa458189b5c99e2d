"""rectgrad train"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rectgrad import training
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.data import DATASETS
from rectgrad.experiments.network import train as run

train_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@train_app.command("train")
def train(
    dataset: Annotated[str, typer.Option(help=", ".join(DATASETS))] = "cifar10",
    epochs: Annotated[int, typer.Option(help="Times over the data.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the first weights.")] = 0,
    patch: Annotated[bool, typer.Option("--patch", help="A patch of noise over every picture.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Weights of 16 bits: half the file.")] = False,
    device: shared.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Weights, as safetensors; none: DATASET_cnn.safetensors.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The record as JSON.")] = False,
) -> None:
    """Train the paper's CNN. Stopped and started again, it goes on after the last finished epoch.

    Beside the weights lies the record of how they were made, with .json in place of .safetensors.

    Example: rectgrad train --dataset shapes --epochs 5 --out shapes.safetensors
    """
    plan = training.Plan(epochs=epochs, seed=seed, device=shared.device_of(device))
    out = out or Path(f"{dataset}_cnn{'_patch' * patch}.safetensors")
    record = run(dataset, plan, out, patch, half, progress)
    correct = f"{record['test_accuracy']:.1%} of the test pictures right"
    print(json.dumps(record) if as_json else f"{out}: {correct}")
