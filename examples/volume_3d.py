"""A network for volumes, and where in a volume it finds an object.

A noisy volume of 16 x 16 x 16 voxels contains a ball or a rod. A small 3d network learns to distinguish them;
its maps should cover the object.

    python examples/volume_3d.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

SIZE = 16
NAMES = "ball", "rod"


def volumes(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Volumes (n, 1, SIZE, SIZE, SIZE), the object in each, and its voxels."""
    labels = torch.randint(0, 2, (n,))
    centres = torch.randint(4, SIZE - 4, (n, 3, 1, 1, 1))
    axes = torch.stack(torch.meshgrid(*[torch.arange(SIZE)] * 3, indexing="ij"))
    offsets = (axes - centres).abs()
    ball = offsets.square().sum(1) <= 6
    rod = (offsets[:, 0] <= 3) & (offsets[:, 1] <= 1) & (offsets[:, 2] <= 1)
    places = torch.where(labels[:, None, None, None] == 0, ball, rod)[:, None]
    return places + 0.3 * torch.randn(places.shape), labels, places


def trained() -> nn.Module:
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(8, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(80):
        x, labels, _ = volumes(32)
        optimiser.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimiser.step()
    return model.eval()


def share(maps: Tensor, places: Tensor) -> float:
    """The mean share of a map on the object."""
    size = maps.abs().flatten(1)
    return float(((size * places.flatten(1)).sum(1) / size.sum(1)).mean())


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    x, labels, places = volumes(50)
    print(f"accuracy: {float((model(x).argmax(1) == labels).float().mean()):.2f}")

    maps = rectgrad.attribute(model, x, "rectgrad", q=95)
    size = float(places.float().mean())
    print(f"share of the map on the object: {share(maps, places):.2f} (of the volume: {size:.2f})")
    print(f"the same for the plain gradient: {share(rectgrad.attribute(model, x, 'saliency'), places):.2f}")
    strongest = [int(i) for i in (maps[0, 0] == maps[0, 0].max()).nonzero()[0]]
    inside = "inside" if places[0, 0][tuple(strongest)] else "outside"
    print(f"strongest voxel of the first volume, a {NAMES[labels[0]]}: {strongest}, {inside} the object")


if __name__ == "__main__":
    main()
