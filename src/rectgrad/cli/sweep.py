"""rectgrad sweep"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rectgrad import image
from rectgrad.cli import options as shared
from rectgrad.cli.report import process, report_sheets
from rectgrad.cli.run import Drawn, Json, Plan
from rectgrad.cli.sheets import CELL, Found, by_methods, caution_lines, drawn, methods_settings
from rectgrad.explanation import Network, Prepared
from rectgrad.explanation.result import value_of
from rectgrad.methods import Method, RectGrad
from rectgrad.photos.stream import batches

sweep_app = typer.Typer(add_completion=False, rich_markup_mode=None)

COLUMNS = 6


@dataclass(frozen=True)
class Sweep:
    """RectGrad at several thresholds."""

    methods: dict[str, Method]
    target: int | None = None
    dark: bool = False

    def settings(self) -> Json:
        return methods_settings(self, "sweep")

    def explain(self, network: Network, batch: list[Prepared]) -> list[Found]:
        return by_methods(network, batch, self.methods, self.target)

    def draw(self, answer: Found) -> Drawn:
        first = next(iter(answer.values()))
        assert first.photo is not None
        scheme = "signed_dark" if self.dark else "signed"
        panels = [image.Panel(first.photo, "photo", " ", smooth=True)]
        for name, each in answer.items():
            picture = image.colour(image.plane(each.map), scheme)
            panels.append(image.Panel(picture, name, f"specificity {value_of(each)}"))
        rows, notes = list(batches(panels, COLUMNS)), caution_lines(answer)
        cell = image.enlarged(first.photo.height, CELL)
        return drawn(image.sheet(rows, first.caption, cell=cell, dark=self.dark, notes=notes), answer)


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
    maps: shared.Maps = None,
    together: shared.Together = False,
    dark: shared.Dark = False,
    again: shared.Again = False,
    as_json: shared.AsJson = False,
) -> int:
    """Show RectGrad at many thresholds: tau = 0 first, then each q.

    Several photos produce one sheet each and OUT/index.html.

    Example: rectgrad sweep cat.jpg --q 0,20,80,95,99
    """
    shared.check_choice("--maps", maps, shared.KINDS)
    levels = list(map(_level, q.split(",")))
    if max(levels) < 1:
        shared.check_percentile(max(levels))
    methods: dict[str, Method] = {"tau = 0": RectGrad(tau=0.0, positive_only=False)}
    methods |= {f"q = {level:g}": RectGrad(q=level, positive_only=False) for level in levels}
    sources = shared.find_photos(images, out, reserved=["sweep"])
    network = shared.network(model, weights, labels, device, target)
    shared.prepare_output(out)
    work = Sweep(methods, network.target, dark)
    plan = Plan(network.model, work, out, maps, 1, network.device, shared.code_of(model), again)
    outcome = process("sweep", plan, sources, as_json)
    return report_sheets(plan, outcome, as_json, out / "sweep.png" if together else None)


def _level(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--q takes comma-separated numbers from 0 to 100, not {text!r}") from None
