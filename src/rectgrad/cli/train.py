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
    dataset: Annotated[str, typer.Option(help=f"{' or '.join(DATASETS)}.")] = "cifar10",
    epochs: Annotated[int, typer.Option(help="Number of epochs.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    patch: Annotated[bool, typer.Option("--patch", help="Add a patch of noise to every image.")] = False,
    half: Annotated[
        bool, typer.Option("--half", help="Save 16-bit weights, which halves the file size.")
    ] = False,
    device: shared.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Safetensors file; default: DATASET_cnn.safetensors.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Train the paper's CNN. Interrupted training resumes after the last complete epoch.

    The training record is written next to the weights, with the suffix .json.

    Example: rectgrad train --dataset shapes --epochs 5 --out shapes.safetensors
    """
    plan = training.Plan(epochs=epochs, seed=seed, device=shared.resolve_device(device))
    out = out or Path(f"{dataset}_cnn{'_patch' * patch}.safetensors")
    record = run(dataset, plan, out, patch, half, progress)
    accuracy = f"test accuracy {record['test_accuracy']:.1%}"
    print(json.dumps(record) if as_json else f"{out}: {accuracy}")
