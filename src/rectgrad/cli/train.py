"""rectgrad train"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rectgrad import training
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.data import DATASETS
from rectgrad.experiments.network import train as run

EPOCHS = ", ".join(f"{plan.epochs} ({arch})" for arch, plan in training.PLANS.items())

train_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@train_app.command("train")
def train(
    dataset: Annotated[str, typer.Option(help=f"{' or '.join(DATASETS)}.")] = "cifar10",
    arch: Annotated[
        str, typer.Option(help=f"{', '.join(training.PLANS)}: the paper's CNN, a ResNet or a transformer.")
    ] = "cnn",
    epochs: Annotated[
        int | None, typer.Option(help=f"Number of epochs; default: {EPOCHS}.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the augmentation.")] = 0,
    patch: Annotated[bool, typer.Option("--patch", help="Add a patch of noise to every image.")] = False,
    half: Annotated[
        bool, typer.Option("--half", help="Save 16-bit weights, which halves the file size.")
    ] = False,
    device: shared.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Safetensors file; default: DATASET_ARCH.safetensors.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Train the paper's CNN or another small network. Interrupted training resumes after the last epoch.

    The training record is written next to the weights, with the suffix .json.

    Example: rectgrad train --dataset shapes --epochs 5 --out shapes.safetensors

    Example: rectgrad train --arch resnet --half
    """
    if arch not in training.PLANS:
        raise ValueError(f"unknown architecture {arch!r}; architectures are {', '.join(training.PLANS)}")
    plan = replace(training.PLANS[arch], seed=seed, device=shared.resolve_device(device))
    plan = plan if epochs is None else replace(plan, epochs=epochs)
    out = Path(f"{dataset}_{arch}{'_patch' * patch}.safetensors") if out is None else out
    if out.suffix != ".safetensors":  # `--weights` reads a file by its suffix
        raise ValueError(f"--out must be the path of a .safetensors file to write, not {str(out)!r}")
    shared.check_file("--out", out)
    record = run(dataset, plan, out, patch, half, progress)
    accuracy = f"test accuracy {record['test_accuracy']:.1%}"
    print(json.dumps(record) if as_json else f"{out}: {accuracy}")
