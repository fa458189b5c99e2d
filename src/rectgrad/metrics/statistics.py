"""Statistics of one value per photo: intervals, paired tests, corrections and ranks.

Values are arrays (photos, columns), one column for each method or each pair of methods. Undefined values
(NaN) are left out of their column. Photos are the unit of resampling: the same photo is drawn for all
columns.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
EXACT = 4  # times as many signs as would be drawn: as long as all can be tried, they are
TIE = 1e-6  # means that differ by less, as a share of the mean size of the differences, are equal


class Interval(NamedTuple):
    """The mean of each column, its interval (NaN for one value), and the number of defined values."""

    mean: Array
    low: Array
    high: Array
    n: NDArray[np.int64]


def bootstrap(values: ArrayLike, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Interval:
    """Means over photos with percentile bootstrap intervals (Efron 1979), expanded (Hesterberg 2015).

    For the difference of two methods pass a - b, photo by photo: the interval is then paired.

    Plain percentile intervals of few photos are too narrow, because the spread of n values is estimated with
    n - 1 degrees of freedom. The tails are therefore Phi(-t sqrt(n / (n - 1))), with t the quantile of
    Student's distribution, instead of (1 - level) / 2. Below 6 photos no interval within the range of the
    values covers the truth as often as 95 %.
    """
    given, valid = _columns(values)
    random, means = np.random.default_rng(seed), []
    for size in _chunks(draws, max(given.shape)):
        times = random.multinomial(len(given), np.full(len(given), 1 / len(given)), size=size).astype(float)
        means.append(_mean(times @ given, times @ valid))
    n, limits, drawn = (
        valid.sum(0).astype(np.int64),
        np.full((2, given.shape[1]), np.nan),
        np.concatenate(means),
    )
    for count in np.unique(n[n > 1]):
        tail = _tail(int(count), level)
        limits[:, n == count] = np.nanquantile(drawn[:, n == count], [tail, 1 - tail], axis=0)
    return Interval(_mean(given.sum(0), n), limits[0], limits[1], n)


def _tail(n: int, level: float) -> float:
    """The share of bootstrap means of n values that an interval leaves out on each side."""
    normal = NormalDist()
    z, degrees = normal.inv_cdf((1 + level) / 2), n - 1
    # Student's quantile by its expansion in 1 / degrees (Abramowitz and Stegun 1964, 26.7.5)
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return normal.cdf(-t * math.sqrt(n / degrees))


def sign_flip_test(differences: ArrayLike, draws: int = 20_000, seed: int = 0) -> Array:
    """Two-sided p-values, one for each column, for paired differences whose mean is 0.

    If two methods do not differ, the sign of each photo's difference is arbitrary: p is the share of signs
    whose mean is at least as far from 0 (Fisher's randomisation test). All signs are tried if that takes at
    most four times as many as `draws`, and p is exact; else random ones, and the smallest p is
    1 / (draws + 1). What counts is the number of photos for which a column has a value. Columns without a
    difference have p = 1.
    """
    given, valid = _columns(differences)
    given = np.take_along_axis(given, np.argsort(-valid, axis=0, kind="stable"), 0)  # defined values first
    n, p = np.maximum(valid.sum(0).astype(int), 1), np.ones(given.shape[1])
    few = 2.0 ** (n - 1) <= EXACT * draws
    for columns in (few, ~few):
        if columns.any():
            p[columns] = _flipped(given[: n[columns].max(), columns], draws, seed)
    return p


def _flipped(given: Array, draws: int, seed: int) -> Array:
    # Differences of float32 values that should be equal, such as 5/7 - 3/7 and 2/7, differ by rounding.
    observed = np.abs(given.sum(0)) - TIE * np.abs(given).sum(0)
    random, reached, photos = np.random.default_rng(seed), np.zeros(given.shape[1]), len(given)
    every = 2 ** (photos - 1)  # with all signs reversed, a mean is as far from 0: the last sign is fixed
    exact, done = every <= EXACT * draws, 0
    for size in _chunks(every if exact else draws, max(given.shape)):
        if exact:
            bits = np.arange(done, done + size)[:, None] >> np.arange(photos) & 1
        else:
            bits = random.integers(0, 2, (size, photos))
        reached += (np.abs((bits * 2.0 - 1) @ given) >= observed).sum(0)
        done += size
    return reached / every if exact else (reached + 1) / (draws + 1)


def holm(p: ArrayLike) -> Array:
    """p-values corrected for the number of tests (Holm 1979): the family-wise error is at most alpha if all
    tests with a corrected p below alpha are rejected.

    With p_(1) <= ... <= p_(m), the corrected p_(i) is max_{j <= i} min(1, (m - j + 1) p_(j)).
    """
    given = np.asarray(p, dtype=np.float64)
    order = np.argsort(given, kind="stable")
    steps = np.minimum(given[order] * np.arange(len(given), 0, -1), 1)
    corrected = np.empty_like(given)
    corrected[order] = np.maximum.accumulate(steps)
    return corrected


def ranks(better: ArrayLike) -> NDArray[np.int64]:
    """Ranks with ties, from a matrix whose entry (i, j) says that method i is significantly better than j.

    The rank of a method is 1 plus the number of methods that are significantly better than it. If nothing is
    significant, all methods have rank 1.
    """
    return 1 + np.asarray(better, dtype=bool).sum(0).astype(np.int64)


def photos_needed(differences: ArrayLike, alpha: float = 0.05, power: float = 0.8) -> Array:
    """How many photos tell two methods apart, one number for each column of paired differences.

    n = ((z_{1 - alpha/2} + z_power) s / mean)^2, rounded up, with s the standard deviation of the
    differences, assumed to stay as observed; at least as many as a sign-flip test needs, whose smallest p is
    2^(1 - n). Infinite where the mean is 0; NaN for fewer than two defined values.
    """
    given, valid = _columns(differences)
    least = math.floor(2 - math.log2(alpha))
    z = NormalDist().inv_cdf(1 - alpha / 2) + NormalDist().inv_cdf(power)
    n = valid.sum(0)
    mean = _mean(given.sum(0), n)
    squares = (valid * (given - mean) ** 2).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.where(n > 1, squares / (n - 1), np.nan)
        found = np.where(mean == 0, np.inf, np.maximum(np.ceil(z**2 * variance / mean**2), least))
    return np.where(n > 1, found, np.nan)


def _columns(values: ArrayLike) -> tuple[Array, Array]:
    """(photos, columns) with 0 for undefined values, and 1 where a value is defined."""
    given = np.asarray(values, dtype=np.float64)
    if given.ndim not in (1, 2) or not len(given):
        raise ValueError(
            f"values of shape {given.shape}: needs (photos,) or (photos, columns), 1 photo or more"
        )
    given = given.reshape(len(given), -1)
    undefined = np.isnan(given)
    return np.where(undefined, 0, given), (~undefined).astype(np.float64)


def _mean(total: Array, n: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return total / np.where(n == 0, np.nan, n)


def _chunks(draws: int, values: int) -> list[int]:
    """Numbers of draws that keep matrices with this many values for each draw below 16 MB."""
    size = max(2_000_000 // values, 1)
    return [min(size, draws - start) for start in range(0, draws, size)]
