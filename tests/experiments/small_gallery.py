"""A dataset and a gallery that take no time: drawings, and an untrained network."""

import numpy as np
import torch

from rectgrad.data import Dataset, Images, shapes
from rectgrad.experiments import gallery, sheets
from rectgrad.models import ImageModel

COLOURS = np.array([(r, g, b) for r in (0, 128, 255) for g in (0, 255) for b in (0, 255)])


def tinted(n: int, seed: int) -> Images:
    """Drawings in the colour of their class, which a network learns in a few steps."""
    drawn = shapes.generate(n, seed)
    pixels = 0.25 * drawn.pixels + 0.75 * COLOURS[drawn.labels][:, None, None]
    return Images(pixels.astype(np.uint8), drawn.labels, drawn.masks)


SMALL = Dataset("shapes", tuple(shapes.CLASSES), tinted(200, 1), tinted(40, 2))


def small_gallery() -> gallery.Gallery:
    """Two drawings instead of photos, and an untrained network instead of a trained one."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4096, 3)
    )
    half = (0.5, 0.5, 0.5)
    model = ImageModel(
        "tiny", network.eval().requires_grad_(False), ["a", "b", "c"], (32, 32), half, half, 1.0
    )
    crops = [sheets.picture(pixels) for pixels in SMALL.test.pixels[:2]]
    x = torch.stack([model.prepare(crop) for crop in crops])
    return gallery.Gallery(model, ["one", "two"], crops, x, network(x).argmax(1))
