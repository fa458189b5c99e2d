"""ViT-B/16 (Dosovitskiy et al., 2020).

Attributes are named like timm's keys, so that its files load unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, WIDTH, DEPTH, HEADS = 16, 768, 12, 12


class ViTB16(nn.Module):
    """Takes images of 224×224 pixels, or another multiple of 16; every activation is a GELU."""

    def __init__(self, pixels: int = 224, classes: int = 1000) -> None:
        super().__init__()
        tokens = (pixels // PATCH) ** 2 + 1
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, WIDTH))
        self.patch_embed = Patches()
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = norm()
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Patches(nn.Module):
    """One token per patch of 16×16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = norm(), Attention()
        self.norm2, self.mlp = norm(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        q, k, v = (
            part.view(n, tokens, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        return self.proj(seen.transpose(1, 2).reshape(n, tokens, WIDTH))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH, eps=1e-6)
