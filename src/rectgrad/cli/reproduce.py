"""rectgrad reproduce"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.reproduce import reproduce as run

reproduce_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@reproduce_app.command("reproduce")
def reproduce(
    name: Annotated[str, typer.Argument(metavar="ID", help=f"{', '.join(EXPERIMENTS)}, or all.")],
    dataset: Annotated[str, typer.Option(help="cifar10 or shapes.")] = "shapes",
    preset: Annotated[str, typer.Option(help="quick, or paper: its numbers of images and trials.")] = "quick",
    device: shared.Device = "auto",
    seed: Annotated[int, typer.Option(help="Of the network's first weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of records and figures.")] = Path("results"),
) -> None:
    """An experiment of the paper: a record (JSON) and figures. Stopped and started again, it goes on.

    Example: rectgrad reproduce noise-level --dataset shapes --preset quick
    """
    for each in EXPERIMENTS if name == "all" else (name,):
        print(run(each, dataset, preset, out, shared.device_of(device), seed, progress), flush=True)
