"""Matched comparisons: the same post-processing for every method, so that only the methods differ."""

import torch
from torch import Tensor

from rectgrad.metrics.checks import ascending, ratio, samples


def times_input(maps: Tensor, inputs: Tensor) -> Tensor:
    """map * input; a map without channels is multiplied with every channel."""
    return maps * inputs


def positive_part(maps: Tensor) -> Tensor:
    """Negative values become 0."""
    return maps.clamp(min=0)


def cut_to_gini(maps: Tensor, gini: float | Tensor) -> Tensor:
    """Maps whose smallest absolute values are 0, as few as needed for a Gini index of at least `gini`.

    gini: a number, or one for each sample. A map that is sparse enough already does not change. Equal values
    are cut together, so the index may be higher than `gini`; the largest value is never cut, so a map of few
    distinct values may not reach it.

    With a_1 <= ... <= a_n the absolute values, a map without its k smallest has the index
    G_k = sum_{i > k} (2 i - n - 1) a_i / (n sum_{i > k} a_i), which grows with k: all G_k come from two
    cumulative sums, and the smallest sufficient k is exact.
    """
    flat = samples("cut_to_gini", maps)
    wanted = torch.as_tensor(gini, dtype=torch.float64, device="cpu").expand(len(flat))
    if bool((wanted < 0).any()) or bool((wanted >= 1).any()):
        raise ValueError(f"cut_to_gini(gini={gini}): needs values from 0 to below 1")
    sizes = flat.abs()
    a = ascending(sizes.cpu().double())  # not every device has float64
    n = a.shape[1]
    weights = torch.arange(1 - n, n, 2, dtype=a.dtype, device=a.device) / n
    indices = ratio(_from_here_on(weights * a), _from_here_on(a))  # G_k, in column k
    k = (indices < wanted[:, None]).sum(1, keepdim=True).clamp(max=n - 1)
    limit = torch.where(k > 0, a.gather(1, (k - 1).clamp(min=0)), -1).to(sizes)
    cut = (sizes <= limit) & (sizes != sizes.amax(1, keepdim=True))
    return torch.where(cut.reshape(maps.shape), 0, maps)


def _from_here_on(values: Tensor) -> Tensor:
    return values.flip(1).cumsum(1).flip(1)
