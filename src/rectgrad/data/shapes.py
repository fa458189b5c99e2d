"""`shapes`: ten classes of generated 32 x 32 drawings on cluttered backgrounds, with exact masks.

Every experiment can use it: it needs no files and has ground truth. An image depends only on the seed and its
index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from rectgrad.data.dataset import Dataset, Images

SIDE = 32
TRAIN, TEST = 10_000, 1_000

Inside = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _disc(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return u * u + v * v < 1


def _reach(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(u), np.abs(v))


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (v > -0.6) & (v < 1 - 1.75 * np.abs(u))


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.hypot(u, v) < 0.68 + 0.34 * np.cos(5 * np.arctan2(v, u))


def _arrow(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    stem = (np.abs(u) < 0.24) & (np.abs(v) < 0.95)
    return stem | ((v > 0) & (v < 0.98) & (np.abs(u) < 0.98 - v))


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    u, v = 1.25 * u, 1.25 * v + 0.12
    return (u * u + v * v - 0.75) ** 3 < 1.3 * u * u * v**3


# (u, v) -> whether a point belongs to the object, whose width is about 2
CLASSES: dict[str, Inside] = {
    "disc": _disc,
    "ring": lambda u, v: _disc(u, v) & ~_disc(u / 0.58, v / 0.58),
    "square": lambda u, v: _reach(u, v) < 0.82,
    "frame": lambda u, v: (_reach(u, v) < 0.88) & (_reach(u, v) > 0.5),
    "triangle": _triangle,
    "star": _star,
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) < 0.28) & (_reach(u, v) < 0.95),
    "crescent": lambda u, v: _disc(u, v) & ~_disc((u - 0.5) / 0.85, v / 0.85),
    "arrow": _arrow,
    "heart": _heart,
}


@functools.lru_cache(maxsize=4)
def load(train: int = TRAIN, test: int = TEST, seed: int = 0) -> Dataset:
    return Dataset("shapes", tuple(CLASSES), generate(train, seed), generate(test, seed + 1))


def generate(n: int, seed: int) -> Images:
    """n images; classes alternate."""
    drawn = [draw(i % len(CLASSES), np.random.default_rng((seed, i))) for i in range(n)]
    pixels, masks = (np.stack([each[k] for each in drawn]) for k in (0, 1))
    return Images(pixels, np.arange(n, dtype=np.int64) % len(CLASSES), masks)


def draw(label: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One image and the mask of its object."""
    ground = rng.uniform(50, 205, 3)
    canvas = _texture(rng, ground, 25)
    for _ in range(rng.integers(2, 6)):
        _paint(canvas, _clutter(rng), rng, _contrasting(ground, rng))
    mask = _placed(list(CLASSES.values())[label], rng, rng.uniform(7.5, 11.0))
    _paint(canvas, mask, rng, _contrasting(ground, rng))
    return np.clip(canvas + rng.normal(0, 10, canvas.shape), 0, 255).astype(np.uint8), mask


def _contrasting(ground: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A colour that differs clearly from the background."""
    while True:
        colour = rng.uniform(20, 235, 3)
        if np.abs(colour - ground).max() > 90:
            return colour


def _texture(rng: np.random.Generator, colour: np.ndarray, strength: float) -> np.ndarray:
    """A colour that varies slowly over the image."""
    coarse = rng.normal(0, strength, (5, 5, 3)) + colour
    at = np.linspace(0, 4, SIDE)
    low = np.minimum(at.astype(int), 3)
    part = (at - low)[:, None, None]
    rows = coarse[low] * (1 - part) + coarse[low + 1] * part
    part = part.reshape(1, -1, 1)
    return rows[:, low] * (1 - part) + rows[:, low + 1] * part


def _paint(canvas: np.ndarray, mask: np.ndarray, rng: np.random.Generator, colour: np.ndarray) -> None:
    canvas[mask] = _texture(rng, colour, 15)[mask]


def _clutter(rng: np.random.Generator) -> np.ndarray:
    """A stroke or a blob that resembles a part of an object."""
    angle, length, width = rng.uniform(0, np.pi), rng.uniform(3, 9), rng.uniform(0.8, 2.6)
    u, v = _coordinates(rng.uniform(0, SIDE, 2), angle)
    stroke = (np.abs(u) < length) & (np.abs(v) < width)
    return stroke if rng.random() < 0.6 else _disc(u / length * 2, v / width)


def _placed(inside: Inside, rng: np.random.Generator, radius: float) -> np.ndarray:
    u, v = _coordinates(rng.uniform(radius, SIDE - 1 - radius, 2), rng.uniform(-0.6, 0.6))
    squeeze = rng.uniform(0.85, 1.0)
    return inside(u / radius, v / radius / squeeze)


def _coordinates(centre: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of all pixels, rotated by `angle` around `centre`; v points up."""
    y, x = np.mgrid[:SIDE, :SIDE]
    dx, dy = x - centre[0], centre[1] - y
    return dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
