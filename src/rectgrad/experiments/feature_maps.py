"""Appendix A.1: feature maps next to the saliency map, for images with noisy saliency maps.

Shows the images with masks whose saliency is most outside the object. Each feature map is scaled to its own
maximum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from rectgrad import image
from rectgrad.data import Images
from rectgrad.experiments.colours import layer_name
from rectgrad.experiments.findings import Finding, Table, number
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import comparison_map
from rectgrad.experiments.units import LAYERS, activations, resized
from rectgrad.metrics import outside

TITLE = "Feature maps and noisy saliency maps (Appendix A.1)"
PRESETS = {"quick": {"per_class": 10, "shown": 3}, "paper": {"per_class": 10, "shown": 5}}
PAPER = "Filters keep or drop features on the object and on the background alike."
CAPTIONS = {
    "": "The images with the noisiest saliency maps, their maps, and all feature maps of the four "
    "convolutions (dark: active, each map scaled separately). Many feature maps are dark on the background "
    "as well as on the object."
}
TILE, GAP = 32, 2


def run(lab: Lab) -> dict[str, Any]:
    return lab.parts.part("all", lambda: _measure(lab))


def _measure(lab: Lab) -> dict[str, Any]:
    x, objects, images = lab.masked()
    share = outside(comparison_map(lab.network, x, "saliency"), objects, share=True)
    rows = share.argsort(descending=True)[: lab.numbers["shown"]]
    active = activations(lab.network, x[rows].to(lab.device))
    return {
        str(int(row)): {
            "class": lab.dataset.classes[int(images.labels[row])],
            "saliency_outside_share": float(share[row]),
            "active": {name: _shares(y[i], objects[row]) for name, y in active.items()},
        }
        for i, row in enumerate(rows)
    }


def _shares(activation: Tensor, where: Tensor) -> dict[str, float]:
    """Share of active units on the object and on the background."""
    on_object = resized(where.unsqueeze(0), activation.shape[-1])[0]
    active = (activation > 0).float().mean(0)
    places = {"object": active[on_object], "background": active[~on_object]}
    return {name: float(values.mean()) if len(values) else 0.0 for name, values in places.items()}


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    x, _, images = lab.masked()
    rows = np.array([int(row) for row in metrics])
    active = activations(lab.network, x[rows].to(lab.device))
    maps = comparison_map(lab.network, x[rows], "saliency")
    found = [
        [
            *_first(images.rows(rows), maps, i, lab.dataset.classes),
            *(image.Panel(mosaic(y[i]), layer_name(name) if i == 0 else "") for name, y in active.items()),
        ]
        for i in range(len(rows))
    ]
    return {"": image.sheet(found, cell=4 * (TILE + GAP) - GAP)}


def _first(images: Images, maps: Tensor, i: int, classes: tuple[str, ...]) -> list[image.Panel]:
    picture = Image.fromarray(images.pixels[i])
    name = classes[int(images.labels[i])]
    return [image.Panel(picture, name), image.Panel(image.colour(maps[i].numpy(), "signed"), "saliency")]


def mosaic(activation: Tensor) -> Image.Image:
    """The feature maps of one image, four per column, each scaled separately."""
    channels = activation / activation.amax((1, 2), keepdim=True).clamp(min=1e-12)
    columns = len(channels) // 4
    page = Image.new("RGB", (columns * (TILE + GAP) - GAP, 4 * (TILE + GAP) - GAP), "#9a9ca6")
    for k, plane in enumerate(channels):
        grey = Image.fromarray((255 * (1 - plane.numpy())).round().astype(np.uint8))
        page.paste(
            image.upsample(grey, (TILE, TILE)), ((k % columns) * (TILE + GAP), (k // columns) * (TILE + GAP))
        )
    return page


def tables(metrics: dict[str, Any]) -> list[Table]:
    head = [
        "image",
        "saliency outside the object",
        *(f"{layer_name(name)}: object / background" for name in LAYERS),
    ]
    rows = [
        [found["class"], number(found["saliency_outside_share"])]
        + [f"{number(a['object'])} / {number(a['background'])}" for a in found["active"].values()]
        for found in metrics.values()
    ]
    return [
        Table(
            head, rows, "Share of active units. The experiment feature-frequency measures it over all images."
        )
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    shares = [a for found in metrics.values() for a in found["active"].values()]
    least = min(a["background"] for a in shares)
    return [
        Finding(
            "Units are also active on the background of these images, in every convolution.",
            None if least > 0 else False,  # of one network, and chosen for their noise
            f"at least {number(least)} of a layer's background units are active; selected images are "
            "examples, not evidence: see feature-frequency",
        )
    ]
