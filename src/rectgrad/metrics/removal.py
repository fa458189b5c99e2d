"""ROAD, remove and debias (Rong et al. 2022): the network's answer after imputing pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rectgrad.metrics.checks import images, of_known, real
from rectgrad.metrics.curves import pixel_order
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.imputation import linear_imputation
from rectgrad.metrics.scores import Model, Scores, Target

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
GPU_VALUES = 2**26  # that are imputed at a time: about 5 GB


class Road(NamedTuple):
    """Both (N, fractions). correct: 1 if the class still has the largest output, else 0; its mean over photos
    is the accuracy. probability: the softmax output of the class."""

    correct: Tensor
    probability: Tensor


@torch.no_grad()
def road(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    fractions: Sequence[float] = FRACTIONS,
    order: Literal["most", "least"] = "most",
    noise: float = 0.01,
    seed: int = 0,
    batch_size: int | None = None,
) -> Road:
    """The answer of a classifier after the most (or least) relevant pixels of each image are imputed.

    A removed pixel is the weighted mean of its neighbours (1/6 for direct, 1/12 for diagonal ones; removed
    neighbours are solved for together) plus Gaussian noise, so that the shape of the removed region does not
    give the class away, as it does if pixels become grey. Pixels are ranked by the channel-summed map.

    fractions: shares of the pixels to remove, between 0 and 1; floor(fraction * pixels) are removed.
    order: "most" removes the most relevant pixels first: lower values are better; "least" the least relevant
    ones: higher values are better. The difference of the two is less affected by the network.
    noise: standard deviation, in the units of `inputs`. It depends on the seed and the sample's own values.
    """
    if order not in ("most", "least"):
        raise ValueError(f"road(order={order!r}): needs 'most' or 'least'")
    if not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(f"road(fractions={tuple(fractions)}): needs shares between 0 and 1")
    rank = pixel_order("road", inputs, maps)
    pixels = rank.shape[-2] * rank.shape[-1]
    rank = rank if order == "most" else pixels - 1 - rank
    scores, draws = Scores(model, target, len(inputs), batch_size), Draws(inputs, seed)
    if len(inputs) == 0:
        empty = real(inputs.new_zeros(0, len(fractions)))
        return Road(empty, empty)
    if target is None:  # the class is that of the clean inputs
        scores.classes(scores.outputs(inputs))
    added = (noise * draws.normal(*inputs.shape[1:]) for _ in fractions)
    return Road(*(of_known(maps, each) for each in answers(scores, inputs, rank, fractions, added)))


def answers(
    scores: Scores, inputs: Tensor, rank: Tensor, fractions: Sequence[float], noise: Iterable[Tensor]
) -> Road:
    """The answers after imputing the pixels of lowest rank. noise: for all pixels, for each fraction."""
    pixels = rank.shape[-2] * rank.shape[-1]
    removed = [rank < int(fraction * pixels + 1e-9) for fraction in fractions]
    correct, probability = [], []
    for gone, imputed, added in zip(removed, _imputed(inputs, removed, scores.size), noise, strict=True):
        outputs = scores.outputs(torch.where(gone, (imputed + added).to(inputs.dtype), inputs))
        classes = scores.classes(outputs)
        correct.append(outputs.argmax(1) == classes)
        probability.append(outputs.softmax(1).gather(1, classes[:, None])[:, 0])
    shares = torch.stack(probability, 1)
    return Road(torch.stack(correct, 1).to(shares.dtype), shares)


def _together(inputs: Tensor) -> int:
    """How many masks are solved at a time."""
    return max(GPU_VALUES // max(inputs.numel(), 1), 1) if inputs.is_cuda else 1


def _imputed(inputs: Tensor, removed: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """For each mask, the images without its pixels. In chunks, because the solver needs about 20 times the
    memory of the images; on a GPU the masks are solved together, because its kernels are small."""
    together = _together(inputs)
    for start in range(0, len(removed), together):
        masks = removed[start : start + together]
        many, gone = inputs.repeat(len(masks), *[1] * (inputs.dim() - 1)), torch.cat(list(masks))
        filled = [
            linear_imputation(images("road", x), own.reshape(len(x), 1, *x.shape[-2:]))
            for x, own in zip(many.split(size * together), gone.split(size * together), strict=True)
        ]
        yield from torch.cat(filled).reshape(len(masks), *inputs.shape)
