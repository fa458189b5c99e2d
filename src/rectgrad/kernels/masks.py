"""The parts of an input that perturbation methods hide: windows that slide over it, and random masks.

All parts of a pass are computed at once, by index arithmetic on the device. Positions are the last dimensions
of an input; what is before them are copies, samples and channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.kernels.reference import precise

BLOCK = 64  # masks per step of a weighted sum


class Windows:
    """One window for each combination of positions along the sides. along: the positions for each side."""

    def __init__(self, along: Sequence[Sequence[range]], sides: Sequence[int], device: torch.device) -> None:
        self.count = prod(map(len, along))
        self._covers = [_covered(*each).to(device) for each in zip(along, sides, strict=True)]

    def replace(self, copies: Tensor, start: int, values: Tensor) -> None:
        """Writes values (N, ...) into copies (K, N, ...): in the first one where window `start` is, in the
        second one where the next window is, and so on."""
        index = torch.arange(start, start + len(copies), device=copies.device)
        inside = torch.ones_like(index, dtype=torch.bool).reshape(-1, *(1,) * (copies.dim() - 1))
        for d, covers in enumerate(reversed(self._covers)):  # the last side's window moves fastest
            rows = covers[index % len(covers)]
            inside = inside & rows.reshape(len(copies), *(1,) * (copies.dim() - 2 - d), -1, *(1,) * d)
            index = index // len(covers)
        torch.where(inside, values, copies, out=copies)

    def mean(self, values: Tensor) -> Tensor:
        """values: (windows, N). At each position the mean over the windows that cover it: (N, *sides)."""
        found = precise(values).T.reshape(-1, *map(len, self._covers))
        for covers in self._covers:
            weights = covers.to(found) / covers.sum(0)
            found = torch.tensordot(found, weights, ([1], [0]))
        return found


def _covered(along: Sequence[range], side: int) -> Tensor:
    """(windows, side): whether a window covers a position."""
    ends = torch.tensor([(each.start, each.stop) for each in along], device="cpu")
    positions = torch.arange(side, device="cpu")
    return (ends[:, :1] <= positions) & (positions < ends[:, 1:])


class Masks:
    """Random masks as in RISE (Petsiuk et al. 2018), the same on every device.

    Each is a grid of cells that are 1 with probability `keep` and 0 otherwise. It is upsampled linearly to a
    size of one more cell than needed, and cropped at a random place.
    """

    def __init__(
        self,
        sides: Sequence[int],
        count: int,
        cells: int,
        keep: float,
        random: torch.Generator,
        device: torch.device,
    ) -> None:
        grids = torch.empty(count, *(cells,) * len(sides), dtype=torch.float32, device="cpu")
        grids, like = grids.uniform_(generator=random) < keep, precise(torch.empty(0, device=device))
        self._grids, self._sides = grids.to(like), [torch.arange(side, device=device) for side in sides]
        steps = [-(-side // cells) for side in sides]
        shifts = [torch.randint(step, (count, 1), device="cpu", generator=random) for step in steps]
        self._shifts = [shift.to(device) for shift in shifts]
        self._larger = [_upsampling(cells, (cells + 1) * step).to(like) for step in steps]

    def between(self, start: int, stop: int) -> Tensor:
        """The masks from `start` to `stop`: (stop - start, *sides)."""
        found = self._grids[start:stop]
        for d, side in enumerate(self._sides):
            rows = self._larger[d][self._shifts[d][start:stop] + side]
            found = torch.einsum("bij,b...j->b...i", rows, found.movedim(d + 1, -1)).movedim(-1, d + 1)
        return found

    def apply(self, copies: Tensor, start: int) -> None:
        """Multiplies copies (K, N, ...) by the masks from `start` on, one for each copy."""
        masks = self.between(start, start + len(copies)).to(copies.dtype)
        copies *= masks.reshape(len(masks), *(1,) * (copies.dim() - masks.dim()), *masks.shape[1:])

    def sum(self, weights: Tensor) -> Tensor:
        """weights: (masks, N). The sum over the masks of weight times mask: (N, *sides)."""
        total = self._grids.new_zeros(weights.shape[1], *map(len, self._sides))
        for start in range(0, len(weights), BLOCK):
            masks = self.between(start, start + BLOCK)
            total += torch.tensordot(weights[start : start + BLOCK].to(masks), masks, ([0], [0]))
        return total


def _upsampling(cells: int, size: int) -> Tensor:
    """The matrix that stretches a row of cells."""
    rows = torch.eye(cells, dtype=torch.float64, device="cpu")
    return F.interpolate(rows[None], size, mode="linear", align_corners=False)[0].T
