"""Networks that use a known part of the picture, and the map that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad.methods import Method
from rectgrad.metrics import controls

SIDE = 24
PATCH, OTHER = (slice(3, 9), slice(4, 10)), (slice(14, 20), slice(13, 19))
QUADRANT = (slice(12, 24), slice(0, 12))


class Planted(nn.Module):
    """Class 1 speaks for what `evidence` finds in the picture, class 0 against it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 3)
        with torch.no_grad():
            self.last.weight.copy_(torch.tensor([[-4.0], [4.0], [0.0]]))
            self.last.bias.copy_(torch.tensor([2.0, -2.0, -1.0]))

    def evidence(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.evidence(x))[:, None])


class PatchNet(Planted):
    """Only the stripes in a patch decide."""

    regions: ClassVar = [PATCH]

    def evidence(self, x: Tensor) -> Tensor:
        rows, columns = PATCH
        stripes = (-1.0) ** torch.arange(6, dtype=x.dtype)
        return (x[:, :, rows, columns] * stripes).mean((1, 2, 3)) * 3


class QuadrantNet(Planted):
    """Only the brightness of a quadrant decides."""

    regions: ClassVar = [QUADRANT]

    def evidence(self, x: Tensor) -> Tensor:
        rows, columns = QUADRANT
        return x[:, :, rows, columns].mean((1, 2, 3)) * 1.5


class TwoRegionsNet(Planted):
    """Stripes in two regions decide together."""

    regions: ClassVar = [PATCH, OTHER]

    def evidence(self, x: Tensor) -> Tensor:
        stripes = (-1.0) ** torch.arange(6, dtype=x.dtype)
        parts = [F.relu((x[:, :, r, c] * stripes).mean((1, 2, 3))) for r, c in self.regions]
        return sum(parts) * 1.5


NETWORKS = {"patch": PatchNet, "quadrant": QuadrantNet, "two regions": TwoRegionsNet}


def pictures(network: Planted, n: int, seed: int) -> Tensor:
    """Smooth random pictures in which the network finds what it looks for."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, 3, 8, 8, generator=random)
    x = 0.4 * F.interpolate(coarse, (SIDE, SIDE), mode="bilinear") + 0.1 * torch.randn(
        n, 3, SIDE, SIDE, generator=random
    )
    stripes = (-1.0) ** torch.arange(6)
    if isinstance(network, QuadrantNet):  # another quadrant is as bright
        x[:, :, :12, 12:] += 1
    for rows, columns in network.regions:
        strength = 0.8 + 0.4 * torch.rand(n, 1, 1, 1, generator=random)
        x[:, :, rows, columns] += strength * (1.0 if isinstance(network, QuadrantNet) else stripes)
    return x


@dataclass(frozen=True)
class Shown(Method):
    """A map that is 1 in some regions, with a little noise that breaks ties; `share`: of their rows."""

    regions: Any = ()
    share: float = 1.0
    one_backward: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False

    def raw(self, request):
        (x,) = request.inputs
        maps = 0.01 * rectgrad.attribute(lambda y: y.mean((1, 2, 3)), x.detach(), "random")
        for rows, columns in self.regions:
            rows = slice(rows.start, rows.start + round(self.share * (rows.stop - rows.start)))
            maps[:, :, rows, columns] += 1
        return (maps,)


@dataclass(frozen=True)
class Copycat(Method):
    """Copies the edges of the picture, as an attribution that ignores the network does."""

    one_backward: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False

    def raw(self, request):
        return tuple(controls.edges(x.detach()) for x in request.inputs)
