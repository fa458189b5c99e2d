"""Infidelity (Yeh et al. 2019): how badly a map predicts the effect of perturbations on the score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rectgrad.metrics.baselines import filled
from rectgrad.metrics.checks import over_channels, ratio, samples
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.scores import Model, Scores, Target

Perturbation = Callable[[Tensor, int], Tensor]


@torch.no_grad()
def infidelity(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    perturbation: str | Perturbation = "square",
    draws: int = 50,
    noise: float = 0.1,
    side: int | None = None,
    baseline: float | Tensor | str = 0.0,
    multiplied: bool = False,
    optimal_scaling: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> Tensor:
    """Mean squared error, (N,), with which the map predicts how perturbations I change the score f.

    INFD = E_I [(sum(I * map) - (f(x) - f(x - I)))^2]

    Lower is better. The value has the units of the squared score.

    maps: of the shape of `inputs`.
    perturbation: "square": a random square becomes the baseline; "gaussian": I is normal noise; or a function
    (inputs, j) -> I for the j-th draw.
    noise: standard deviation of "gaussian", in the units of `inputs`.
    side: of the squares, in pixels; default: an eighth of the image's shorter side.
    multiplied: the maps contain the factor x - baseline already (gradient times input, integrated gradients,
    DeepLIFT, LRP), so I is divided by it.
    optimal_scaling: multiply each map by the factor that gives the lowest value, E[c d] / E[c^2] with
    c = sum(I * map) and d = f(x) - f(x - I): for maps whose scale has no meaning.
    """
    if maps.shape != inputs.shape:
        shapes = f"inputs of shape {tuple(inputs.shape)}, maps of shape {tuple(maps.shape)}"
        raise ValueError(f"infidelity({shapes}): needs maps of the shape of the inputs")
    if draws < 1:
        raise ValueError(f"infidelity(draws={draws}): needs 1 or more")
    empty = filled(baseline, inputs)
    perturb = _named(perturbation, inputs, empty, noise, side, seed)
    scores, flat = Scores(model, target, len(inputs), batch_size), samples("infidelity", maps)
    clean, predicted, changes = scores(inputs), [], []
    for j in range(draws):
        change = perturb(inputs, j)
        factor = ratio(change, inputs - empty) if multiplied else change
        predicted.append((samples("infidelity", factor) * flat).sum(1))
        changes.append(clean - scores(inputs - change))
    c, d = torch.stack(predicted, 1), torch.stack(changes, 1)
    if optimal_scaling:
        c = c * ratio((c * d).mean(1), c.square().mean(1))[:, None]
    return (c - d).square().mean(1)


def _named(
    perturbation: str | Perturbation,
    inputs: Tensor,
    empty: Tensor,
    noise: float,
    side: int | None,
    seed: int,
) -> Perturbation:
    if not isinstance(perturbation, str):
        return perturbation
    if perturbation not in ("square", "gaussian"):
        needs = "needs 'square', 'gaussian' or a function (inputs, j) -> I"
        raise ValueError(f"infidelity(perturbation={perturbation!r}): {needs}")
    random = Draws(inputs, seed)
    if perturbation == "gaussian":
        return lambda x, _: (noise * random.normal(*x.shape[1:])).to(x.dtype)
    return lambda x, _: torch.where(random_square(random, x, side), x - empty, 0)


def random_square(random: Draws, inputs: Tensor, side: int | None = None) -> Tensor:
    """True in a random square of each sample, in a shape that broadcasts to `inputs`."""
    height, width = inputs.shape[-2:]
    side = max(min(height, width) // 8, 1) if side is None else side
    if not 1 <= side <= min(height, width):
        raise ValueError(f"infidelity(side={side}) for {height} by {width} pixels: needs squares that fit")
    top, left = (
        (part * (size - side + 1)).long().clamp(max=size - side)
        for part, size in zip(random.uniform(2).unbind(1), (height, width), strict=True)
    )
    rows = torch.arange(height, device=top.device) - top[:, None]
    columns = torch.arange(width, device=left.device) - left[:, None]
    square = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return over_channels(square, inputs)
