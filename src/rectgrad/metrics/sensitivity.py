"""Sensitivity-n (Ancona et al. 2018) and max-sensitivity (Yeh et al. 2019), two metrics with similar names.

Sensitivity-n compares sums of attribution with changes of the score. Max-sensitivity measures how much a map
changes when the input changes a little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rectgrad.metrics.baselines import filled
from rectgrad.metrics.checks import images, over_channels, same_pixels, samples
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.scores import Model, Scores, Target

Attribute = Callable[[Tensor, Target], Tensor]
FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


@torch.no_grad()
def sensitivity_n(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    fractions: Sequence[float] = FRACTIONS,
    subsets: int = 100,
    baseline: float | Tensor | str = 0.0,
    seed: int = 0,
    batch_size: int | None = None,
) -> Tensor:
    """Correlations, (N, fractions), of attribution and effect over random subsets S of n pixels.

    r_n = Pearson(sum_{i in S} map_i, f(x) - f(x with the pixels of S replaced by the baseline))

    1 is best. A pixel's attribution is the sum over its channels, and all its channels are replaced. NaN if
    one of the two does not vary, as for a zero map or a constant one.

    fractions: n as shares of the pixels, above 0 and at most 1; at least one pixel is replaced.
    subsets: number of subsets for each n. They depend on the seed and the sample's own values.

    One fraction is the faithfulness correlation of Bhatt et al. (2020). Quantus' SensitivityN is a different
    quantity: for each n it replaces the n largest attributions, and correlates over the samples of a batch.
    """
    same_pixels("sensitivity_n", inputs, maps)
    if not all(0 < fraction <= 1 for fraction in fractions) or subsets < 2:
        given = f"fractions={tuple(fractions)}, subsets={subsets}"
        raise ValueError(f"sensitivity_n({given}): needs shares above 0 and up to 1, and 2 subsets or more")
    pixels, draws = inputs.shape[-2] * inputs.shape[-1], Draws(inputs, seed)
    scores, empty = Scores(model, target, len(inputs), batch_size), filled(baseline, inputs)
    clean, found = scores(inputs), []
    for fraction in fractions:
        size = max(round(fraction * pixels), 1)
        chosen = (draws.subset(pixels, size) for _ in range(subsets))
        found.append(subset_correlation(scores, clean, inputs, empty, maps, chosen))
    return torch.stack(found, 1) if found else clean.new_zeros(len(inputs), 0)


def subset_correlation(
    scores: Scores, clean: Tensor, inputs: Tensor, empty: Tensor, maps: Tensor, subsets: Iterable[Tensor]
) -> Tensor:
    """Pearson's correlation, (N,), of attribution and effect over subsets (N, H * W), boolean."""
    pixels, sums, effects = images("sensitivity_n", maps).sum(1).flatten(1), [], []
    for chosen in subsets:
        sums.append((pixels * chosen).sum(1))
        effects.append(clean - scores(torch.where(over_channels(chosen, inputs), empty, inputs)))
    x, y = (torch.stack(each, 1) for each in (sums, effects))
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    found = (x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()
    rounding = 32 * torch.finfo(x.dtype).eps * pixels.abs().sum(1)  # of sums that are equal
    return torch.where(x.abs().amax(1) > rounding, found, torch.nan)


def max_sensitivity(
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    attribute: Attribute,
    radius: float = 0.02,
    draws: int = 10,
    seed: int = 0,
) -> Tensor:
    """The largest relative change, (N,), of a map under small uniform noise e, |e_i| <= radius.

    max_e ||attribute(x + e) - map|| / ||map||        (Euclidean norms)

    Lower is more stable; 0 means that the map does not change. NaN for a zero map, where Captum divides by 1.

    attribute: a function (inputs, target) -> maps, the one that made `maps`. It receives `target` as given,
    so pass the class: with None, the class of a noisy input may differ.
    radius: in the units of `inputs`. The noise depends on the seed and the sample's own values.
    """
    if draws < 1 or not radius >= 0:
        raise ValueError(f"max_sensitivity(radius={radius}, draws={draws}): needs radius >= 0 and draws >= 1")
    random = Draws(inputs, seed)
    noise = (radius * (2 * random.uniform(*inputs.shape[1:]) - 1) for _ in range(draws))
    return largest_change(inputs, maps, target, attribute, noise)


def largest_change(
    inputs: Tensor, maps: Tensor, target: Target, attribute: Attribute, noise: Iterable[Tensor]
) -> Tensor:
    """Of a map, (N,), when each noise is added to the inputs, relative to the map's norm."""
    before = samples("max_sensitivity", maps.detach())
    largest = before.new_zeros(len(inputs))
    for added in noise:
        changed = attribute(inputs.detach() + added.to(inputs.dtype), target).detach()
        largest = torch.maximum(largest, (samples("max_sensitivity", changed) - before).norm(dim=1))
    norm = before.norm(dim=1)
    return torch.where(norm > 0, largest / norm, torch.nan)
