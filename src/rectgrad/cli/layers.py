"""rectgrad layers"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from torch import Tensor

from rectgrad import image
from rectgrad.cli import options as shared
from rectgrad.cli.report import process, report_sheets
from rectgrad.cli.run import Drawn, Json, Plan
from rectgrad.cli.sheets import Found, by_methods, caution_lines, drawn, methods_settings
from rectgrad.explanation import Explanation, Network, Prepared
from rectgrad.explanation.result import value_of
from rectgrad.methods import Method

layers_app = typer.Typer(add_completion=False, rich_markup_mode=None)

Maps = list[tuple[str, Tensor]]  # layers from the output to the input, each with its map (H, W)


class Answer(NamedTuple):
    """The explanations of a photo and their layers, by name of the method."""

    found: Found
    layers: dict[str, Maps]

    def values(self) -> list[Explanation]:
        return list(self.found.values())


@dataclass(frozen=True)
class Layers:
    """The attribution at each layer, one row per method."""

    methods: dict[str, Method]
    target: int | None = None
    dark: bool = False
    count: int = 8

    def settings(self) -> Json:
        return methods_settings(self, "layers")

    def explain(self, network: Network, batch: list[Prepared]) -> list[Answer]:
        return [self._answer(network, photo) for photo in batch]

    def _answer(self, network: Network, photo: Prepared) -> Answer:
        [found] = by_methods(network, [photo], self.methods, self.target)
        layers = {
            name: network.layers(photo.inputs.unsqueeze(0), method, self.target)
            for name, method in self.methods.items()
        }
        return Answer(found, layers)

    def draw(self, answer: Answer) -> Drawn:
        found = answer.found
        first = next(iter(found.values()))
        assert first.photo is not None
        photo = image.Panel(first.photo, "photo", " ", smooth=True)
        rows = [[*self._panels(each), photo] for each in answer.layers.values()]
        labels = [f"{name}, specificity {value_of(each)}" for name, each in found.items()]
        sheet = image.sheet(
            rows, first.caption, labels=labels, cell=160, dark=self.dark, notes=caution_lines(found)
        )
        return drawn(sheet, found, _arrays(answer.layers))

    def _panels(self, layers: Maps) -> list[image.Panel]:
        """Evenly spaced layers."""
        step = max((len(layers) - 1) / (self.count - 1), 1)
        picked = [layers[round(i * step)] for i in range(min(self.count, len(layers)))]
        scheme = "signed_dark" if self.dark else "signed"
        return [
            image.Panel(image.colour(values, scheme), name, " x ".join(map(str, values.shape)))
            for name, values in picked
        ]


@layers_app.command("layers")
def layers(
    images: shared.Images = None,
    methods: Annotated[str, typer.Option(help="Comma-separated method names.")] = "saliency,rectgrad",
    q: Annotated[float, typer.Option(help="RectGrad's percentile.")] = 98.0,
    count: Annotated[int, typer.Option(min=2, help="Number of layers to show, evenly spaced.")] = 8,
    target: shared.Target = None,
    model: shared.ModelName = "efficientnet_lite0",
    weights: shared.Weights = None,
    labels: shared.Labels = None,
    device: shared.Device = "auto",
    out: shared.Out = Path("layers"),
    maps: shared.Maps = None,
    together: shared.Together = False,
    dark: shared.Dark = False,
    again: shared.Again = False,
    as_json: shared.AsJson = False,
) -> int:
    """Show the attribution at each layer, from the output (left) to the input (right).

    Several photos produce one sheet each and OUT/index.html. --maps npz saves the maps of all layers.

    Example: rectgrad layers cat.jpg --methods saliency,rectgrad
    """
    if maps == "npy":
        raise ValueError("--maps must be npz, because the maps of different layers differ in size")
    shared.check_choice("--maps", maps, ("npz",))
    chosen = shared.picture_methods(methods, q)
    for name, method in chosen.items():
        if not method.one_backward:
            raise ValueError(f"{name} has no single backward pass, so it has no attribution at each layer")
    sources = shared.find_photos(images, out, reserved=["layers"])
    network = shared.network(model, weights, labels, device, target)
    shared.prepare_output(out)
    work = Layers(chosen, network.target, dark, count)
    plan = Plan(network.model, work, out, maps, 1, network.device, shared.code_of(model), again)
    outcome = process("layers", plan, sources, as_json)
    return report_sheets(plan, outcome, as_json, out / "layers.png" if together else None)


def _arrays(layers: dict[str, Maps]) -> dict[str, np.ndarray]:
    """All maps by method, position and layer; a layer that is used twice has two maps."""
    return {
        f"{method}.{i:03}.{name}": values.float().numpy()
        for method, own in layers.items()
        for i, (name, values) in enumerate(own)
    }
