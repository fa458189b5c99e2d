"""Converts a map to a picture: sums channels, caps outliers and maps values to colours.

The conventions are those of the paper: the sum over channels, capped at the 0.5th and 99.5th percentile, blue
for negative, white for zero, red for positive, symmetric about zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

Values: TypeAlias = "Tensor | np.ndarray"  # a map, (H, W), (C, H, W) or (1, C, H, W)

# Colours from the most negative value over zero to the most positive one. Zero has the background colour.
COLOURS: dict[str, tuple[str, ...]] = {
    "signed": ("#0b2a6f", "#2f62c9", "#93b4ee", "#ffffff", "#f3a08f", "#d1332b", "#6d0712"),
    "signed_dark": ("#b9d2ff", "#5b8def", "#23407f", "#101114", "#7f2420", "#f0604d", "#ffd0c4"),
    "unsigned": ("#ffffff", "#fbd2b4", "#f08a5d", "#c73a3a", "#5e0f2e"),
    "unsigned_dark": ("#101114", "#4a1a5c", "#b03a5b", "#f08a4b", "#fff3c4"),
}


def plane(values: Values) -> np.ndarray:
    """Sums a map (C, H, W), (H, W) or (1, C, H, W) over its channels: (H, W)."""
    plain = values if isinstance(values, np.ndarray) else as_array(values)
    array = np.asarray(plain, dtype=np.float32)
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim not in (2, 3):
        raise ValueError(f"expected a single map, (H, W) or (C, H, W), not shape {array.shape}")
    return array.sum(0) if array.ndim == 3 else array


def as_array(values: Any) -> np.ndarray:
    return values.detach().float().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def final_threshold(values: Values, percentile: float = 95.0) -> np.ndarray:
    """Sets everything below a percentile of the map to zero (or to the threshold, if that is negative). The
    paper applies it to the baselines, to make them as sparse as RectGrad."""
    flat = plane(values)
    threshold = np.percentile(flat, percentile)
    return np.where(flat < threshold, min(threshold, 0.0), flat).astype(np.float32)


def cap(values: Values, low: float = 0.5, high: float = 99.5) -> tuple[np.ndarray, float]:
    """Clips the map to its low and high percentile. Returns it with its largest absolute value.

    If a percentile is 0 (a sparse map), the minimum or maximum is used instead.
    """
    flat = plane(values)
    bottom, top = np.percentile(flat, [low, high])
    bottom, top = (bottom if bottom != 0 else flat.min()), (top if top != 0 else flat.max())
    return np.clip(flat, min(bottom, 0), max(top, 0)), float(max(abs(bottom), abs(top)))


def colours(name: str = "signed", count: int = 256) -> np.ndarray:
    """A colour table (count, 3), 0 to 255."""
    if name not in COLOURS:
        raise ValueError(f"unknown colours {name!r}; colours are {', '.join(COLOURS)}")
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS[name]], dtype=np.float32)
    at, of = np.linspace(0, 1, count), np.linspace(0, 1, len(stops))
    return np.stack([np.interp(at, of, stops[:, i]) for i in range(3)], axis=1)


def colour_names() -> list[str]:
    return list(COLOURS)


def scheme_of(values: Values, dark: bool = False) -> str:
    """The name of the colour table for a map: signed if it has negative values."""
    return ("signed" if plane(values).min() < 0 else "unsigned") + ("_dark" if dark else "")


def colour(values: Values, name: str | None = None, dark: bool = False) -> Image.Image:
    """Draws the map, one pixel per value."""
    name = name or scheme_of(values, dark)
    return Image.fromarray(_pixels(name, _index(values, name)))


def _pixels(name: str, index: np.ndarray) -> np.ndarray:
    """The colours at these indices of a table, (H, W, 3)."""
    return np.take(colours(name).round().astype(np.uint8), index, axis=0)  # a quarter of the time of [index]


def _index(values: Values, name: str) -> np.ndarray:
    """The index of each pixel in a table of 256 colours."""
    capped, limit = cap(values)
    scaled = capped / limit if limit > 0 else capped
    if name.startswith("signed"):
        scaled = (scaled + 1) / 2
    return (np.clip(scaled, 0, 1) * 255).round().astype(np.intp)


def overlay(
    photo: Image.Image, values: Values, strength: float = 0.85, name: str | None = None
) -> Image.Image:
    """Draws the map over a pale copy of the photo. Strong values are opaque, weak ones transparent."""
    name = name or scheme_of(values)
    capped, limit = cap(values)
    weight = np.abs(capped) / limit if limit > 0 else np.zeros_like(capped)
    alpha = Image.fromarray((255 * strength * np.sqrt(weight)).round().astype(np.uint8))
    # Weak values are transparent rather than pale, because a pale tint would only fog the photo.
    strong = np.sign(capped) * (0.5 + 0.5 * weight)
    index = np.clip((strong + 1) / 2 if name.startswith("signed") else strong, 0, 1) * 255
    tint = Image.fromarray(_pixels(name, index.round().astype(np.intp)))
    pale = Image.blend(photo.convert("L").convert("RGB"), photo.convert("RGB"), 0.25)
    contrast, white = (0.44, 0) if name.endswith("dark") else (0.55, 0.45 * 255)
    pale = pale.point([round(contrast * value + white) for value in range(256)] * 3)
    return Image.composite(
        upsample(tint, photo.size), pale, alpha.resize(photo.size, Image.Resampling.BILINEAR)
    )


def blurred(values: Values, share: float = 0.02) -> np.ndarray:
    """Blurs a map with a Gaussian whose standard deviation is `share` of its longer side, for slides."""
    flat = plane(values)
    sigma = share * max(flat.shape)
    return np.asarray(_convolved(_convolved(flat, sigma).T, sigma).T)


def _convolved(values: np.ndarray, sigma: float) -> np.ndarray:
    """Blurs each row with a Gaussian; border values are repeated."""
    reach = max(1, round(3 * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2).astype(np.float32)
    weights /= weights.sum()
    padded = np.pad(values, ((0, 0), (reach, reach)), mode="edge")
    width = values.shape[1]
    shifted = np.stack([w * padded[:, i : i + width] for i, w in enumerate(weights)])
    return np.asarray(shifted.sum(0), dtype=np.float32)


def upsample(picture: Image.Image, size: tuple[int, int], smooth: bool = False) -> Image.Image:
    """Resizes a picture; `smooth` interpolates, otherwise pixels stay visible."""
    kind = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    return picture if picture.size == size else picture.resize(size, kind)
