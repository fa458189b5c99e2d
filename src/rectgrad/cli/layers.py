"""rectgrad layers"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from torch import Tensor

from rectgrad import image, photos
from rectgrad.api import layer_attributions
from rectgrad.cli import options as shared
from rectgrad.methods import Method
from rectgrad.photos import files

layers_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@layers_app.command("layers")
def layers(
    photo: Annotated[str | None, typer.Argument(help="A photo; default: a sample photo.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names.")] = "saliency,rectgrad",
    q: Annotated[float, typer.Option(help="RectGrad's percentile.")] = 98.0,
    count: Annotated[int, typer.Option(min=2, help="Number of layers to show, evenly spaced.")] = 8,
    target: shared.Target = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    out: shared.Out = Path("layers"),
    dark: shared.Dark = False,
) -> None:
    """Show the attribution at each layer, from the output (left) to the input (right).

    Example: rectgrad layers cat.jpg --methods saliency,rectgrad
    """
    chosen = shared.picture_methods(methods, q)
    shared.prepare_output(out)
    sources = shared.find_photos(None if photo is None else [photo], out)
    if len(sources) > 1:
        raise ValueError(f"layers takes one photo; {photo!r} matches {len(sources)}")
    (source,) = sources
    picture = photos.read(source.path)
    network = shared.network(model, weights, labels, device, target)
    crop = network.model.crop(picture)
    rows = [_row(layers_of(network, crop, method), count, crop, dark) for method in chosen.values()]
    files.save_picture(
        image.sheet(rows, labels=list(chosen), cell=160, dark=dark), out / f"{source.name}.png"
    )
    print(out / f"{source.name}.png")


def layers_of(network: shared.Network, crop: Image.Image, method: Method) -> list[tuple[str, Tensor]]:
    """The layers whose attribution has two dimensions."""
    attributions = layer_attributions(network.model.module, network.inputs(crop), method, network.target)
    return [(name, values[0]) for name, values in attributions if values[0].dim() == 2]


def _row(layers: list[tuple[str, Tensor]], count: int, crop: Image.Image, dark: bool) -> list[image.Panel]:
    """Evenly spaced layers, then the photo."""
    step = max((len(layers) - 1) / (count - 1), 1)
    picked = [layers[round(i * step)] for i in range(min(count, len(layers)))]
    scheme = "signed_dark" if dark else "signed"
    panels = [
        image.Panel(image.colour(values, scheme), name, " x ".join(map(str, values.shape)))
        for name, values in picked
    ]
    return [*panels, image.Panel(crop, "photo", " ", smooth=True)]
