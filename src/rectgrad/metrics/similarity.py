"""Similarity of two maps."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.metrics.checks import images, order, same_shape, samples

SSIM_WINDOW = 7


def rank_correlation(a: Tensor, b: Tensor, absolute: bool = False) -> Tensor:
    """Spearman's correlation over all entries of a sample: Pearson's correlation of their ranks.

    Tied entries share the mean of their ranks, as in scipy; `absolute` ranks |a| and |b|. A constant map
    has no ranking, so the result is NaN, as in scipy.
    """
    same_shape("rank_correlation", a, b)
    return _correlation(ranked(a, absolute), ranked(b, absolute))


def rank_correlations(a: Tensor, others: Iterable[Tensor], absolute: bool = False) -> list[Tensor]:
    """`rank_correlation` of the same maps with several others: `a` is ranked once."""
    x, found = ranked(a, absolute), []
    for b in others:
        same_shape("rank_correlation", a, b)
        found.append(_correlation(x, ranked(b, absolute)))
    return found


def ssim(a: Tensor, b: Tensor, data_range: float | None = None) -> Tensor:
    """Structural similarity, mean over channels and all 7x7 windows that fit (skimage's defaults).

    S = (2 u_a u_b + C1) (2 v_ab + C2) / ((u_a^2 + u_b^2 + C1) (v_a + v_b + C2))

    with window means u, sample (co)variances v, C1 = (0.01 R)^2 and C2 = (0.03 R)^2. R is `data_range`, by
    default max - min over both maps of a sample and all channels. Equal maps give 1, also if constant.
    """
    same_shape("ssim", a, b)
    x, y = images("ssim", a), images("ssim", b)
    _check_ssim(x, data_range)
    R = _joint_range(x, y) if data_range is None else data_range
    # S does not change with scale; dividing by R keeps the squares of tiny maps from underflowing
    return _window_ssim(x / R, y / R).flatten(1).mean(1)


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation of centred rows."""
    lengths = x.square().sum(1).sqrt() * y.square().sum(1).sqrt()
    return ((x * y).sum(1) / lengths).clamp(-1, 1)


def ranked(maps: Tensor, absolute: bool) -> Tensor:
    """Twice (average rank - mean rank) of each entry, (N, entries).

    In sorted order, equal values are a run from index `first` to `last`. Their 1-based average rank is
    (first + last) / 2 + 1 and the mean rank (n + 1) / 2, so the difference comes from indices alone, exactly.
    """
    values = samples("rank_correlation", maps.detach())
    values = values.abs() if absolute else values
    places, n = order(values), values.shape[1]
    ordered = values.gather(1, places)
    index = torch.arange(n, dtype=torch.int32, device=values.device).expand(ordered.shape)
    differs = ordered[:, 1:] != ordered[:, :-1]
    first, last = index.clone(), index.clone()
    first[:, 1:].masked_fill_(~differs, 0)
    last[:, :-1].masked_fill_(~differs, n)
    twice = first.cummax(1).values + last.flip(1).cummin(1).values.flip(1) + (1 - n)
    ranks = torch.empty_like(values).scatter_(1, places, twice.to(values.dtype))
    return ranks.masked_fill(values.isnan(), torch.nan)


def _check_ssim(images: Tensor, data_range: float | None) -> None:
    height, width = images.shape[-2:]
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(
            f"ssim(maps of {height} by {width} pixels): needs at least {SSIM_WINDOW} by {SSIM_WINDOW}"
        )
    if data_range is not None and not data_range > 0:
        raise ValueError(f"ssim(data_range={data_range}): needs a positive number, or None")


def _joint_range(x: Tensor, y: Tensor) -> Tensor:
    """max - min over both maps of each sample, (N, 1, 1, 1)."""
    both = torch.cat([x.flatten(1), y.flatten(1)], dim=1)
    extent = both.amax(dim=1) - both.amin(dim=1)
    # two equal constant maps have range 0; dividing by infinity makes both 0, and equal
    return torch.where(extent == 0, torch.inf, extent)[:, None, None, None]


def _window_ssim(x: Tensor, y: Tensor) -> Tensor:
    """S of every window of (N, C, H, W) maps whose data range is 1."""

    def mean(values: Tensor) -> Tensor:
        return F.avg_pool2d(values, SSIM_WINDOW, stride=1)

    def covariance(p: Tensor, q: Tensor) -> Tensor:
        # centred on the image's mean, so that E[pq] - E[p] E[q] loses fewer digits
        p, q = (m - m.mean(dim=(-2, -1), keepdim=True) for m in (p, q))
        return pixels / (pixels - 1) * (mean(p * q) - mean(p) * mean(q))

    pixels, C1, C2 = SSIM_WINDOW**2, 0.01**2, 0.03**2
    luminance = (2 * mean(x) * mean(y) + C1) / (mean(x) ** 2 + mean(y) ** 2 + C1)
    return luminance * (2 * covariance(x, y) + C2) / (covariance(x, x) + covariance(y, y) + C2)
