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
from rectgrad.experiments.findings import Finding, Table, below_all, by_method, mean, methods, number, order
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED, comparison_map, with_final_threshold
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import rank_correlation, ssim
from rectgrad.training import logits

TITLE = "Maps of adversarial images (Figure 6b, Appendix A.3)"
PHOTOS = True
PRESETS = {
    "quick": {"images": 1000, "changed_at_most": 100, "eps": 0.01},
    "paper": {"images": 10_000, "changed_at_most": 10_000, "eps": 0.01},
}
PAPER = (
    "RectGrad's maps change most when an attack changes the class; Guided Backprop and Deconv recover the "
    "image and hardly change."
)
CAPTIONS = {
    "": "Left and middle: similarity of the maps of an image and of the attacked image (blue: the class "
    "changed; orange: control, noise of the same size and the same class). For a method that depends on the "
    "class, blue is well below orange; if both are low, the method is unstable. Right: correlation of the "
    "map with the image's edges; if it is high, the map reproduces the image.",
    "pictures": "Images (upper rows) and the attacked images (lower rows), each with the maps for its own "
    "predicted class.",
    "photos": "The same for photos whose class the attack changed.",
}
CHUNK = 500


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
    chosen = lab.parts.part("chosen", partial(_chosen, lab))
    rows = torch.tensor(chosen["changed"], dtype=torch.long)
    if not len(rows):
        raise ValueError("the attack did not change the class of any image, so there is nothing to measure")
    x = lab.test()[0][rows]
    chunks = list(zip(x.split(CHUNK), rows.split(CHUNK), strict=True))
    values: dict[str, dict[str, list[float]]] = {method: {} for method in COMPARED}
    with lab.progress(len(COMPARED) * len(chunks), "adversarial") as advance:
        for method in COMPARED:
            for i, (part, numbers) in enumerate(chunks):
                make = partial(_measure, lab, part, numbers, method)
                for key, found in lab.parts.part(f"{method} {i}", make).items():
                    values[method].setdefault(key, []).extend(found)
                advance()
    return {"changed": len(rows), "of": chosen["of"], "kept": chosen["kept"], **spreads(values)}


def _chosen(lab: Lab) -> dict[str, Any]:
    """The images whose class the attack changes, and how often the control keeps the class."""
    x, _ = lab.test()
    before = logits(lab.network, x).argmax(1)
    after = torch.cat([_after(lab, rows) for rows in x.split(CHUNK)])
    control = logits(lab.network, _noisy(lab, x, torch.arange(len(x)))).argmax(1)
    changed = (before != after).nonzero().flatten()
    rows = changed[: lab.numbers["changed_at_most"]]
    return {"changed": rows.tolist(), "of": len(x), "kept": float((before == control).float().mean())}


def _after(lab: Lab, x: Tensor) -> Tensor:
    moved = attacked(lab.network, x.to(lab.device), lab.numbers["eps"])
    return logits(lab.network, moved).argmax(1)


def _noisy(lab: Lab, x: Tensor, numbers: Tensor) -> Tensor:
    """The control: random signs of the size of the attack. They depend only on the index of the image."""
    signs = [
        torch.randint(0, 2, x.shape[1:], generator=torch.Generator().manual_seed(int(i))) * 2.0 - 1
        for i in numbers
    ]
    return (x + lab.numbers["eps"] * torch.stack(signs)).clamp(-1, 1)


def _measure(lab: Lab, x: Tensor, numbers: Tensor, method: str) -> dict[str, list[float]]:
    module, noisy = lab.network, _noisy(lab, x, numbers)
    moved = attacked(module, x.to(lab.device), lab.numbers["eps"]).cpu()
    one, other, control = (comparison_map(module, each, method) for each in (x, moved, noisy))
    control[logits(module, x).argmax(1) != logits(module, noisy).argmax(1)] = (
        torch.nan
    )  # the control changed the class
    cut, other_cut = (with_final_threshold(each, method) for each in (one, other))
    return {
        "rank": rank_correlation(one, other).tolist(),
        "rank_control": rank_correlation(one, control).tolist(),
        "rank_absolute": rank_correlation(one, other, absolute=True).tolist(),
        "rank_absolute_control": rank_correlation(one, control, absolute=True).tolist(),
        "rank_thresholded": rank_correlation(cut, other_cut).tolist(),
        "ssim": ssim(one, other).tolist(),
        "ssim_control": ssim(one, control).tolist(),
        "ssim_thresholded": ssim(cut, other_cut).tolist(),
        "edges": edge_correlation(one, x).tolist(),
    }


def edges(x: Tensor) -> Tensor:
    """(N, H, W): Sobel magnitude of the grey image, with replicated borders."""
    across = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    grey = F.pad(x.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    sides = [F.conv2d(grey, kernel.reshape(1, 1, 3, 3)) for kernel in (across, across.T)]
    return torch.stack(sides).square().sum(0).sqrt().squeeze(1)


def edge_correlation(maps: Tensor, x: Tensor) -> Tensor:
    """Pearson correlation of a map's absolute values with the image's edges; NaN for a constant map."""
    a, b = (values.flatten(1) - values.flatten(1).mean(1, keepdim=True) for values in (maps.abs(), edges(x)))
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
    rows = _chosen(lab)["changed"][:3]
    if rows:
        class_name = lab.dataset.classes.__getitem__
        eps, shown = lab.numbers["eps"], x[rows].to(lab.device)
        drawn["pictures"] = _sheet(lab.network, shown, eps, class_name, Scale(), sheets.CELL)
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
        f"The attack changed the class of {metrics['changed']} of {metrics['of']} images. The control is "
        f"noise of the same size; it keeps the class of {metrics['kept']:.1%} of all images, and only those "
        "count in the control columns. Mean with its 95 % interval."
    )
    return [by_method(metrics, first, note)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    loss = {name: _beyond(metrics[name]) for name in methods(metrics)}
    drawing = sorted(loss, key=lambda name: -metrics[name]["edges"]["mean"])
    highest = ", ".join(f"{title_of(name)} {number(metrics[name]['edges']['mean'])}" for name in drawing[:4])
    enough = metrics["changed"] >= 100
    return [
        Finding(
            "RectGrad's maps change most when the class changes (lowest rank correlation).",
            below_all(metrics, "rank", ("rectgrad_prr",)) if enough else None,
            f"lowest: {order(metrics, 'rank')}",
        ),
        Finding(  # RectGrad's maps are not signed; a gradient may keep its positions and flip its signs
            "They also change most if signs are ignored (rank correlation of absolute values).",
            below_all(metrics, "rank_absolute", ("rectgrad_prr",)) if enough else None,
            f"lowest: {order(metrics, 'rank_absolute')}; "
            f"RectGrad {mean(metrics['rectgrad']['rank_absolute'])}",
        ),
        Finding(
            "They also change most by SSIM.",
            below_all(metrics, "ssim", ("rectgrad_prr",)) if enough else None,
            f"lowest: {order(metrics, 'ssim')}",
        ),
        Finding(
            "The class causes the change: RectGrad changes most relative to the control.",
            _most({n: _interval(n, metrics) for n in loss}, ["rectgrad"]) if enough else None,
            "loss of rank correlation relative to the control: "
            + ", ".join(f"{title_of(n)} {number(loss[n])}" for n in sorted(loss, key=lambda n: -loss[n])),
        ),
        Finding(
            "Guided Backprop and Deconv reproduce the image: their maps correlate most with its edges.",
            _most({n: metrics[n]["edges"]["interval"] for n in loss}, ["guided_backprop", "deconv"])
            if enough
            else None,
            f"correlation with edges, highest: {highest}",
        ),
    ]


def _interval(name: str, metrics: dict[str, Any]) -> list[float]:
    """95 % interval of the loss relative to the control, from the standard deviations of both."""
    one, other = metrics[name]["rank"], metrics[name]["rank_control"]
    error = 1.96 * float(np.hypot(one["std"], other["std"])) / one["n"] ** 0.5
    return [_beyond(metrics[name]) - error, _beyond(metrics[name]) + error]


def _most(intervals: dict[str, list[float]], names: list[str]) -> bool | None:
    """Whether the named methods are above all others; None if intervals overlap."""
    others = [interval for name, interval in intervals.items() if name not in names]
    ours = [intervals[name] for name in names]
    if any(other[0] > mine[1] for other in others for mine in ours):
        return False
    return True if all(other[1] < mine[0] for other in others for mine in ours) else None


def _beyond(found: dict[str, Any]) -> float:
    return found["rank_control"]["mean"] - found["rank"]["mean"]
