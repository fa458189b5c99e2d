"""Class activation maps, from an activation a and the gradient R of the score there, both (N, C, d1..dk).

Sums over channels c and positions p:

    gradcam     relu(sum_c a * mean_p R)                                     Selvaraju et al. 2017
    hirescam    relu(sum_c a * R)                                            Draelos and Carin 2020
    layercam    relu(sum_c a * relu(R))                                      Jiang et al. 2021
    gradcam++   relu(sum_c a * sum_p relu(R) R^2 / (2 R^2 + R^3 sum_p a))    Chattopadhay et al. 2018

Grad-CAM++ explains exp(score); the factor exp(score) of its weights is left out: it only scales a map.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.kernels.reference import wide

_Terms = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
VARIANTS: dict[str, _Terms] = {
    "gradcam": lambda a, R, p: a * R.mean(p, keepdim=True),
    "hirescam": lambda a, R, p: a * R,
    "layercam": lambda a, R, p: a * R.clamp(min=0),
    "gradcam++": lambda a, R, p: a * (R.clamp(min=0) / (2 + R * a.sum(p, True))).sum(p, True),  # over R^2
}
_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


def class_map(a: Tensor, R: Tensor, variant: str) -> Tensor:
    """(N, 1, d1..dk), in float32 at least."""
    terms = VARIANTS[variant](wide(a), wide(R), tuple(range(2, a.dim())))
    return terms.sum(1, keepdim=True).clamp(min=0)


def resized(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """x, (N, C, d1..dk), with other sizes."""
    return F.interpolate(x, tuple(sizes), mode=_MODES[x.dim()], align_corners=False)


def placed(cam: Tensor, rows: Tensor, maps: Tensor) -> Tensor:
    """`maps`, (N, C, ...), with the class map of some rows: a position's value is the sum over channels.
    Maps without such positions are as before."""
    if maps.dim() != cam.dim():
        return maps
    values = (resized(cam, maps.shape[2:]) / maps.shape[1]).to(maps)
    return torch.where(rows.to(maps.device).reshape(-1, *(1,) * (maps.dim() - 1)), values, maps)
