"""rectgrad reproduce"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.experiments import EXPERIMENTS
from rectgrad.experiments.report import report
from rectgrad.experiments.reproduce import check_engine, experiment
from rectgrad.experiments.reproduce import reproduce as run

reproduce_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@reproduce_app.command("reproduce")
def reproduce(
    name: Annotated[str, typer.Argument(metavar="ID", help=f"{', '.join(EXPERIMENTS)}, all, or report.")],
    dataset: Annotated[str, typer.Option(help="cifar10 or shapes.")] = "shapes",
    preset: Annotated[
        str, typer.Option(help="quick, or paper for as many images and trials as in the paper.")
    ] = "quick",
    images: Annotated[
        Path | None, typer.Option(help="Folder of photos for the figures; default: scikit-image's samples.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model for the photos: efficientnet_lite0 (default), or the paper's inception_v4."),
    ] = None,
    device: shared.Device = "auto",
    engine: Annotated[
        str, typer.Option(help="local, or ray to run roar-kar on all cores or a cluster.")
    ] = "local",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for records and figures.")] = Path("results"),
    again: shared.Again = False,
) -> None:
    """Run an experiment from the paper and write its record (JSON) and figures.

    An interrupted experiment resumes when it is run again. `report` collects all records in the folder on
    one page, OUT/report.html.

    Example: rectgrad reproduce noise-level --dataset shapes --preset quick
    """
    if name == "report":
        print(report(out))
        return
    if name != "all" and (images or model) and not getattr(experiment(name), "PHOTOS", False):
        raise ValueError(f"{name} shows no photos: --images and --model apply to {', '.join(_with_photos())}")
    shared.check_folder(out)
    check_engine("roar-kar" if name == "all" else name, engine)
    for each in EXPERIMENTS if name == "all" else (name,):
        resolved = shared.resolve_device(device)
        used = engine if name != "all" or getattr(experiment(each), "RAY", False) else "local"
        path = run(
            each, dataset, preset, out, resolved, seed, progress, model, images, engine=used, again=again
        )
        print(path, flush=True)


def _with_photos() -> list[str]:
    return [name for name in EXPERIMENTS if getattr(experiment(name), "PHOTOS", False)]
