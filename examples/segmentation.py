"""Why these pixels are a disc: a network for segmentation and a callable target.

The model returns logits for each pixel, (N, classes, H, W). We choose one score per picture: the sum of the
disc's logits over the pixels that the model classifies as a disc. The map should cover the disc, not the
cross in the same picture; for the sum of the cross's logits it is the other way round.

    python examples/segmentation.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

SIZE = 32
CLASSES = "background", "disc", "cross"


def pictures(n: int) -> tuple[Tensor, Tensor]:
    """Pictures (n, 3, SIZE, SIZE) of a disc and a cross, and the class of each pixel."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")

    def distances(low: int, high: int) -> tuple[Tensor, Tensor]:
        y, x = torch.randint(6, SIZE - 6, (n, 1, 1)), torch.randint(low, high, (n, 1, 1))
        return (rows - y).abs(), (columns - x).abs()

    (y, x), (v, u) = distances(6, 11), distances(21, 26)
    disc, cross = y**2 + x**2 <= 20, (torch.minimum(v, u) <= 1) & (torch.maximum(v, u) <= 5)
    labels = disc + 2 * cross
    labels = labels.where(torch.rand(n, 1, 1) < 0.5, labels.flip(2))  # the disc is left or right
    shapes = (labels > 0)[:, None] * (0.5 + torch.rand(n, 3, 1, 1))
    return shapes + 0.2 * torch.randn(n, 3, SIZE, SIZE), labels


def trained() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=3, dilation=3), nn.ReLU(),
        nn.Conv2d(16, len(CLASSES), 1),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(120):
        x, labels = pictures(16)
        optimiser.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimiser.step()
    return model.eval()


def over(region: Tensor, name: str) -> Callable[[Tensor], Tensor]:
    """The target: the sum of a class's logits over the pixels of a region (N, H, W)."""
    return lambda logits: (logits[:, CLASSES.index(name)] * region).sum((1, 2))


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    x, labels = pictures(20)
    found = model(x).argmax(1)
    print(f"pixels of the right class: {float((found == labels).float().mean()):.3f}")

    for name in CLASSES[1:]:
        region = found == CLASSES.index(name)
        maps = rectgrad.attribute(model, x, "rectgrad", target=over(region, name), q=95).sum(1)
        shares = [float((maps * (labels == i)).sum() / maps.sum()) for i in range(len(CLASSES))]
        print(f"why {name}:", ", ".join(f"{s:.2f} on the {c}" for c, s in zip(CLASSES, shares, strict=True)))


if __name__ == "__main__":
    main()
