"""Figure 6b, Appendix A.3: does a map change when the class does, and does it only redraw the picture?

The attack is FGSM on the loss of the predicted class, x + 0.01 sign(gradient), clipped to the input range.
Over all test pictures whose class changed, each map is for its own predicted class: rank correlation and
SSIM between the map of the picture and the map of its attacked twin. A control that the paper does not have
tells change of class from unsteadiness: the same pictures under random signs of the same size, where the
class stayed. For the claim that some methods recover the image: correlation of a map's absolute values with
the picture's edges (Sobel).
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
from rectgrad.experiments.maps import COMPARED, comparison_map, finally_thresholded
from rectgrad.experiments.statistics import by_method as spreads
from rectgrad.methods.catalog import title_of
from rectgrad.metrics import rank_correlation, ssim
from rectgrad.training import logits

TITLE = "Maps of attacked pictures (Figure 6b, Appendix A.3)"
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
    "": "Left and middle: how alike the maps of a picture and of its attacked twin are (blue: the class "
    "changed; orange: control, noise of the same size and the same class). A method that follows the class "
    "has blue well below orange; low in both is unsteadiness. Right: correlation of the map with the "
    "picture's edges: high means that the map redraws the picture.",
    "pictures": "Pictures (upper rows) and their attacked twins (lower rows), each with the maps for its own "
    "predicted class.",
    "photos": "The same for photos whose class the attack changed.",
}
CHUNK = 500


class Scale(NamedTuple):
    """How pixels from 0 to 1 become inputs: (pixel - mean) / std for each colour."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def input(self, pixel: float, like: Tensor) -> Tensor:
        """What a pixel of this value is for the network."""
        values = [(pixel - m) / s for m, s in zip(self.mean, self.std, strict=True)]
        return torch.tensor(values, device=like.device).reshape(-1, 1, 1)

    def picture(self, x: Tensor) -> Image.Image:
        """An input as it looks."""
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in self)
        pixels = ((x * std + mean) * 255).round().clamp(0, 255)
        return sheets.picture(pixels.byte().permute(1, 2, 0).numpy())


def attacked(module: nn.Module, x: Tensor, eps: float, scale: Scale = Scale()) -> Tensor:  # noqa: B008 - frozen
    """FGSM on the loss of the predicted class, clipped to the range of inputs."""
    x = x.detach().clone().requires_grad_()
    scores = module(x)
    scores = getattr(scores, "logits", scores)
    (gradient,) = torch.autograd.grad(F.cross_entropy(scores, scores.argmax(1), reduction="sum"), x)
    return (x.detach() + eps * gradient.sign()).clamp(scale.input(0, x), scale.input(1, x))


def run(lab: Lab) -> dict[str, Any]:
    chosen = lab.parts.part("chosen", partial(_chosen, lab))
    rows = torch.tensor(chosen["changed"], dtype=torch.long)
    if not len(rows):
        raise ValueError("the attack changed the class of no picture: nothing to measure")
    x = lab.test()[0][rows]
    chunks = list(zip(x.split(CHUNK), rows.split(CHUNK), strict=True))
    values: dict[str, dict[str, list[float]]] = {method: {} for method in COMPARED}
    with lab.watch(len(COMPARED) * len(chunks), "adversarial") as advance:
        for method in COMPARED:
            for i, (part, numbers) in enumerate(chunks):
                make = partial(_measured, lab, part, numbers, method)
                for key, found in lab.parts.part(f"{method} {i}", make).items():
                    values[method].setdefault(key, []).extend(found)
                advance()
    return {"changed": len(rows), "of": chosen["of"], "kept": chosen["kept"], **spreads(values)}


def _chosen(lab: Lab) -> dict[str, Any]:
    """The pictures whose class an attack changes, and how often the control keeps it."""
    x, _ = lab.test()
    before = logits(lab.network, x).argmax(1)
    after = torch.cat([_after(lab, rows) for rows in x.split(CHUNK)])
    beside = logits(lab.network, _noisy(lab, x, torch.arange(len(x)))).argmax(1)
    changed = (before != after).nonzero().flatten()
    rows = changed[: lab.numbers["changed_at_most"]]
    return {"changed": rows.tolist(), "of": len(x), "kept": float((before == beside).float().mean())}


def _after(lab: Lab, x: Tensor) -> Tensor:
    moved = attacked(lab.network, x.to(lab.device), lab.numbers["eps"])
    return logits(lab.network, moved).argmax(1)


def _noisy(lab: Lab, x: Tensor, numbers: Tensor) -> Tensor:
    """The control: random signs of the attack's size, that depend on the picture's number alone."""
    signs = [
        torch.randint(0, 2, x.shape[1:], generator=torch.Generator().manual_seed(int(i))) * 2.0 - 1
        for i in numbers
    ]
    return (x + lab.numbers["eps"] * torch.stack(signs)).clamp(-1, 1)


def _measured(lab: Lab, x: Tensor, numbers: Tensor, method: str) -> dict[str, list[float]]:
    module, noisy = lab.network, _noisy(lab, x, numbers)
    moved = attacked(module, x.to(lab.device), lab.numbers["eps"]).cpu()
    one, other, control = (comparison_map(module, each, method) for each in (x, moved, noisy))
    control[logits(module, x).argmax(1) != logits(module, noisy).argmax(1)] = torch.nan  # no control there
    cut, other_cut = (finally_thresholded(each, method) for each in (one, other))
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
    """(N, H, W): Sobel's magnitude of the grey picture; the border repeats its neighbours."""
    across = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    grey = F.pad(x.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    sides = [F.conv2d(grey, kernel.reshape(1, 1, 3, 3)) for kernel in (across, across.T)]
    return torch.stack(sides).square().sum(0).sqrt().squeeze(1)


def edge_correlation(maps: Tensor, x: Tensor) -> Tensor:
    """Pearson's correlation of a map's absolute values with the picture's edges; NaN for a constant map."""
    a, b = (values.flatten(1) - values.flatten(1).mean(1, keepdim=True) for values in (maps.abs(), edges(x)))
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    page = Figure(figsize=(15, 4.4), layout="constrained")
    axes = page.subplots(1, 3)
    for axis, key, label in ((axes[0], "rank", "rank correlation"), (axes[1], "ssim", "SSIM")):
        groups = {"class changed": key, "control": f"{key}_control"}
        found = {said: [metrics[name][k] for name in COMPARED] for said, k in groups.items()}
        boxes(axis, COMPARED, found, f"{label} of the two maps")
    boxes(axes[2], COMPARED, {"": [metrics[n]["edges"] for n in COMPARED]}, "correlation with edges")
    axes[0].legend(frameon=False, ncols=2, loc="lower left")
    drawn: dict[str, Any] = {"": page}
    x, _ = lab.test()
    rows = _chosen(lab)["changed"][:3]
    if rows:
        said = lab.dataset.classes.__getitem__
        eps, shown = lab.numbers["eps"], x[rows].to(lab.device)
        drawn["pictures"] = _sheet(lab.network, shown, eps, said, Scale(), sheets.CELL)
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
        lab.notes.append("the attack changed the class of no photo")
        return None
    return _sheet(model.module, x[changed], lab.numbers["eps"], model.label, scale, sheets.LARGE)


def _best(module: nn.Module, x: Tensor) -> Tensor:
    scores = module(x)
    return getattr(scores, "logits", scores).argmax(1)


def _sheet(
    module: nn.Module, x: Tensor, eps: float, said: Callable[[int], str], scale: Scale, cell: int
) -> Image.Image:
    both = torch.stack([x, attacked(module, x, eps, scale)], dim=1).flatten(0, 1)
    names = [said(int(c)) for c in _best(module, both)]
    pictures = [scale.picture(each) for each in both.cpu()]
    rows = sheets.rows(pictures, sheets.planes(module, both, sheets.methods()), names)
    return image.sheet(rows, cell=cell)


def tables(metrics: dict[str, Any]) -> list[Table]:
    first = {
        "rank": "rank correlation",
        "rank_control": "rank, control",
        "rank_thresholded": "rank, final threshold",
        "rank_absolute": "rank of absolute values",
        "rank_absolute_control": "its control",
        "ssim": "SSIM",
        "ssim_control": "SSIM, control",
        "ssim_thresholded": "SSIM, final threshold",
        "edges": "correlation with edges",
    }
    note = (
        f"{metrics['changed']} pictures of {metrics['of']} whose class the attack changed. The "
        f"control is noise of the same size; it keeps the class of {metrics['kept']:.1%}, and only those "
        "count there. Mean with its 95 % interval."
    )
    return [by_method(metrics, first, note)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    beside = {name: _beyond(metrics[name]) for name in methods(metrics)}
    drawing = sorted(beside, key=lambda name: -metrics[name]["edges"]["mean"])
    said = ", ".join(f"{title_of(name)} {number(metrics[name]['edges']['mean'])}" for name in drawing[:4])
    enough = metrics["changed"] >= 100
    return [
        Finding(
            "RectGrad's maps change most when the class does (lowest rank correlation).",
            below_all(metrics, "rank", ("rectgrad_prr",)) if enough else None,
            f"lowest: {order(metrics, 'rank')}",
        ),
        Finding(  # RectGrad's maps have no sign; a gradient map may keep its places and turn its signs
            "They change most also where signs do not count (rank correlation of absolute values).",
            below_all(metrics, "rank_absolute", ("rectgrad_prr",)) if enough else None,
            f"lowest: {order(metrics, 'rank_absolute')}; "
            f"RectGrad {mean(metrics['rectgrad']['rank_absolute'])}",
        ),
        Finding(
            "They change most also by SSIM.",
            below_all(metrics, "ssim", ("rectgrad_prr",)) if enough else None,
            f"lowest: {order(metrics, 'ssim')}",
        ),
        Finding(
            "The change is due to the class: RectGrad changes most beyond what the control changes.",
            _most({n: _interval(n, metrics) for n in beside}, ["rectgrad"]) if enough else None,
            "rank correlation lost beyond the control's: "
            + ", ".join(
                f"{title_of(n)} {number(beside[n])}" for n in sorted(beside, key=lambda n: -beside[n])
            ),
        ),
        Finding(
            "Guided Backprop and Deconv redraw the picture: their maps follow its edges most.",
            _most({n: metrics[n]["edges"]["interval"] for n in beside}, ["guided_backprop", "deconv"])
            if enough
            else None,
            f"correlation with edges, highest: {said}",
        ),
    ]


def _interval(name: str, metrics: dict[str, Any]) -> list[float]:
    """Of what is lost beyond the control, 95 %, from the spreads of both."""
    one, other = metrics[name]["rank"], metrics[name]["rank_control"]
    error = 1.96 * float(np.hypot(one["std"], other["std"])) / one["n"] ** 0.5
    return [_beyond(metrics[name]) - error, _beyond(metrics[name]) + error]


def _most(intervals: dict[str, list[float]], names: list[str]) -> bool | None:
    """Whether the named lie above all others; None where intervals overlap."""
    others = [interval for name, interval in intervals.items() if name not in names]
    ours = [intervals[name] for name in names]
    if any(other[0] > mine[1] for other in others for mine in ours):
        return False
    return True if all(other[1] < mine[0] for other in others for mine in ours) else None


def _beyond(found: dict[str, Any]) -> float:
    return found["rank_control"]["mean"] - found["rank"]["mean"]
