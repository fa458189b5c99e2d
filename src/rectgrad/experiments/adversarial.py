"""Figure 6b, Appendix A.3: does a map change with the class, or does it only reproduce the image?

The attack is FGSM on the loss of the predicted class, x + 0.01 sign(gradient), clipped to the input range.
For all test images whose class changed we compare the map of the image with the map of the attacked image,
each for its own predicted class: rank correlation and SSIM. A control that is not in the paper separates
change of class from instability: random signs of the same size that keep the class. For the claim that some
methods recover the image we measure the correlation of a map's absolute values with the image's edges
(Sobel).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from rectgrad import image
from rectgrad.experiments import sheets
from rectgrad.experiments.boxes import boxes
from rectgrad.experiments.findings import (
    Finding,
    Table,
    by_method,
    decided,
    mean,
    methods,
    number,
    order,
    others,
)
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, with_final_threshold
from rectgrad.experiments.repeated import measured
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import rank_correlation, ssim
from rectgrad.metrics.controls import edges
from rectgrad.training import logits

TITLE = "Maps of adversarial images (Figure 6b, Appendix A.3)"
PHOTOS = True
PRESETS = {
    "quick": {"images": 300, "eps": 0.01},
    "paper": {"images": 2_000, "eps": 0.01},
}
PAPER = (
    "RectGrad's maps change most when an attack changes the class; Guided Backprop and Deconv recover the "
    "image and hardly change."
)
CAPTIONS = {
    "": "Left and middle: similarity of the maps of an image and of the attacked image (dark: the class "
    "changed; light: control, noise of the same size and the same class). For a method that depends on the "
    "class, dark is well below light; if both are low, the method is unstable. Right: correlation of the "
    "map with the image's edges; if it is high, the map reproduces the image.",
    "pictures": "Images (upper rows) and the attacked images (lower rows), each with the maps for its own "
    "predicted class.",
    "photos": "The same for photos whose class the attack changed.",
}
CHUNK = 500
IMAGE_LIKE = ("guided_backprop", "deconv")


class Scale(NamedTuple):
    """The conversion of pixels from 0 to 1 to inputs: (pixel - mean) / std for each channel."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def input(self, pixel: float, like: Tensor) -> Tensor:
        """The input value of a pixel, for each channel."""
        values = [(pixel - m) / s for m, s in zip(self.mean, self.std, strict=True)]
        return torch.tensor(values, device=like.device).reshape(-1, 1, 1)

    def picture(self, x: Tensor) -> Image.Image:
        """Converts an input back to an image."""
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in self)
        pixels = ((x * std + mean) * 255).round().clamp(0, 255)
        return sheets.picture(pixels.byte().permute(1, 2, 0).numpy())


def attacked(module: nn.Module, x: Tensor, eps: float, scale: Scale = Scale()) -> Tensor:  # noqa: B008 - frozen
    """FGSM on the loss of the predicted class, clipped to the input range."""
    x = x.detach().clone().requires_grad_()
    scores = module(x)
    scores = getattr(scores, "logits", scores)
    (gradient,) = torch.autograd.grad(F.cross_entropy(scores, scores.argmax(1), reduction="sum"), x)
    return (x.detach() + eps * gradient.sign()).clamp(scale.input(0, x), scale.input(1, x))


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    noisy, networks = _noisy(x, lab.numbers["eps"]), lab.networks()
    chosen = [
        lab.parts.part(f"chosen {seed}", partial(_chosen, module, x, noisy, lab.numbers["eps"]))
        for seed, module in zip(lab.seeds, networks, strict=True)
    ]
    changed = sum(len(each["changed"]) for each in chosen)
    if not changed:
        raise ValueError("the attack did not change the class of any image, so there is nothing to measure")
    measure = partial(_measure, x, noisy, lab.numbers["eps"])
    return {
        "changed": changed,
        "of": len(x) * len(networks),
        "kept": float(np.mean([each["kept"] for each in chosen])),
        **spreads(measured(lab, networks, COMPARED, measure, "similarity"), ("rectgrad", *IMAGE_LIKE)),
    }


def _chosen(module: nn.Module, x: Tensor, noisy: Tensor, eps: float) -> dict[str, Any]:
    """The images whose class the attack changes, and how often the control keeps the class."""
    before, control = (logits(module, each).argmax(1) for each in (x, noisy))
    after = logits(module, _moved(module, x, eps)).argmax(1)
    changed = (before != after).nonzero().flatten()
    return {"changed": changed.tolist(), "kept": float((before == control).float().mean())}


def _moved(module: nn.Module, x: Tensor, eps: float) -> Tensor:
    device = next(module.parameters()).device
    return torch.cat([attacked(module, rows.to(device), eps).cpu() for rows in x.split(CHUNK)])


def _noisy(x: Tensor, eps: float) -> Tensor:
    """The control: random signs of the size of the attack. They depend only on the index of the image."""
    signs = [
        torch.randint(0, 2, x.shape[1:], generator=torch.Generator().manual_seed(i)) * 2.0 - 1
        for i in range(len(x))
    ]
    return (x + eps * torch.stack(signs)).clamp(-1, 1)


def _measure(x: Tensor, noisy: Tensor, eps: float, module: nn.Module, method: str) -> dict[str, list[float]]:
    """One value per image; NaN for images whose class the attack did not change."""
    rows = torch.tensor(_chosen(module, x, noisy, eps)["changed"], dtype=torch.long)
    found = _similarities(x[rows], noisy[rows], eps, module, method)
    values = {key: torch.full((len(x),), torch.nan) for key in found}
    for key, each in found.items():
        values[key][rows] = each
    return {key: each.tolist() for key, each in values.items()}


def _similarities(x: Tensor, noisy: Tensor, eps: float, module: nn.Module, method: str) -> dict[str, Tensor]:
    moved = _moved(module, x, eps)
    one, other, control = (comparison_map(module, each, method) for each in (x, moved, noisy))
    differs = logits(module, x).argmax(1) != logits(module, noisy).argmax(1)
    control[differs] = torch.nan  # the control changed the class
    cut, other_cut = (with_final_threshold(each, method) for each in (one, other))
    return {
        "rank": rank_correlation(one, other),
        "rank_control": rank_correlation(one, control),
        "rank_absolute": rank_correlation(one, other, absolute=True),
        "rank_absolute_control": rank_correlation(one, control, absolute=True),
        "rank_thresholded": rank_correlation(cut, other_cut),
        "ssim": ssim(one, other),
        "ssim_control": ssim(one, control),
        "ssim_thresholded": ssim(cut, other_cut),
        "loss": rank_correlation(one, control) - rank_correlation(one, other),
        "edges": edge_correlation(one, x),
    }


def edge_correlation(maps: Tensor, x: Tensor) -> Tensor:
    """Pearson correlation of a map's absolute values with the image's edges; NaN for a constant map."""
    a, b = (m.flatten(1) - m.flatten(1).mean(1, keepdim=True) for m in (maps.abs(), edges(x).sum(1)))
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(15, 4.4), layout="constrained")
    axes = page.subplots(1, 3)
    for axis, key, label in ((axes[0], "rank", "rank correlation"), (axes[1], "ssim", "SSIM")):
        groups = {"class changed": key, "control": f"{key}_control"}
        found = {group: [metrics[name][k] for name in COMPARED] for group, k in groups.items()}
        boxes(axis, COMPARED, found, f"{label} of the two maps")
    boxes(axes[2], COMPARED, {"": [metrics[n]["edges"] for n in COMPARED]}, "correlation with edges")
    axes[0].legend(frameon=False, ncols=2, loc="lower left")
    drawn: dict[str, Any] = {"": page}
    x, _ = lab.test()
    eps = lab.numbers["eps"]
    rows = _chosen(lab.network, x, _noisy(x, eps), eps)["changed"][:3]
    if rows:
        class_name = lab.dataset.classes.__getitem__
        drawn["pictures"] = _sheet(lab.network, x[rows].to(lab.device), eps, class_name, Scale(), sheets.CELL)
    if lab.gallery:
        moved = _photos(lab)
        drawn |= {"photos": moved} if moved is not None else {}
    return drawn


def _photos(lab: Lab) -> Image.Image | None:
    gallery = lab.gallery
    assert gallery is not None
    model = gallery.model
    x, scale = gallery.x.to(lab.device), Scale(model.mean, model.std)
    moved = [attacked(model.module, rows, lab.numbers["eps"], scale) for rows in x.split(8)]
    found = torch.cat([_best(model.module, rows) for rows in moved]).cpu()
    changed = (found != gallery.found).nonzero().flatten()[:2]
    if not len(changed):
        lab.notes.append("the attack did not change the class of any photo")
        return None
    return _sheet(model.module, x[changed], lab.numbers["eps"], model.label, scale, sheets.LARGE)


def _best(module: nn.Module, x: Tensor) -> Tensor:
    scores = module(x)
    return getattr(scores, "logits", scores).argmax(1)


def _sheet(
    module: nn.Module, x: Tensor, eps: float, label: Callable[[int], str], scale: Scale, cell: int
) -> Image.Image:
    both = torch.stack([x, attacked(module, x, eps, scale)], dim=1).flatten(0, 1)
    names = [label(int(c)) for c in _best(module, both)]
    pictures = [scale.picture(each) for each in both.cpu()]
    rows = sheets.rows(pictures, sheets.planes(module, both, sheets.methods()), names)
    return image.sheet(rows, cell=cell)


def tables(metrics: dict[str, Any]) -> list[Table]:
    first = {
        "rank": "rank correlation",
        "rank_control": "rank, control",
        "rank_thresholded": "rank, final threshold",
        "rank_absolute": "rank of absolute values",
        "rank_absolute_control": "rank of absolute values, control",
        "ssim": "SSIM",
        "ssim_control": "SSIM, control",
        "ssim_thresholded": "SSIM, final threshold",
        "edges": "correlation with edges",
    }
    note = (
        f"The attack changed the class in {metrics['changed']} of {metrics['of']} pairs of an image and a "
        f"network. The control is noise of the same size; it keeps the class in {metrics['kept']:.1%} of all "
        "pairs, and only those count in the control columns. Mean with its 95 % interval."
    )
    return [by_method(metrics, first, note)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    loss = {name: metrics[name]["loss"].get("mean", np.nan) for name in methods(metrics)}
    drawing = sorted(loss, key=lambda name: -metrics[name]["edges"]["mean"])
    highest = ", ".join(f"{title_of(name)} {number(metrics[name]['edges']['mean'])}" for name in drawing[:4])
    claims = {
        "rank": "RectGrad's maps change most when the class changes (lowest rank correlation).",
        # RectGrad's maps are not signed; a gradient may keep its positions and flip its signs
        "rank_absolute": "They also change most if signs are ignored (rank correlation of absolute values).",
        "ssim": "They also change most by SSIM.",
    }
    found = [
        decided(
            claim,
            others(metrics, key),
            f"lowest: {order(metrics, key)}; RectGrad {mean(metrics['rectgrad'][key])}",
        )
        for key, claim in claims.items()
    ]
    return [
        *found,
        decided(
            "The class causes the change: RectGrad changes most relative to the control.",
            others(metrics, "loss", sign=-1),
            "loss of rank correlation relative to the control: "
            + ", ".join(f"{title_of(n)} {number(loss[n])}" for n in sorted(loss, key=lambda n: -loss[n])),
        ),
        decided(
            "Guided Backprop and Deconv reproduce the image: their maps correlate most with its edges.",
            [each for base in IMAGE_LIKE for each in others(metrics, "edges", base, IMAGE_LIKE, sign=-1)],
            f"correlation with edges, highest: {highest}",
        ),
    ]
