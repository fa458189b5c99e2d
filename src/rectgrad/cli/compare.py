"""rectgrad compare"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import torch
import typer
from PIL import Image

from rectgrad import image
from rectgrad.cli import options as shared
from rectgrad.cli.progress import progress
from rectgrad.explanation.result import value_of
from rectgrad.methods import Method
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import gini
from rectgrad.photos import files
from rectgrad.photos.files import Source

compare_app = typer.Typer(add_completion=False, rich_markup_mode=None)

LABELS = ["no threshold", "final threshold"]
SHOWN = (
    "saliency,gradient_x_input,guided_backprop,smoothgrad,integrated_gradients,epsilon_lrp,deeplift,rectgrad"
)


@compare_app.command("compare")
def compare(
    images: shared.Images = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = SHOWN,
    q: Annotated[float, typer.Option(help="RectGrad's percentile.")] = 98.0,
    target: shared.Target = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    out: shared.Out = Path("compared"),
    together: Annotated[bool, typer.Option("--together", help="Put all photos on one sheet.")] = False,
    dark: shared.Dark = False,
) -> int:
    """Compare methods on one sheet, without and with the final threshold of the baselines.

    The final threshold zeroes everything below the 95th percentile of a map; RectGrad does not need it.
    Red is evidence for the class, blue against it. Several photos give one sheet each and OUT/index.html.

    Example: rectgrad compare cat.jpg --methods saliency,smoothgrad,rectgrad
    """
    chosen = shared.picture_methods(methods, q)
    sources = shared.find_photos(images, out)
    network = shared.network(model, weights, labels, device, target)
    shared.prepare_output(out)
    done: list[Compared] = []
    broken: list[str] = []
    with progress(len(sources), "comparing") as advance:
        for source, photo in shared.read_photos(sources, broken):
            done.append(compared(network, chosen, source, photo, dark))
            if not together:
                files.save_picture(done[-1].sheet(dark), out / f"{source.name}.png")
                done[-1].rows.clear()  # keeps memory bounded for thousands of photos
            advance()
    if done:
        print(_finish(done, out, together, dark))
    return shared.exit_status(broken)


class Compared(NamedTuple):
    """One photo: a row of maps, and a row of the same maps with the final threshold."""

    name: str
    caption: str
    rows: list[list[image.Panel]]
    notes: list[str]

    def sheet(self, dark: bool) -> Image.Image:
        return image.sheet(self.rows, self.caption, labels=LABELS, dark=dark, notes=self.notes)


def _finish(done: list[Compared], out: Path, together: bool, dark: bool) -> Path:
    """Returns the path to show: the only sheet, the common sheet, or a page with all sheets."""
    if together:
        rows = [row for each in done for row in each.rows]
        labels = [label for each in done for label in (each.caption, LABELS[1])]
        notes = [f"{each.name}: {note}" for each in done for note in each.notes]
        files.save_picture(image.sheet(rows, labels=labels, dark=dark, notes=notes), out / "compare.png")
        return out / "compare.png"
    if len(done) == 1:
        return out / f"{done[0].name}.png"
    files.save_text(index_page(done), out / "index.html")
    return out / "index.html"


def compared(
    network: shared.Network, methods: dict[str, Method], source: Source, photo: Image.Image, dark: bool
) -> Compared:
    crop = network.model.crop(photo)
    found = dict(zip(methods, network.explain(crop, methods.values()), strict=True))
    planes = {name: image.plane(each.map) for name, each in found.items()}
    thresholded = {n: p if methods[n].thresholds else image.final_threshold(p) for n, p in planes.items()}
    blank = image.Panel(Image.new("RGB", crop.size, image.PAGE[dark]), framed=False)
    first = image.Panel(crop, "photo", " ", smooth=True)
    specificities = {name: f", specificity {value_of(each)}" for name, each in found.items()}
    rows = [
        [first, *_panels(planes, dark, specificities)],
        [blank, *_panels(thresholded, dark, dict.fromkeys(planes, ""))],
    ]
    notes = shared.caution_lines({title_of(name): each for name, each in found.items()})
    return Compared(source.name, next(iter(found.values())).caption, rows, notes)


def _panels(planes: dict[str, Any], dark: bool, notes: dict[str, str]) -> list[image.Panel]:
    scheme = "signed_dark" if dark else "signed"
    return [
        image.Panel(image.colour(plane, scheme), title_of(name), f"Gini {_sparsity(plane):.2f}{notes[name]}")
        for name, plane in planes.items()
    ]


def _sparsity(plane: Any) -> float:
    return float(gini(torch.from_numpy(plane).unsqueeze(0))[0])


_STYLE = (
    "body{font:16px system-ui;margin:2rem;background:#fff;color:#1c1d21}"
    "img{max-width:100%}figure{margin:0 0 3rem}figcaption{margin-bottom:.5rem}"
)


def index_page(done: list[Compared]) -> str:
    """A page with all sheets."""
    sheets = "\n".join(_figure(each.name, each.caption) for each in done)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>rectgrad compare</title><style>{_STYLE}</style>\n"
        f"<h1>{len(done)} photos compared</h1>\n{sheets}\n</html>\n"
    )


def _figure(name: str, caption: str) -> str:
    text, source = html.escape(f"{name}: {caption}"), html.escape(quote(f"{name}.png"))
    return f'<figure><figcaption>{text}</figcaption><img loading="lazy" alt="{text}" src="{source}"></figure>'
