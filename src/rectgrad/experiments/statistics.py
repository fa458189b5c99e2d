"""Statistics of one value per network and image: spreads, intervals and tests.

Values are (networks, images): the same images explained for networks that differ in their training seed only.
A claim about a method must hold for other images and for other networks, so both count as random:

    variance of the mean = variance of the networks' means / K + variance of the images' means / N

with K networks and N images, and Student's t with Satterthwaite's degrees of freedom (1946). Each of the two
terms contains a part of the interaction of networks and images, so that the sum errs on the safe side. We do
not bootstrap over networks: resamples of five values have too little spread. With one network, the interval
is over images alone, says nothing about other networks, and decides no finding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

Values = Tensor | np.ndarray | Sequence[Any]
FEW = 20  # fewer images get a standard deviation, but no interval


def spread(values: Values) -> dict[str, Any]:
    """Mean, standard deviation, quartiles, 5th and 95th percentile, the numbers of images and networks, and
    the `estimate` of the mean. Undefined values (NaN) are excluded and counted."""
    given = np.atleast_2d(np.asarray(values, dtype=np.float64))
    found = given[~np.isnan(given)]
    if not len(found):
        return {"n": 0, "undefined": given.size}
    low, q1, median, q3, high = (float(p) for p in np.percentile(found, (5, 25, 50, 75, 95)))
    about = {**estimate(given), "quartiles": [q1, median, q3], "whiskers": [low, high]}
    return about | ({"undefined": given.size - len(found)} if given.size > len(found) else {})


def estimate(values: Values) -> dict[str, Any]:
    """The mean with its standard error, degrees of freedom, 95 % interval and p (two-sided, for a mean of 0).

    `each` has the mean of every network if there are several; `std` is the deviation between images.
    """
    given = np.atleast_2d(np.asarray(values, dtype=np.float64))
    given = given[:, ~np.isnan(given).all(0)]
    if not given.size:
        return {"n": 0}
    networks, images = _means(given, 1), _means(given, 0)
    mean = float(np.nanmean(networks))
    about: dict[str, Any] = {"mean": mean, "std": _deviation(images), "n": len(images)}
    if len(networks) > 1:
        about |= {"networks": len(networks), "each": [float(m) for m in networks]}
    if len(images) < FEW:
        return about
    parts = [(_deviation(m) ** 2 / len(m), len(m) - 1) for m in (networks, images) if len(m) > 1]
    error = sum(part for part, _ in parts) ** 0.5
    df = error**4 / sum(part**2 / n for part, n in parts) if error else 1.0
    reach = student_quantile(df) * error
    about |= {"error": error, "df": df, "interval": [mean - reach, mean + reach]}
    return {**about, "p": p_value(about)}


def difference(values: Values, base: Values) -> dict[str, Any]:
    """The estimate of the paired differences to the base, network by network and image by image."""
    return estimate(np.asarray(values, dtype=np.float64) - np.asarray(base, dtype=np.float64))


def by_method(
    values: Mapping[str, Mapping[str, Values]], bases: Sequence[str] = ("rectgrad",)
) -> dict[str, Any]:
    """Spreads by method and measure; `above` has the paired differences to each base that was measured."""
    return {
        method: {
            **{key: spread(found) for key, found in measures.items()},
            "above": {
                base: {key: difference(found, values[base][key]) for key, found in measures.items()}
                for base in bases
                if base in values and method != base
            },
        }
        for method, measures in values.items()
    }


def p_value(found: Mapping[str, Any], against: float = 0.0) -> float:
    """Two-sided p of an estimate for a true mean of `against`."""
    distance = abs(found["mean"] - against)
    if not found["error"]:
        return 0.0 if distance else 1.0
    return student_p(distance / found["error"], found["df"])


def student_p(t: float, df: float) -> float:
    """P(|T| >= t) for Student's t.

    With T = sqrt(df) cot(phi), the density of phi is proportional to sin(phi)^(df - 1): an integral over a
    finite range, accurate in the tails too.
    """
    end = math.atan2(math.sqrt(df), t)
    phi = (np.arange(4000) + 0.5) / 4000 * end
    half = math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2)) * math.sqrt(math.pi) / 2
    return min(float((np.sin(phi) ** (df - 1)).mean() * end / half), 1.0)


def student_quantile(df: float, level: float = 0.95) -> float:
    """t with P(|T| < t) = level, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > 1 - level else (low, middle)
    return high


def _means(values: np.ndarray, axis: int) -> np.ndarray:
    """Means over an axis without undefined values; rows that have none are left out."""
    valid = ~np.isnan(values)
    n = valid.sum(axis)
    return (np.where(valid, values, 0).sum(axis)[n > 0]) / n[n > 0]


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def over_networks(values: Sequence[float]) -> dict[str, Any]:
    """The estimate from one value per network, such as an accuracy (Student's t). With one network there is
    no interval."""
    given = np.asarray(values, dtype=np.float64)
    found = {"mean": float(given.mean()), "std": _deviation(given), "n": len(given), "networks": len(given)}
    if len(given) < 2:
        return found
    error, df = found["std"] / len(given) ** 0.5, len(given) - 1
    reach = student_quantile(df) * error
    return {**found, "error": error, "df": df, "interval": [found["mean"] - reach, found["mean"] + reach]}


def gap(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """a - b for two results of `over_networks` that are independent (Welch 1947). A single value is assumed
    to vary like the values of the other."""
    mean, few = a["mean"] - b["mean"], min(a["n"], b["n"])
    if max(a["n"], b["n"]) < 2:
        return {"mean": mean, "networks": few}
    if few < 2:
        known = a if a["n"] > 1 else b
        error, df = known["std"] * (1 + 1 / known["n"]) ** 0.5, known["n"] - 1
    else:
        error = math.hypot(a["error"], b["error"])
        parts = sum(each["error"] ** 4 / each["df"] for each in (a, b))
        df = error**4 / parts if parts else 1.0
    return {"mean": mean, "error": error, "df": df, "networks": max(a["n"], b["n"])}
