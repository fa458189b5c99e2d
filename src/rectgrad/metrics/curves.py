"""Insertion and deletion (Petsiuk et al. 2018): the score as pixels are added or removed by importance."""

from __future__ import annotations

import torch
from torch import Tensor

from rectgrad.metrics.baselines import filled
from rectgrad.metrics.checks import images, of_known, over_channels, real, same_pixels
from rectgrad.metrics.scores import Model, Scores, Target


def insertion(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    steps: int = 100,
    baseline: float | Tensor | str = 0.0,
    batch_size: int | None = None,
) -> Tensor:
    """Scores, (N, steps + 1), as the pixels of `inputs` replace those of `baseline`, most important first.

    Column k is the score with floor(k P / steps) of the P pixels in place, all channels at once. Pixels are
    ranked by the channel-summed map, largest first, ties in reading order.

    model: a classifier, whose output for the class `target` is the score; or a function that returns the
    scores itself, one number for each image, and takes no `target`. It runs under no_grad.
    target: an int, or one class for each sample; default: each sample's largest output for `inputs`.
    baseline: a number, a tensor that broadcasts to `inputs`, "mean" (each channel's mean) or "blur" (a
    Gaussian of 5 % of the shorter side).
    batch_size: run the model on this many samples at a time; not for functions that hold labels of all N.
    """
    order = pixel_order("insertion", inputs, maps)
    scores = Scores(model, target, len(inputs), batch_size)
    return of_known(maps, curve(scores, filled(baseline, inputs), inputs, order, steps, clean_last=True))


def deletion(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    steps: int = 100,
    baseline: float | Tensor | str = 0.0,
    batch_size: int | None = None,
) -> Tensor:
    """The reverse of `insertion`: pixels of `baseline` replace those of `inputs`."""
    order = pixel_order("deletion", inputs, maps)
    scores = Scores(model, target, len(inputs), batch_size)
    return of_known(maps, curve(scores, inputs, filled(baseline, inputs), order, steps, clean_last=False))


def area(curve: Tensor) -> Tensor:
    """Area under curves (N, K), K >= 2 equally spaced points over fractions 0 to 1, by trapezoids."""
    if curve.ndim < 1 or curve.shape[-1] < 2:
        raise ValueError(f"area(curve of shape {tuple(curve.shape)}): needs at least 2 points, (N, K >= 2)")
    return torch.trapezoid(real(curve), dx=1 / (curve.shape[-1] - 1))


def pixel_order(call: str, inputs: Tensor, maps: Tensor) -> Tensor:
    """The rank of each pixel, 0 for the most important, in a shape that broadcasts to `inputs`."""
    same_pixels(call, inputs, maps)
    pixels = images(call, maps).sum(1).flatten(1)
    places = pixels.argsort(dim=1, descending=True, stable=True)
    index = torch.arange(places.shape[1], device=places.device).expand(places.shape)
    return over_channels(torch.empty_like(places).scatter_(1, places, index), inputs)


@torch.no_grad()
def curve(
    scores: Scores,
    start: Tensor,
    end: Tensor,
    order: Tensor,
    steps: int,
    clean_last: bool,
    ends: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scores, (N, steps + 1), as pixels of `end` replace those of `start` in the given order.

    The clean inputs, which are the first or the last step, are evaluated first: they determine the class if
    `target` is None. ends: the scores of `start` and `end`, if they are known.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: needs 1 or more")
    pixels = order.shape[-2] * order.shape[-1]
    counts = [k * pixels // steps for k in range(steps + 1)]
    shown = reversed(counts) if clean_last else iter(counts)
    known = {} if ends is None else {0: ends[0], pixels: ends[1]}
    columns = [known[n] if n in known else scores(torch.where(order < n, end, start)) for n in shown]
    return torch.stack(columns[::-1] if clean_last else columns, dim=1)
