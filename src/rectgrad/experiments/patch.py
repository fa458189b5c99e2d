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
from rectgrad.experiments import sheets
from rectgrad.experiments.boxes import both, boxes
from rectgrad.experiments.findings import Finding, Table, by_method, least, methods, number, order
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, nan_where_zero, with_final_threshold
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.experiments.statistics import spread
from rectgrad.metrics import in_box

TITLE = "Attribution on an uninformative patch (Figures 2 and 5)"
PRESETS = {"quick": {"images": 200, "seeds": 1}, "paper": {"images": 10_000, "seeds": 3}}
PAPER = (
    "Saliency maps are not zero on the patch. RectGrad with PRR gives it the least attribution; RectGrad and "
    "DeepLIFT are close behind; all others give it a non-trivial amount. Test accuracy 74.6 %, 73.1 % with "
    "the patch (the authors' logs: 73.5 %, 72.1 %)."
)
CAPTIONS = {
    "": "Share of a map's absolute attribution on the inner 8 x 8 pixels of the patch, over the test images: "
    "the lower the better. The dotted line is the patch's share of the area, the value of an uninformative "
    "map. Boxes are quartiles, whiskers the 5th and 95th percentile, crosses the mean.",
    "maps": "Test images with the patch (framed) and their maps. Colour inside the frame is attribution on "
    "something that is the same in all images.",
}
MEASURES = {
    "amount_thresholded": "by amount, baselines thresholded (the paper's measure)",
    "share": "by share",
    "share_thresholded": "by share, baselines thresholded",
}
SIDE, INNER, CHUNK, SHOWN = 10, 8, 1_000, 4
PAPER_ACCURACY = {"standard": "0.746 (logs: 0.735)", "patch": "0.731 (logs: 0.721)"}


def patched(images: Images) -> Images:
    """The images with the patch in their upper left corner."""
    pixels = images.pixels.copy()
    noise = np.random.RandomState(100).randint(0, 255, (SIDE, SIDE, 3))
    pixels[:, :SIDE, :SIDE] = noise.astype(np.uint8)
    return Images(pixels, images.labels, images.masks)


def run(lab: Lab) -> dict[str, Any]:
    accuracies = [
        lab.parts.part(f"accuracy {seed}", partial(_accuracies, lab, seed))
        for seed in range(lab.seed, lab.seed + lab.numbers["seeds"])
    ]
    found = {kind: spread([each[kind] for each in accuracies]) for kind in PAPER_ACCURACY}
    for kind, about in found.items():
        about["each"] = [each[kind] for each in accuracies]
    return {"accuracy": found, **spreads(_measures(lab))}


def _accuracies(lab: Lab, seed: int) -> dict[str, float]:
    test = lab.dataset.test
    return {
        "standard": training.accuracy(lab.trained("standard", lambda images: images, seed), test),
        "patch": training.accuracy(lab.trained("patch", patched, seed), patched(test)),
    }


def _measures(lab: Lab) -> dict[str, dict[str, list[float]]]:
    """method -> measure -> one value per image."""
    module = lab.trained("patch", patched)
    chunks = scaled(patched(lab.dataset.test).pixels[: lab.numbers["images"]]).split(CHUNK)
    values: dict[str, dict[str, list[float]]] = {method: {} for method in COMPARED}
    with lab.progress(len(COMPARED) * len(chunks), "patch") as advance:
        for method in COMPARED:
            for i, x in enumerate(chunks):
                part = lab.parts.part(f"{method} {i}", partial(_measure, module, x, method))
                for key, found in part.items():
                    values[method].setdefault(key, []).extend(found)
                advance()
    return values


def _measure(module: nn.Module, x: Tensor, method: str) -> dict[str, list[float]]:
    corner = (0, 0, INNER, INNER)
    maps = comparison_map(module, x, method)
    cut = with_final_threshold(maps, method)
    return {
        "amount": in_box(maps, corner).tolist(),
        "share": nan_where_zero(in_box(maps, corner, share=True), maps),
        "amount_thresholded": in_box(cut, corner).tolist(),
        "share_thresholded": nan_where_zero(in_box(cut, corner, share=True), cut),
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(8.5, 4.4), layout="constrained")
    axis = page.subplots()
    boxes(axis, COMPARED, both(metrics, COMPARED, "share"), "share of attribution on the patch")
    axis.axhline((INNER / 32) ** 2, color="grey", linestyle=":", label="patch area")
    axis.legend(frameon=False, ncols=3)
    return {"": page, "maps": _maps(lab)}


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
    note = "Mean over images with its 95 % interval. Amounts of different methods have different units."
    return [Table(["", "ours, mean", "paper", "each seed"], rows), by_method(metrics, columns, note)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    share = metrics["saliency"]["share"]["mean"]
    found = [
        Finding(
            "Saliency maps are not zero on the patch.",
            share > 0,
            f"mean share {number(share)}; the patch's share of the area is {(INNER / 32) ** 2:.3f}",
        )
    ]
    for key, measure in MEASURES.items():
        found += [
            Finding(
                f"RectGrad with PRR gives the patch the least attribution {measure}.",
                least(metrics, key, "rectgrad_prr"),
                f"lowest: {order(metrics, key)}",
            ),
            Finding(
                f"RectGrad and DeepLIFT give it less than all other baselines {measure}.",
                _both_below(metrics, key),
                f"lowest: {order(metrics, key, 6)}",
            ),
        ]
    return found


def _both_below(metrics: dict[str, Any], key: str) -> bool | None:
    others = {n: metrics[n] for n in methods(metrics) if n not in ("rectgrad", "rectgrad_prr", "deeplift")}
    answers = [least({**others, n: metrics[n]}, key, n) for n in ("rectgrad", "deeplift")]
    return False if False in answers else (None if None in answers else True)
