"""rectgrad compare"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image

from rectgrad import image
from rectgrad.cli import options as shared
from rectgrad.cli.report import process, report_sheets
from rectgrad.cli.run import Drawn, Json, Plan
from rectgrad.cli.sheets import CELL, Found, by_methods, caution_lines, drawn, methods_settings
from rectgrad.explanation import Network, Prepared
from rectgrad.explanation.result import value_of
from rectgrad.methods import Method
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import gini

compare_app = typer.Typer(add_completion=False, rich_markup_mode=None)

LABELS = ["no threshold", "final threshold"]
SHOWN = (
    "saliency,gradient_x_input,guided_backprop,smoothgrad,integrated_gradients,epsilon_lrp,deeplift,rectgrad"
)


@dataclass(frozen=True)
class Compare:
    """Several methods: a row of maps, and a row of the same maps after the final threshold."""

    methods: dict[str, Method]
    target: int | None = None
    dark: bool = False
    specificity: bool | None = None

    def settings(self) -> Json:
        return methods_settings(self, "compare")

    def explain(self, network: Network, batch: list[Prepared]) -> list[Found]:
        return by_methods(network, batch, self.methods, self.target, self.specificity)

    def draw(self, answer: Found) -> Drawn:
        planes = {name: image.plane(each.map) for name, each in answer.items()}
        final = {n: p if self.methods[n].thresholds else image.final_threshold(p) for n, p in planes.items()}
        first = next(iter(answer.values()))
        assert first.photo is not None
        blank = image.Panel(Image.new("RGB", first.photo.size, image.PAGE[self.dark]), framed=False)
        notes = {name: f", specificity {value_of(each)}" for name, each in answer.items()}
        rows = [
            [image.Panel(first.photo, "photo", " ", smooth=True), *self._panels(planes, notes)],
            [blank, *self._panels(final, dict.fromkeys(planes, ""))],
        ]
        cautions = caution_lines({title_of(name): each for name, each in answer.items()})
        sheet = image.sheet(
            rows,
            first.caption,
            labels=LABELS,
            cell=image.enlarged(first.photo.height, CELL),
            dark=self.dark,
            notes=cautions,
        )
        return drawn(sheet, answer)

    def _panels(self, planes: dict[str, Any], notes: dict[str, str]) -> list[image.Panel]:
        scheme = "signed_dark" if self.dark else "signed"
        return [
            image.Panel(
                image.colour(plane, scheme), title_of(name), f"Gini {_sparsity(plane):.2f}{notes[name]}"
            )
            for name, plane in planes.items()
        ]


@compare_app.command("compare")
def compare(
    images: shared.Images = None,
    methods: Annotated[str, typer.Option(help="Comma-separated method names, or all (except rise).")] = SHOWN,
    q: Annotated[float, typer.Option(help="RectGrad's percentile.")] = 98.0,
    target: shared.Target = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    out: shared.Out = Path("compared"),
    maps: shared.Maps = None,
    together: shared.Together = False,
    dark: shared.Dark = False,
    specificity: shared.WithSpecificity = None,
    again: shared.Again = False,
    as_json: shared.AsJson = False,
) -> int:
    """Compare methods on one sheet, with and without a final threshold for the baselines.

    The final threshold zeroes everything below the 95th percentile of a map; RectGrad does not need it.
    Red is evidence for the class, blue is evidence against it. Several photos produce one sheet each and
    OUT/index.html.

    Example: rectgrad compare cat.jpg --methods saliency,smoothgrad,rectgrad
    """
    shared.check_choice("--maps", maps, shared.KINDS)
    chosen = shared.picture_methods(methods, q)
    sources = shared.find_photos(images, out, reserved=["compare"])
    network = shared.network(model, weights, labels, device, target)
    shared.prepare_output(out)
    work = Compare(chosen, network.target, dark, specificity)
    plan = Plan(network.model, work, out, maps, 1, network.device, shared.code_of(model), again)
    outcome = process("compare", plan, sources, as_json)
    return report_sheets(plan, outcome, as_json, out / "compare.png" if together else None)


def _sparsity(plane: Any) -> float:
    return float(gini(torch.from_numpy(plane).unsqueeze(0))[0])
