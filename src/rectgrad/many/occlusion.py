"""Images with hidden pixels, different for each network and generated on the fly.

The pixels whose rank in a map is in low..high are hidden: they become the mean colour. For the control
without image content, hidden pixels are -1 and all others 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rectgrad.data import Images

PIXELS = 32 * 32


class Hidden(NamedTuple):
    """The pixels hidden from one network: by which ranking, which ranks, and whether only the mask is
    shown."""

    ranking: int
    low: int
    high: int
    mask_alone: bool = False


class Occluded:
    """The images of many networks. `ranks` is (rankings, images, 1024) as int16, 0 for the most important."""

    def __init__(
        self, images: Images, ranks: Tensor, hidden: Sequence[Hidden], mean: Tensor, device: str
    ) -> None:
        self.device, self.hidden = device, list(hidden)
        self.bytes = torch.from_numpy(images.pixels).reshape(len(images), PIXELS, 3).to(device)
        self.labels = torch.from_numpy(images.labels).to(device)
        self.ranks = ranks.to(device)
        self.mean = mean.to(device, torch.float32)
        columns = list(zip(*self.hidden, strict=True))
        self.which, self.low, self.high, self.kind = (
            torch.tensor([int(v) for v in column], dtype=torch.int32, device=device) for column in columns
        )

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, network: int, first: int, count: int) -> Tensor:
        """(count, 3, 32, 32): the scaled inputs of one network."""
        rows, what = slice(first, first + count), self.hidden[network]
        rank = self.ranks[what.ranking, rows].unsqueeze(2)
        hidden = (rank >= what.low) & (rank < what.high)
        if what.mask_alone:
            seen = torch.where(hidden, -1.0, 1.0).expand(-1, -1, 3)
        else:
            seen = torch.where(hidden, self.mean, self.bytes[rows].float() / 127.5 - 1)
        return seen.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)

    def pixels(self, first: int, count: int, out: Tensor) -> Tensor:
        """Gathers the inputs of the first convolution of every network into `out`."""
        from rectgrad.many import triton_cnn as kernels

        positions, block = count * PIXELS, 128
        kernels.pixels[(-(-positions // block), len(self.hidden))](
            self.bytes, self.ranks, self.which, self.low, self.high, self.kind, self.mean, out,
            first, positions, len(self), SIDE=32, BLOCK=block,
        )  # fmt: skip
        return out


def unmodified(images: Images, networks: int, device: str) -> Occluded:
    """The same images for every network, without hidden pixels."""
    ranks = torch.zeros(1, len(images), PIXELS, dtype=torch.int16)
    return Occluded(images, ranks, [Hidden(0, 0, 0)] * networks, torch.zeros(3), device)
