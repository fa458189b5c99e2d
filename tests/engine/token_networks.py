"""Transformers, mixers, recurrent networks and experts in miniature, and networks of several inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_networks import images


def tokens(n: int = 2, length: int = 6, width: int = 8) -> tuple[Tensor, ...]:
    return (torch.randn(n, length, width),)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused = num_heads, dim // num_heads, fused
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = self.attn_drop(attn.softmax(dim=-1))
            x = attn @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class LibraryAttention(nn.MultiheadAttention):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class ViT(nn.Module):
    def __init__(self, attention: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 8))
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(8), attention(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.pos_embed
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm(x)[:, 0])


class SwinBlock(nn.Module):
    """Windows of 2x2 on 4x4 tokens, folded into the batch; shifted by one."""

    def __init__(self, dim: int = 8, window: int = 2, shift: int = 1) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 1))
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"))
        relative = (coords.flatten(1)[:, :, None] - coords.flatten(1)[:, None, :]).permute(1, 2, 0)
        relative = relative + window - 1
        self.register_buffer("index", relative[..., 0] * (2 * window - 1) + relative[..., 1])
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def partition(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = x.view(B, H // self.window, self.window, W // self.window, self.window, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window**2, C)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        windows = self.partition(torch.roll(self.norm1(x), shifts=(-self.shift, -self.shift), dims=(1, 2)))
        q, k, v = self.qkv(windows).chunk(3, -1)
        attn = (q * C**-0.5) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(self.window**2, self.window**2)
        attn = attn + self.mask(H, W).repeat(B, 1, 1)
        h = self.proj(F.relu(attn.softmax(-1) @ v))
        h = h.view(B, H // self.window, W // self.window, self.window, self.window, C)
        h = h.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, C)
        x = x + torch.roll(h, shifts=(self.shift, self.shift), dims=(1, 2))
        return x + self.mlp(self.norm2(x))

    def mask(self, H: int, W: int) -> Tensor:
        regions, count = self.table.new_zeros((1, H, W, 1)), 0
        slices = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for h in slices:
            for w in slices:
                regions[:, h, w, :] = count
                count += 1
        windows = self.partition(regions).squeeze(-1)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.block, self.head = nn.Conv2d(3, 8, 4, 4), SwinBlock(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patch(x).permute(0, 2, 3, 1)).flatten(1, 2).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(length, 12), nn.GELU(), nn.Linear(12, length))
        self.channels = nn.Sequential(nn.Linear(dim, 16), nn.GELU(approximate="tanh"), nn.Linear(16, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Encoder(nn.Module):
    """A text classifier on embeddings: nn.TransformerEncoder and the mean of the tokens that are none."""

    def __init__(self, batch_first: bool = True, activation: str = "relu", **options: Any) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, activation=activation, batch_first=batch_first, **options
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        h = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        h = h if self.batch_first else h.transpose(0, 1)
        if padding is None:
            return self.head(h.mean(1))
        h = h.masked_fill(padding.unsqueeze(-1), 0.0)
        return self.head(h.sum(1) / (~padding).sum(1, keepdim=True))


def padding() -> dict:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return {"padding": mask}


class Recurrent(nn.Module):
    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 8, batch_first=True, **options)
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.fc2(F.relu(self.fc1(out[:, -1])))


class Experts(nn.Module):
    """Tokens of all samples together, each sent to one expert by boolean indices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 3), nn.Linear(8, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights = self.gate(flat).softmax(-1)
        best = weights.argmax(-1)
        final = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            chosen = best == i
            if chosen.any():
                final[chosen] += weights[chosen, i, None] * expert(flat[chosen])
        return self.head(final.view_as(x).mean(1))


# --- several inputs ----------------------------------------------------------------------------------------


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, 2, 1))
        self.fc = nn.Linear(24, 5)

    def embed(self, x: Tensor) -> Tensor:
        return F.relu(self.tower(x)).amax((2, 3))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.embed(left), self.embed(right)
        return self.fc(torch.cat([a, b, torch.abs(a - b), a * b], dim=1))


def pairs() -> tuple[Tensor, ...]:
    return (*images(), *images())


class TwoHeads(nn.Module):
    """An image and a table of numbers in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten())
        self.table = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 16))
        self.heads = nn.ModuleDict({"kind": nn.Linear(48, 4), "age": nn.Linear(48, 1)})

    def forward(self, image: Tensor, table: Tensor) -> dict[str, Tensor]:
        h = torch.cat([self.image(image), self.table(table)], dim=1)
        return {name: head(h) for name, head in self.heads.items()}


def image_and_table() -> tuple[Tensor, ...]:
    return (*images(), torch.randn(2, 7))
