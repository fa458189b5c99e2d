"""Vision transformers (Dosovitskiy et al., 2020): ViT-B/16, and a small one for CIFAR-10.

Attributes are named like timm's keys, so that its files load unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, WIDTH, DEPTH, HEADS = 16, 768, 12, 12  # of ViT-B/16


class ViT(nn.Module):
    """Takes square images whose side is a multiple of `patch`; every activation is a GELU."""

    def __init__(self, pixels: int, classes: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        tokens = (pixels // patch) ** 2 + 1
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        self.patch_embed = Patches(patch, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = norm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ViTB16(ViT):
    """Takes images of 224×224 pixels, or another multiple of 16."""

    def __init__(self, pixels: int = 224, classes: int = 1000) -> None:
        super().__init__(pixels, classes, PATCH, WIDTH, DEPTH, HEADS)


class CifarViT(ViT):
    """Takes images of 32×32 pixels scaled to -1..1: 64 patches of 4×4 pixels, 2.2 million parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(32, classes, patch=4, width=160, depth=7, heads=5)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)


class Patches(nn.Module):
    """One token per patch."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = norm(width), Attention(width, heads)
        self.norm2, self.mlp = norm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = (
            part.view(n, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        return self.proj(seen.transpose(1, 2).reshape(n, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)
