"""Mean, spread and interval of one value per image, and paired differences of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

Values = Tensor | np.ndarray | Sequence[float]
FEW = 20  # fewer values get a standard deviation, but no interval


def spread(values: Values) -> dict[str, Any]:
    """Mean, 95 % interval of the mean (1.96 standard errors), standard deviation, quartiles, 5th and 95th
    percentile, and the number of values. Undefined values (NaN) are excluded and counted."""
    given = np.asarray(values, dtype=np.float64)
    found = given[~np.isnan(given)]
    if not len(found):
        return {"n": 0, "undefined": len(given)}
    low, q1, median, q3, high = (float(p) for p in np.percentile(found, (5, 25, 50, 75, 95)))
    deviation = float(found.std(ddof=1)) if len(found) > 1 else 0.0
    about: dict[str, Any] = {"mean": float(found.mean()), "std": deviation}
    if len(found) >= FEW:
        error = 1.96 * deviation / len(found) ** 0.5
        about["interval"] = [about["mean"] - error, about["mean"] + error]
    about |= {"quartiles": [q1, median, q3], "whiskers": [low, high], "n": len(found)}
    return about | ({"undefined": len(given) - len(found)} if len(given) > len(found) else {})


def difference(values: Values, base: Values) -> dict[str, Any]:
    """The spread of the paired differences to the base, image by image."""
    return spread(np.asarray(values, dtype=np.float64) - np.asarray(base, dtype=np.float64))


def by_method(values: Mapping[str, Mapping[str, Values]], base: str = "rectgrad") -> dict[str, Any]:
    """Spreads by method and measure; `above` has the paired differences to the base method."""
    return {
        method: {
            **{key: spread(found) for key, found in measures.items()},
            "above": {
                key: _short(difference(found, values[base][key]))
                for key, found in measures.items()
                if base in values and method != base
            },
        }
        for method, measures in values.items()
    }


def _short(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("mean", "std", "interval", "n") if key in found}
