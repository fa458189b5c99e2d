"""Figures 1 and 6, Appendix A.3: all methods side by side, without and with the final threshold of the
baselines; pairs of images of one class; RectGrad with and without its two tricks.

We measure the sparsity of maps: the Gini index and the share of pixels that are exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor, nn

from rectgrad import image
from rectgrad.experiments import sheets
from rectgrad.experiments.findings import Finding, Table, by_method, decided, order, others
from rectgrad.experiments.gallery import pairs
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, nan_where_zero, with_final_threshold
from rectgrad.experiments.repeated import measured
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.methods import RectGrad
from rectgrad.metrics import gini, zero_share

TITLE = "All methods side by side (Figures 1 and 6, Appendix A.3)"
PHOTOS = True
PRESETS = {"quick": {"images": 50}, "paper": {"images": 500}}
PAPER = "Only RectGrad's maps are free of background noise, even compared with thresholded baselines."
CAPTIONS = {
    "photos": "Photos and their maps; red is evidence for the class, blue against it. Colour in the "
    "background is noise. The number is the Gini index: the higher, the sparser.",
    "photos-thresholded": "The same with the final threshold: everything below the 95th percentile of each "
    "baseline's map is zero. RectGrad has no final threshold. Check whether the rest is on the object.",
    "pairs": "Two images of one class in adjacent rows: a coherent method highlights the same parts.",
    "pairs-photos": "Two photos with the same predicted class in adjacent rows.",
    "tricks": "RectGrad with and without the padding trick and the proportional redistribution rule (PRR). "
    "Without the padding trick, lines may appear along the border; with PRR, maps are smoother.",
    "tricks-photos": "The same on photos. The padding trick matters where borders were highlighted; PRR only "
    "affects max pooling and changes nothing in a network without it.",
}
TRICKS = {
    "padding trick": RectGrad(positive_only=False),
    "none": RectGrad(padding_trick=False, positive_only=False),
    "both": RectGrad(prr=True, positive_only=False),
    "PRR": RectGrad(padding_trick=False, prr=True, positive_only=False),
}


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    return spreads(measured(lab, lab.networks(), COMPARED, partial(_sparsity, x), "sparsity"))


def _sparsity(x: Tensor, module: nn.Module, method: str) -> dict[str, list[float]]:
    maps = comparison_map(module, x, method)
    cut = with_final_threshold(maps, method)
    return {
        "gini": nan_where_zero(gini(maps), maps),
        "gini_thresholded": nan_where_zero(gini(cut), cut),
        "zero_share": nan_where_zero(zero_share(maps), maps),
        "zero_share_thresholded": nan_where_zero(zero_share(cut), cut),
    }


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    x, images = lab.test()
    found = pairs(images.labels.tolist())[:4]
    rows = [row for pair in found for row in pair]
    pictures = [sheets.picture(images.pixels[row]) for row in rows]
    drawn: dict[str, Any] = {}
    if lab.gallery:
        drawn |= _photos(lab)
    drawn["pairs"] = _sheet(pictures, sheets.planes(lab.network, x[rows], sheets.methods()), sheets.CELL)
    drawn["tricks"] = _sheet(pictures, sheets.planes(lab.network, x[rows], TRICKS), sheets.CELL)
    if lab.gallery:
        tricks = sheets.planes(lab.gallery.model.module, lab.gallery.x[:4], TRICKS)
        drawn["tricks-photos"] = _sheet(lab.gallery.crops[:4], tricks, sheets.LARGE, lab.gallery.labels())
    return drawn


def _photos(lab: Lab) -> dict[str, Image.Image]:
    gallery = lab.gallery
    assert gallery is not None
    shown = list(range(min(len(gallery.crops), 6)))
    drawn = {}
    twins = [row for pair in pairs(gallery.found.tolist())[:4] for row in pair]
    for rows, names in ((shown, ("photos", "photos-thresholded")), (twins, ("pairs-photos",))):
        if rows:
            maps = sheets.planes(gallery.model.module, gallery.x[rows], sheets.methods())
            crops, labels = [gallery.crops[r] for r in rows], [gallery.labels()[r] for r in rows]
            for name in names:
                cut = name.endswith("thresholded")
                drawn[name] = _sheet(crops, maps, sheets.LARGE, labels, cut)
    return drawn


def _sheet(
    pictures: Sequence[Image.Image],
    maps: dict[str, Any],
    cell: int,
    labels: Sequence[str] = (),
    cut: bool = False,
) -> Image.Image:
    return image.sheet(sheets.rows(pictures, maps, labels, cut), cell=cell)


def tables(metrics: dict[str, Any]) -> list[Table]:
    columns = {
        "gini": "Gini index",
        "gini_thresholded": "Gini, with final threshold",
        "zero_share": "zero pixels",
        "zero_share_thresholded": "zero pixels, with final threshold",
    }
    return [
        by_method(
            metrics,
            columns,
            "Test images of the dataset; mean with its 95 % interval over networks and images.",
        )
    ]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    return [
        decided(
            "RectGrad's maps are the sparsest.",
            others(metrics, "gini", sign=-1),
            f"Gini index, lowest first: {order(metrics, 'gini', len(metrics))}",
        ),
        decided(
            "RectGrad's maps are also sparser than thresholded baselines.",
            others(metrics, "gini_thresholded", sign=-1),
            f"Gini index, lowest first: {order(metrics, 'gini_thresholded', len(metrics))}",
        ),
        Finding(
            "Only RectGrad is free of background noise.",
            None,
            "cannot be decided from pictures; noise-level measures it on images with object masks",
        ),
    ]
