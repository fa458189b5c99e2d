"""A dataset and a gallery that take no time: drawings, and an untrained network."""

import torch

from rectgrad.data import Dataset, shapes
from rectgrad.experiments import gallery, sheets
from rectgrad.models import ImageModel

SMALL = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(400, 1), shapes.generate(60, 2))


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
