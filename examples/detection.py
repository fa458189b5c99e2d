"""Why this box: a detector that returns a dict, and a callable target that picks one box's score.

Each cell of an 8 x 8 grid proposes a box and a score for it. There are two squares in the picture, so two
boxes have a high score. Each is explained separately, and the map should be inside its own box.

    python examples/detection.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

SIZE, CELL = 64, 8
GRID = SIZE // CELL


def pictures(n: int) -> tuple[Tensor, Tensor]:
    """Pictures (n, 1, SIZE, SIZE), and two boxes in each: left, top, right, bottom, one in each half."""
    corners = torch.stack([torch.randint(2, 18, (n, 2)), torch.randint(2, 50, (n, 2))], 2)
    corners[:, 1, 0] += 32
    boxes = torch.cat([corners, corners + torch.randint(7, 13, (n, 2, 1))], 2)
    at = torch.arange(SIZE)
    left, top, right, bottom = boxes[..., None, None].unbind(2)
    rows, columns = at[:, None], at[None, :]
    inside = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    return inside.any(1)[:, None] + 0.2 * torch.randn(n, 1, SIZE, SIZE), boxes


class Detector(nn.Module):
    """{"scores": (N, cells), "boxes": (N, cells, 4)}, the boxes as offsets from the centre of their cell."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(32, 32, 5, stride=2, padding=2), nn.ReLU(),
        )  # fmt: skip
        self.score, self.box = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 4, 1)
        middle = (torch.arange(GRID) + 0.5) * CELL
        y, x = torch.meshgrid(middle, middle, indexing="ij")
        self.register_buffer("middles", torch.stack([x, y, x, y], 2).flatten(0, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        boxes = self.middles + CELL * self.box(h).flatten(2).transpose(1, 2)
        return {"scores": self.score(h).flatten(1), "boxes": boxes}


def cells_of(boxes: Tensor) -> Tensor:
    """The cell that the middle of each box falls in."""
    middles = (boxes[..., :2] + boxes[..., 2:]) // 2 // CELL
    return middles[..., 1] * GRID + middles[..., 0]


def trained() -> Detector:
    model = Detector()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        x, boxes = pictures(32)
        cells = cells_of(boxes)
        out = model(x)
        wanted = torch.zeros_like(out["scores"]).scatter(1, cells, 1.0)
        found = out["boxes"].gather(1, cells[:, :, None].expand(-1, -1, 4))
        weight = torch.tensor(10.0)  # most cells are empty
        loss = F.binary_cross_entropy_with_logits(out["scores"], wanted, pos_weight=weight)
        optimiser.zero_grad()
        (loss + F.l1_loss(found, boxes.float()) / CELL).backward()
        optimiser.step()
    return model.eval()


def score_of(cell: int) -> Callable[[dict[str, Tensor]], Tensor]:
    """The target: the score of one cell's box."""
    return lambda out: out["scores"][:, cell]


def inside(maps: Tensor, box: Tensor) -> float:
    """The share of a map inside a box."""
    left, top, right, bottom = box.tolist()
    return float(maps[..., top:bottom, left:right].sum() / maps.sum())


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    x, true_boxes = pictures(1)
    with torch.no_grad():
        out = model(x)
    kept = rectgrad.record(model, x)  # one forward pass for both boxes
    for true, other in zip(true_boxes[0], true_boxes[0].flip(0), strict=True):
        cell = int(cells_of(true))
        found = [round(v) for v in out["boxes"][0, cell].tolist()]
        print(f"square at {true.tolist()}: found at {found}, score {out['scores'][0, cell].sigmoid():.2f}")
        maps = kept.attribute("rectgrad", target=score_of(cell))
        print(f"  share of its map in it: {inside(maps, true):.2f}, in the other: {inside(maps, other):.2f}")


if __name__ == "__main__":
    main()
