"""Figures 2 and 5: a patch that is the same in every image carries no information and should get no
attribution.

One 10 x 10 patch of noise covers the upper left corner of all training and test images. We measure the
absolute attribution in rows and columns 0 to 7, whose first-layer windows are entirely inside the patch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch import Tensor, nn

from rectgrad import image, training
from rectgrad.data import Images, scaled
from rectgrad.experiments import matched, sheets
from rectgrad.experiments.boxes import both, boxes
from rectgrad.experiments.findings import Finding, Table, by_method, decided, effect, mean, order, others
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, nan_where_zero, with_final_threshold
from rectgrad.experiments.repeated import measured
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.experiments.statistics import spread
from rectgrad.metrics import in_box

TITLE = "Attribution on an uninformative patch (Figures 2 and 5)"
PRESETS = {"quick": {"images": 200, "matched": 50}, "paper": {"images": 10_000, "matched": 500}}
PAPER = (
    "Saliency maps are not zero on the patch. RectGrad with PRR gives it the least attribution; RectGrad and "
    "DeepLIFT are close behind; all others give it a non-trivial amount. Test accuracy 74.6 %, 73.1 % with "
    "the patch (the authors' logs: 73.5 %, 72.1 %)."
)
CAPTIONS = {
    "": "Share of a map's absolute attribution on the inner 8 x 8 pixels of the patch, over the test images: "
    "the lower the better. The dotted line is the patch's share of the area, the value of an uninformative "
    "map. Boxes are quartiles, whiskers the 5th and 95th percentile, crosses the mean.",
    "matched": "The share on the patch with the same post-processing for every method in each row: dots are "
    "means, bars 95 % intervals over networks and images.",
    "maps": "Test images with the patch (framed) and their maps. Colour inside the frame is attribution on "
    "something that is the same in all images.",
}
MEASURES = {
    "amount_thresholded": "by amount, baselines thresholded (the paper's measure)",
    "share": "by share",
    "share_thresholded": "by share, baselines thresholded",
}
SIDE, INNER, SHOWN = 10, 8, 4
CORNER = (0, 0, INNER, INNER)
BASES = ("rectgrad", "rectgrad_prr", "deeplift")
PAPER_ACCURACY = {"standard": "0.746 (logs: 0.735)", "patch": "0.731 (logs: 0.721)"}


def patched(images: Images) -> Images:
    """The images with the patch in their upper left corner."""
    pixels = images.pixels.copy()
    noise = np.random.RandomState(100).randint(0, 255, (SIDE, SIDE, 3))
    pixels[:, :SIDE, :SIDE] = noise.astype(np.uint8)
    return Images(pixels, images.labels, images.masks)


def run(lab: Lab) -> dict[str, Any]:
    networks = lab.networks("patch", patched)
    x = scaled(patched(lab.dataset.test).pixels[: lab.numbers["images"]])
    few = x[: lab.numbers["matched"]]
    return {
        "accuracy": lab.parts.part("accuracy", partial(_accuracies, lab)),
        "matched": matched.measured(
            lab, networks, few, lambda maps: in_box(maps, CORNER, share=True), "share"
        ),
        **spreads(measured(lab, networks, COMPARED, partial(_measure, x), "patch"), BASES),
    }


def _accuracies(lab: Lab) -> dict[str, Any]:
    test = lab.dataset.test
    each = {
        "standard": [training.accuracy(module, test) for module in lab.networks()],
        "patch": [training.accuracy(module, patched(test)) for module in lab.networks("patch", patched)],
    }
    return {kind: {**spread(found), "each": found} for kind, found in each.items()}


def _measure(x: Tensor, module: nn.Module, method: str) -> dict[str, list[float]]:
    maps = comparison_map(module, x, method)
    cut = with_final_threshold(maps, method)
    return {
        "amount": in_box(maps, CORNER).tolist(),
        "share": nan_where_zero(in_box(maps, CORNER, share=True), maps),
        "amount_thresholded": in_box(cut, CORNER).tolist(),
        "share_thresholded": nan_where_zero(in_box(cut, CORNER, share=True), cut),
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(8.5, 4.4), layout="constrained")
    axis = page.subplots()
    boxes(axis, COMPARED, both(metrics, COMPARED, "share"), "share of attribution on the patch")
    axis.axhline((INNER / 32) ** 2, color="grey", linestyle=":", label="patch area")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, ncols=3)
    return {"": page, "matched": _matched(metrics), "maps": _maps(lab)}


def _matched(metrics: dict[str, Any]) -> Figure:
    page = Figure(figsize=(9, 5.4), layout="constrained")
    axis = page.subplots()
    matched.draw(axis, metrics["matched"], "share of attribution on the patch")
    axis.axvline((INNER / 32) ** 2, color="grey", linestyle=":")
    matched.legend(page)
    return page


def _maps(lab: Lab) -> Image.Image:
    pixels = patched(lab.dataset.test).pixels[:SHOWN]
    maps = sheets.planes(lab.trained("patch", patched), scaled(pixels), sheets.methods())
    rows = sheets.rows([sheets.picture(each) for each in pixels], maps)
    framed = [[panel._replace(picture=_framed(panel.picture)) for panel in row] for row in rows]
    return image.sheet(framed, cell=sheets.CELL)


def _framed(picture: Image.Image) -> Image.Image:
    """Enlarges a picture and frames the measured region."""
    scale = sheets.CELL // picture.width
    large = image.upsample(picture, (picture.width * scale, picture.height * scale))
    ImageDraw.Draw(large).rectangle((0, 0, INNER * scale, INNER * scale), outline="#2b8a3e", width=2)
    return large


def tables(metrics: dict[str, Any]) -> list[Table]:
    rows = [
        [
            f"test accuracy, {kind} network",
            f"{metrics['accuracy'][kind]['mean']:.4f}",
            paper,
            ", ".join(f"{value:.4f}" for value in metrics["accuracy"][kind]["each"]),
        ]
        for kind, paper in PAPER_ACCURACY.items()
    ]
    columns = {
        "share": "share on the patch",
        "share_thresholded": "share, with final threshold",
        "amount": "amount (units of the method)",
        "amount_thresholded": "amount, with final threshold",
    }
    note = (
        "Mean with its 95 % interval over networks and images. Amounts of different methods have different "
        "units."
    )
    return [
        Table(["", "ours, mean", "paper (CIFAR-10)", "each seed"], rows),
        by_method(metrics, columns, note),
        matched.table(metrics["matched"], "share on the patch"),
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    share = metrics["saliency"]["share"]
    found = [
        decided(
            "Saliency maps are not zero on the patch.",
            [effect(share)],
            f"mean share {mean(share)}; the patch's share of the area is {(INNER / 32) ** 2:.3f}",
        )
    ]
    for key, measure in MEASURES.items():
        found += [
            decided(
                f"RectGrad with PRR gives the patch the least attribution {measure}.",
                others(metrics, key, "rectgrad_prr", ()),
                f"lowest: {order(metrics, key)}",
            ),
            decided(
                f"RectGrad and DeepLIFT give it less than all other baselines {measure}.",
                [each for base in ("rectgrad", "deeplift") for each in others(metrics, key, base, BASES)],
                f"lowest: {order(metrics, key, 6)}",
            ),
        ]
    return found + matched.findings(metrics["matched"], "share on the patch")
