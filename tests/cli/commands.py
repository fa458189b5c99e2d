"""Helpers for the tests of the commands: a small network and photos."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parents[1]
FILE = HERE / "tiny_model.py"
TINY = f"{FILE}:tiny"


def photo(path, size=(48, 40), seed=0):
    values = np.random.default_rng(seed).integers(0, 255, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).resize(size).save(path)
    return path


def size_of(path):
    with Image.open(path) as picture:
        return picture.size


def resident() -> float:
    """The memory of this process in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
