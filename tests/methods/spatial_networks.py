"""Small networks with positions of tokens, with channels last and without any; and what tests ask about their
class layers."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectgrad.engine import backward


def layers_of(trace) -> list[str]:
    """The names of the class layers, in the order of the forward pass."""
    rows = zip(trace.rows, trace.layers(), strict=True)
    return [layer for row, layer in rows if row.rule.endswith("class layer")]


def bridged(model: nn.Module) -> nn.Module:
    """A copy that is explained over the bridge."""
    model = copy.deepcopy(model)
    backward.remember_bridged(model)
    return model


class Differing(nn.Module):
    """Samples with a positive mean read all positions of the last activation, the others only one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.first, self.last = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.b(self.first(self.a(x))) + 1)
        flag = (x.mean((1, 2, 3)) > 0).double()
        return (flag * y.mean((1, 2, 3)) + (1 - flag) * y.amax((1, 2, 3))).unsqueeze(1)


def differing() -> tuple[nn.Module, Tensor]:
    """Every second sample reads one position."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 6, 6).double()
    return Differing().double().eval(), x + torch.tensor([1.0, -1, 1, -1]).reshape(4, 1, 1, 1)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.fc2(self.act(self.fc1(x)))


class Tokens(nn.Module):
    """A small ViT, with class and register tokens. reads: the tokens that the head sees."""

    def __init__(self, registers: int, last: bool, reads: slice):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 3, stride=3), nn.Parameter(torch.randn(1, 1, 8))
        self.registers = nn.Parameter(torch.randn(1, registers, 8))
        self.blocks, self.head = nn.Sequential(Block(8), Block(8)), nn.Linear(8, 5)
        self.last, self.reads = last, reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        own = [part.expand(x.shape[0], -1, -1) for part in (self.token, self.registers)]
        x = torch.cat([x, own[1]] if self.last else [own[1], x], 1)
        x = torch.cat([own[0], x], dim=1)
        return self.head(self.blocks(x)[:, self.reads].mean(1))


def vit() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tokens(3, True, slice(0, 1)).double().eval(), torch.randn(4, 3, 9, 12).double()


class ChannelsLast(nn.Module):
    """As in ConvNeXt: as many channels as rows and columns, so that sizes do not tell them apart."""

    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return self.head((self.conv(x) + y).mean((2, 3)))


class Keys(nn.Module):
    """Tokens whose keys join an empty cache, as those of a causal language model."""

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.cat([torch.empty(0), x.unflatten(2, (2, 3)).transpose(1, 2)], dim=-2)
        return keys.relu().mean((1, 2))


class Words(nn.Module):
    """Embeddings (N, T, C) by a convolution along the words, as in Mamba, and attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.block, self.head = nn.Conv1d(6, 6, 3, padding=1), Block(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(F.silu(self.block(y).unflatten(2, (2, 3))).flatten(2).mean(1))


class Mirrored(nn.Module):
    """The scores of an image and of its mirror image, as some average them at test time."""

    def __init__(self, *turns):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        )
        self.head, self.turns = nn.Linear(4, 3), turns

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.head(self.body(turn(x)).mean((2, 3))) for turn in self.turns)


REFUSED = {
    "words": (Words(), (2, 5, 6), r"has shape \(2, 5, 2, 3\)"),
    "keys": (Keys(), (2, 5, 6), r"has shape \(2, 2, 5, 3\)"),
    "dense": (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), (2, 6), r"has shape \(2, 9\)"),
    "no activation": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(32, 3)),
        (2, 1, 6, 6),
        "no activation at all",
    ),
    "one position": (
        nn.Sequential(nn.Conv2d(1, 2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3)),
        (2, 1, 6, 6),
        r"has shape \(2, 2, 1, 1\)",
    ),
    "one pixel is read": (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.ELU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
        (2, 1, 6, 6),
        "reaches several",
    ),
}
