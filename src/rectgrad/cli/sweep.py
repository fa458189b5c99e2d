"""rectgrad sweep"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from rectgrad import image
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.explanation.result import value_of
from rectgrad.methods import RectGrad
from rectgrad.photos import files
from rectgrad.photos.stream import batches

sweep_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@sweep_app.command("sweep")
def sweep(
    images: shared.Images = None,
    q: Annotated[str, typer.Option(help="Comma-separated percentiles.")] = "0,10,20,40,60,80,90,95,98,99",
    target: shared.Target = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    out: shared.Out = Path("swept"),
    dark: shared.Dark = False,
) -> int:
    """Show RectGrad at many thresholds: one row per photo, tau = 0 first, then each q.

    Example: rectgrad sweep cat.jpg --q 0,20,80,95,99
    """
    methods = {"tau = 0": RectGrad(tau=0.0, positive_only=False)}
    methods |= {
        f"q = {level:g}": RectGrad(q=level, positive_only=False) for level in map(_level, q.split(","))
    }
    shared.prepare_output(out)
    sources = shared.find_photos(images, out)
    network = shared.network(model, weights, labels, device, target)
    rows, names, notes, broken = [], [], dict[str, None](), list[str]()
    with progress(len(sources), "sweeping") as advance:
        for source, photo in shared.read_photos(sources, broken):
            row, cautions = _row(network, methods, photo, dark)
            rows.append(row)
            notes |= dict.fromkeys(cautions)
            names.append(source.name)
            advance()
    if rows:
        shown = (
            rows if len(rows) > 1 else list(batches(rows[0], 6))
        )  # a single photo is wrapped over several rows
        page = image.sheet(shown, labels=names if len(rows) > 1 else (), dark=dark, notes=list(notes))
        files.save_picture(page, out / "sweep.png")
        print(out / "sweep.png")
    return shared.exit_status(broken)


def _row(
    network: shared.Network, methods: dict[str, RectGrad], photo: Image.Image, dark: bool
) -> tuple[list[image.Panel], list[str]]:
    crop = network.model.crop(photo)
    found = network.explain(crop, methods.values())
    scheme = "signed_dark" if dark else "signed"
    panels = [image.Panel(crop, found[0].caption, " ", smooth=True)]
    for name, each in zip(methods, found, strict=True):
        drawn = image.colour(image.plane(each.map), scheme)
        panels.append(image.Panel(drawn, name, f"specificity {value_of(each)}"))
    return panels, shared.caution_lines(dict(zip(methods, found, strict=True)))


def _level(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--q takes comma-separated numbers from 0 to 100, not {text!r}") from None
