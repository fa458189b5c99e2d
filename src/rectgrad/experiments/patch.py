"""Figures 2 and 5: a patch that is the same in every picture tells nothing, and should get no attribution.

One 10 x 10 patch of noise lies over the upper left corner of all training and test pictures. Measured is the
absolute attribution in rows and columns 0 to 7, whose first-layer windows lie wholly inside the patch. Paper:
saliency is not zero there; RectGrad with PRR is least, RectGrad and DeepLIFT close behind.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad import image, training
from rectgrad.data import Images, scaled
from rectgrad.experiments.bars import bars, both
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, finally_thresholded, spread
from rectgrad.metrics import in_box
from rectgrad.records import attribute

TITLE = "Attribution on a patch that means nothing (Figures 2 and 5)"
PRESETS = {"quick": {"images": 200}, "paper": {"images": 10_000}}
SIDE, INNER, CHUNK, SHOWN = 10, 8, 1_000, 4


def patched(images: Images) -> Images:
    """The pictures with the patch over their corner."""
    pixels = images.pixels.copy()
    noise = np.random.RandomState(100).randint(0, 255, (SIDE, SIDE, 3))
    pixels[:, :SIDE, :SIDE] = noise.astype(np.uint8)
    return Images(pixels, images.labels, images.masks)


def run(lab: Lab) -> dict[str, Any]:
    module, test = lab.trained("patch", patched), patched(lab.dataset.test)
    metrics: dict[str, Any] = {
        "accuracy": lab.parts.part("accuracy", partial(_accuracies, lab, module)),
    }
    x = scaled(test.pixels[: lab.numbers["images"]])
    with lab.watch(len(COMPARED), "patch") as advance:
        for method in COMPARED:
            metrics[method] = _on_patch(lab, module, x, method)
            advance()
    return metrics


def _accuracies(lab: Lab, module: nn.Module) -> dict[str, float]:
    test = lab.dataset.test
    return {
        "without patch": training.accuracy(lab.network, test),
        "with patch": training.accuracy(module, patched(test)),
    }


def _on_patch(lab: Lab, module: nn.Module, x: Tensor, method: str) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for i, rows in enumerate(x.split(CHUNK)):
        part = lab.parts.part(f"{method} {i}", partial(_measured, module, rows, method))
        for key, values in part.items():
            found.setdefault(key, []).extend(values)
    return {key: spread(values) for key, values in found.items()}


def _measured(module: nn.Module, x: Tensor, method: str) -> dict[str, list[float]]:
    corner = (0, 0, INNER, INNER)
    maps = comparison_map(module, x, method)
    cut = finally_thresholded(maps)
    return {
        "amount": in_box(maps, corner).tolist(),
        "share": in_box(maps, corner, share=True).tolist(),
        "amount_thresholded": in_box(cut, corner).tolist(),
        "share_thresholded": in_box(cut, corner, share=True).tolist(),
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Figure]:
    return {"": _bars(metrics), "maps": _maps(lab)}


def _bars(metrics: dict[str, Any]) -> Figure:
    """The share of attribution on the inner patch: median and quartiles, beside its share of the area."""
    page = Figure(figsize=(8, 4.2), layout="constrained")
    axis = page.subplots()
    bars(axis, COMPARED, both(metrics, COMPARED, "share"), "share of attribution on the patch")
    axis.axhline((INNER / 32) ** 2, color="grey", linestyle=":", label="its share of the area")
    axis.legend(frameon=False, ncols=3)
    return page


def _maps(lab: Lab) -> Figure:
    """A few pictures and their maps, with the sign; the patch is framed."""
    module, test = lab.trained("patch", patched), patched(lab.dataset.test)
    pixels = test.pixels[:SHOWN]
    page = Figure(figsize=(1.25 * (len(COMPARED) + 1), 1.3 * SHOWN + 0.3), layout="constrained")
    axes = page.subplots(SHOWN, len(COMPARED) + 1)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for row, picture in enumerate(pixels):
        axes[row, 0].imshow(picture)
    for column, method in enumerate(COMPARED, start=1):
        signed: dict[str, Any] = {"positive_only": False} if method.startswith("rectgrad") else {}
        x = scaled(pixels).to(lab.device)
        for row, map_ in enumerate(attribute(module, x, method, **signed).sum(1).cpu()):
            axes[row, column].imshow(image.colour(map_.numpy(), "signed"))
            frame = [-0.5, SIDE - 0.5, SIDE - 0.5, -0.5, -0.5], [-0.5, -0.5, SIDE - 0.5, SIDE - 0.5, -0.5]
            axes[row, column].plot(*frame, color="grey", linewidth=0.7)
        axes[0, column].set_title(method.replace("_", "\n", 1).replace("_", " "), fontsize=7)
    return page
