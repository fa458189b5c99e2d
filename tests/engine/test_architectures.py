"""Real architectures in miniature, written as their authors write them: maps against explicit layers.

The expected maps come from the same network run on its own, sample by sample, with every activation of
`torch.nn.functional` replaced by an autograd.Function whose backward step is the rule, and a plain gradient.
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import rectgrad
from rectgrad import UnsupportedModelError

# DeepLIFT has no exact rule for the insides of a recurrent layer, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:DeepLIFT's map")

Q = 60.0
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"q": Q} for name in ("rectgrad", "rectgrad_prr", "rectgrad_mod")},
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 3},
}


def images(n: int = 2) -> tuple[Tensor, ...]:
    return (torch.randn(n, 3, 16, 16),)


def tokens(n: int = 2, length: int = 6, width: int = 8) -> tuple[Tensor, ...]:
    return (torch.randn(n, length, width),)


@dataclass(frozen=True)
class Case:
    """`build` makes the network; `exact`: DeepLIFT has a rule for every step; `relu`: all activations are."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]] = images
    target: Any = 1
    exact: bool = True
    relu: bool = False
    kwargs: Callable[[], dict] = field(default=dict)


# --- convolutional networks --------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = BasicBlock(6, 6)
        self.layer2 = BasicBlock(6, 8, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int, memory_efficient: bool) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, growth, 3, padding=1, bias=False)
        self.memory_efficient = memory_efficient

    def bn_function(self, *inputs: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, features: list[Tensor]) -> Tensor:
        if self.memory_efficient and any(tensor.requires_grad for tensor in features):
            return checkpoint(self.bn_function, *features, use_reentrant=False)
        return self.bn_function(*features)


class DenseNet(nn.Module):
    def __init__(self, memory_efficient: bool = False) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 6, 3, padding=1)
        self.block = nn.ModuleList([DenseLayer(6 + 4 * i, 4, memory_efficient) for i in range(3)])
        self.norm5 = nn.BatchNorm2d(18)
        self.classifier = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.conv0(x)]
        for layer in self.block:
            features.append(layer(features))
        out = F.relu(self.norm5(torch.cat(features, 1)), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


class BasicConv2d(nn.Module):
    def __init__(self, channels: int, out: int, **kwargs: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


InceptionOutputs = namedtuple("InceptionOutputs", ["logits", "aux_logits"])


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = BasicConv2d(3, 6, kernel_size=3, stride=1, padding=1)
        self.branch1 = BasicConv2d(6, 4, kernel_size=1)
        self.branch7_1 = BasicConv2d(6, 4, kernel_size=(1, 7), padding=(0, 3))
        self.branch7_2 = BasicConv2d(4, 4, kernel_size=(7, 1), padding=(3, 0))
        self.branch_pool = BasicConv2d(6, 4, kernel_size=1)
        self.aux = BasicConv2d(12, 4, kernel_size=1)
        self.aux_fc, self.fc = nn.Linear(4, 5), nn.Linear(12, 5)

    def _forward(self, x: Tensor) -> list[Tensor]:
        branch_pool = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return [self.branch1(x), self.branch7_2(self.branch7_1(x)), self.branch_pool(branch_pool)]

    def forward(self, x: Tensor) -> InceptionOutputs:
        x = F.max_pool2d(self.stem(x), kernel_size=3, stride=2, ceil_mode=True)
        x = torch.cat(self._forward(x), 1)
        aux = self.aux_fc(torch.flatten(F.adaptive_avg_pool2d(self.aux(x), (1, 1)), 1))
        return InceptionOutputs(self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)), aux)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, activation: type, scale: type) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.activation, self.scale_activation = activation(), scale()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(scale)) * x


def drop_connect(x: Tensor, p: float, training: bool) -> Tensor:
    if not training:
        return x
    keep = torch.rand([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
    return x / (1 - p) * torch.floor(1 - p + keep)


class InvertedResidual(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module], squeeze: nn.Module | None = None) -> None:
        super().__init__()
        layers = [nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), activation()]
        layers += [nn.Conv2d(12, 12, 3, 1, 1, groups=12, bias=False), nn.BatchNorm2d(12), activation()]
        layers += [squeeze] if squeeze else []
        self.conv = nn.Sequential(*layers, nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + drop_connect(self.conv(x), 0.2, self.training)


def mobile(activation: Callable[[], nn.Module], squeeze: Callable[[], nn.Module | None]) -> nn.Module:
    stem = [nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), activation()]
    blocks = [InvertedResidual(activation, squeeze()), InvertedResidual(activation)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


class ChannelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.branch = nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            x1, x2 = x.chunk(2, dim=1)
            x = torch.cat((x1, self.branch(x2)), dim=1)
            n, c, h, w = x.size()
            x = x.view(n, 2, c // 2, h, w)
            x = torch.transpose(x, 1, 2).contiguous()
            x = x.view(n, c, h, w)
        return self.fc(x.mean([2, 3]))


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.5 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + x


def convnext() -> nn.Module:
    stem = nn.Conv2d(3, 6, 4, 4)
    return nn.Sequential(stem, ConvNeXtBlock(6), ConvNeXtBlock(6), Pooled(), nn.LayerNorm(6), nn.Linear(6, 5))


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean([-2, -1])


class ScaledStdConv2d(nn.Conv2d):
    """Weight standardisation as in NFNet: a batch norm of the weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        flat, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * self.scale).view(-1)
        weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NFNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv1 = ScaledStdConv2d(3, 6, 3, 2, 1), ScaledStdConv2d(6, 6, 3, 1, 1)
        self.conv2, self.fc = ScaledStdConv2d(6, 6, 3, 1, 1), nn.Linear(6, 5)
        self.skipinit_gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = F.gelu(x) * 1.7015043497085571 * 0.9
        out = self.conv2(F.gelu(self.conv1(out)).mul_(1.7015043497085571))
        out.mul_(self.skipinit_gain)
        out = out * 0.2 + x
        return self.fc((F.gelu(out) * 1.7).mean((2, 3)))


def parametrised() -> nn.Module:
    spectral = parametrizations.spectral_norm(nn.Conv2d(3, 6, 3, padding=1))
    weight = parametrizations.weight_norm(nn.Conv2d(6, 6, 3, padding=1))
    head = parametrizations.orthogonal(nn.Linear(6, 5))
    return nn.Sequential(spectral, nn.ReLU(), weight, nn.LeakyReLU(0.1), Pooled(), head)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.down2 = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.merge1 = nn.Sequential(nn.Conv2d(14, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.merge2, self.out = nn.Sequential(nn.Conv2d(14, 6, 3, padding=1), nn.ReLU()), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x1 = self.down1(x)
        x2 = self.down2(F.max_pool2d(x1, 2))
        x3 = self.up(self.bottom(F.max_pool2d(x2, 2)))
        dy, dx = x2.size(2) - x3.size(2), x2.size(3) - x3.size(3)
        x3 = F.pad(x3, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        y = self.merge1(torch.cat([x2, x3], dim=1))
        y = F.interpolate(y, size=x1.shape[-2:], mode="bilinear", align_corners=False)
        return {"out": self.out(self.merge2(torch.cat([x1, y], dim=1)))}


def one_region(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["out"][:, 2, 4:9, 5:12].mean((1, 2))


def super_resolution() -> nn.Module:
    body = [nn.Conv2d(3, 8, 5, padding=2), nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1), nn.ELU(inplace=True)]
    return nn.Sequential(*body, nn.Conv2d(12, 12, 3, padding=1), nn.PixelShuffle(2))


# --- tokens ------------------------------------------------------------------------------------------------


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


CASES: dict[str, Case] = {
    "resnet": Case(ResNet, relu=True),
    "densenet": Case(DenseNet, relu=True),
    "densenet, checkpointed": Case(partial(DenseNet, memory_efficient=True), relu=True),
    "inception": Case(Inception, relu=True),
    "inception, auxiliary head": Case(Inception, target=lambda out: out.aux_logits[:, 1], relu=True),
    "mobilenet v2": Case(lambda: mobile(partial(nn.ReLU6, inplace=True), lambda: None)),
    "mobilenet v3": Case(
        lambda: mobile(
            partial(nn.Hardswish, inplace=True), lambda: SqueezeExcitation(12, nn.ReLU, nn.Hardsigmoid)
        )
    ),
    "efficientnet": Case(
        lambda: mobile(partial(nn.SiLU, inplace=True), lambda: SqueezeExcitation(12, nn.SiLU, nn.Sigmoid))
    ),
    "shufflenet": Case(ChannelShuffle, relu=True),
    "convnext": Case(convnext),
    "nfnet": Case(NFNet),
    "parametrised weights": Case(parametrised),
    "u-net": Case(UNet, target=one_region, relu=True),
    "super-resolution": Case(super_resolution, target=lambda out: out[:, 1, 10:14, 20:25].sum((1, 2))),
    "vit": Case(lambda: ViT(Attention)),
    "vit, attention by hand": Case(lambda: ViT(partial(Attention, fused=False))),
    "vit, nn.MultiheadAttention": Case(lambda: ViT(LibraryAttention)),
    "swin": Case(Swin),
    "mixer": Case(lambda: nn.Sequential(MixerBlock(6, 8), Mean(), nn.Linear(8, 5)), tokens),
    "encoder, relu": Case(Encoder, tokens),
    "encoder, gelu, padded": Case(partial(Encoder, activation="gelu"), tokens, kwargs=padding),
    "encoder, norm first, padded": Case(partial(Encoder, norm_first=True), tokens, kwargs=padding),
    "encoder, sequence first, padded": Case(partial(Encoder, batch_first=False), tokens, kwargs=padding),
    "encoder, as many tokens as samples": Case(
        partial(Encoder, batch_first=False), partial(tokens, n=3, length=3)
    ),
    "lstm": Case(partial(Recurrent, nn.LSTM), tokens, exact=False),
    "gru, two layers": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Recurrent(nn.GRU, num_layers=2)),
        tokens,
        exact=False,
    ),
    "experts": Case(Experts, partial(tokens, length=9), exact=False),
    "siamese": Case(Siamese, pairs),
    "two heads": Case(TwoHeads, image_and_table, target=lambda out: out["age"].squeeze(1)),
}


def unsettled(build: Callable[[], nn.Module]) -> nn.Module:
    """The network with weights and running statistics that are not those of its initialisation."""
    torch.manual_seed(1)
    model = build().double().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return model


def prepared(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], dict]:
    torch.manual_seed(2)
    inputs = tuple(x.double() for x in case.inputs())
    return unsettled(case.build), inputs, case.kwargs()


def maps(
    model: Any, inputs: tuple[Tensor, ...], method: str, case: Case, kwargs: dict, **options: Any
) -> Any:
    options = {**OPTIONS.get(method, {}), **options}
    return rectgrad.attribute(model, inputs, method, case.target, forward_kwargs=kwargs, **options)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1e-3)


# --- the same network with explicit activations ------------------------------------------------------------


def explicit(function: Callable[..., Tensor], rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    class Explicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor, args: tuple, kwargs: dict) -> Tensor:
            a = function(z, *args, **kwargs)
            ctx.save_for_backward(z, a.clone())  # the network may go on in place
            return a

        @staticmethod
        def backward(ctx: Any, R: Tensor) -> Any:
            return rule(*ctx.saved_tensors, R), None, None

    def activation(z: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args if not isinstance(a, bool))
        return Explicit.apply(z.clone() if inplace else z, args, kwargs)

    return activation


RECTIFIERS = "relu relu6 leaky_relu prelu elu silu gelu hardswish".split()


@contextlib.contextmanager
def explicit_activations(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in RECTIFIERS:
            stack.enter_context(mock.patch.object(F, name, explicit(getattr(F, name), rule)))
        ceiling = explicit(F.hardtanh, rule)
        stack.enter_context(mock.patch.object(F, "hardtanh", ceiling))  # nn.ReLU6
        yield


def explicit_maps(case: Case, rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    """The plain gradient of the network with explicit activations, one sample at a time."""
    with explicit_activations(rule):
        model, inputs, kwargs = prepared(case)
        found = []
        for i in range(len(inputs[0])):
            one = tuple(x[i : i + 1].clone().requires_grad_() for x in inputs)
            outputs = model(*one, **{k: v[i : i + 1] for k, v in kwargs.items()})
            found.append(torch.autograd.grad(scores(outputs, case.target).sum(), one))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def scores(outputs: Any, target: Any) -> Tensor:
    return target(outputs) if callable(target) else getattr(outputs, "logits", outputs)[:, target]


def rectified(z: Tensor, a: Tensor, R: Tensor) -> Tensor:
    s = (a * R).flatten()
    tau = s.sort(descending=True).values[round((len(s) - 1) * (1 - Q / 100))]
    return R * (a * R > tau)


RULES: dict[str, tuple[str, dict, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "guided": ("guided_backprop", {}, lambda z, a, R: R * (R > 0) * (z > 0)),
    "deconv": ("deconv", {}, lambda z, a, R: R * (R > 0)),
    "all pass": ("rectgrad", {"tau": -1e30}, lambda z, a, R: R),
    "rectified": ("rectgrad", {}, rectified),
}
BARE = {"padding_trick": False, "multiply_by_input": False, "positive_only": False}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_an_explicit_activation(name: str, rule: str) -> None:
    method, options, step = RULES[rule]
    case = CASES[name]
    options = {**options, **BARE} if method == "rectgrad" else options
    found = maps(*prepared(case)[:2], method, case, case.kwargs(), **options)
    same(found, explicit_maps(case, step))


@pytest.mark.parametrize("name", CASES)
def test_saliency_is_the_gradient(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    expected = torch.autograd.grad(scores(model(*leaves, **kwargs), case.target).sum(), leaves)
    same(maps(model, inputs, "saliency", case, kwargs), expected, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_every_method_alone_in_a_batch_and_on_a_record(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    kept = rectgrad.record(model, inputs, forward_kwargs=kwargs)
    for method in rectgrad.METHODS:
        if method == "deeplift" and name == "experts":
            continue  # the baseline is sent to other experts: see below
        together = maps(model, inputs, method, case, kwargs)
        assert all(bool(m.isfinite().all()) for m in together)
        assert any(bool((m != 0).any()) for m in together)
        same(kept.attribute(method, case.target, **OPTIONS.get(method, {})), together)
        last = tuple(x[-1:] for x in inputs)
        alone = maps(model, last, method, case, {k: v[-1:] for k, v in kwargs.items()})
        same(alone, tuple(m[-1:] for m in together))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exact])
def test_deeplift_adds_up_to_the_difference(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    baseline = tuple(0.3 * torch.randn_like(x) for x in inputs)
    found = maps(model, inputs, "deeplift", case, kwargs, baseline=baseline)
    total = sum(m.flatten(1).sum(1) for m in found)
    difference = [scores(model(*x, **kwargs), case.target).detach() for x in (inputs, baseline)]
    torch.testing.assert_close(total, difference[0] - difference[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.relu])
def test_epsilon_lrp_of_a_relu_network_tends_to_gradient_times_input(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    found = maps(model, inputs, "epsilon_lrp", case, kwargs, epsilon=1e-13)
    same(found, maps(model, inputs, "gradient_x_input", case, kwargs), 1e-6)


# --- other forms of a model --------------------------------------------------------------------------------

FORMS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Any]] = {
    "fx": lambda model, inputs: torch.fx.symbolic_trace(model).eval(),
    "export": lambda model, inputs: torch.export.export(model, inputs).module(),
    "compile": lambda model, inputs: torch.compile(model, backend="aot_eager"),
    "functional_call": lambda model, inputs: partial(call, model, dict(model.named_parameters())),
}


def call(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.functional_call(model, parameters, (x,))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["resnet", "mobilenet v2", "mobilenet v3", "shufflenet", "mixer"])
def test_another_form_of_a_model_has_the_same_maps(name: str, form: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    other = FORMS[form](model, inputs)
    for method in ("rectgrad", "rectgrad_prr", "guided_backprop", "deconv", "epsilon_lrp", "deeplift"):
        same(maps(other, inputs, method, case, kwargs), maps(model, inputs, method, case, kwargs))


# --- what cannot be explained ------------------------------------------------------------------------------


class SwishImplementation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        i = ctx.saved_tensors[0]
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishImplementation.apply(x)


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv", "deeplift", "epsilon_lrp"])
def test_a_memory_efficient_swish_is_refused(method: str) -> None:
    case = Case(lambda: mobile(MemoryEfficientSwish, lambda: SqueezeExcitation(12, nn.ReLU, nn.Sigmoid)))
    model, inputs, kwargs = prepared(case)
    with pytest.raises(UnsupportedModelError, match="SwishImplementation, which hides a sigmoid"):
        maps(model, inputs, method, case, kwargs)


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv", "deeplift", "epsilon_lrp"])
def test_a_recurrent_network_with_relu_is_refused(method: str) -> None:
    case = Case(partial(Recurrent, nn.RNN, nonlinearity="relu"), tokens)
    model, inputs, kwargs = prepared(case)
    with pytest.raises(UnsupportedModelError, match=r"an nn\.RNN with ReLU"):
        maps(model, inputs, method, case, kwargs)


def test_deeplift_refuses_experts_that_the_baseline_does_not_reach() -> None:
    case = CASES["experts"]
    model, inputs, kwargs = prepared(case)
    with pytest.raises(ValueError, match="ran other operations on the baseline"):
        maps(model, inputs, "deeplift", case, kwargs)


# --- where sizes, weights and masks mislead ----------------------------------------------------------------


def alone(model: Any, x: Tensor, method: str, **options: Any) -> Tensor:
    """The maps of the samples, each explained by itself."""
    return torch.cat([rectgrad.attribute(model, x[i : i + 1], method, 0, **options) for i in range(len(x))])


def test_as_many_tokens_for_an_expert_as_samples() -> None:
    model = unsettled(Experts)
    model.gate = None
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    x[:, :, 0] = torch.tensor([[-1, -1], [1, 1], [1, -1], [-1, 1]])

    def forward(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = flat[:, 0] > 0
        out = torch.zeros_like(flat)
        out[chosen], out[~chosen] = model.experts[0](flat[chosen]), model.experts[1](flat[~chosen])
        return model.head(out.view_as(x).mean(1))

    same(
        (rectgrad.attribute(forward, x, "rectgrad", 0, q=90),),
        (alone(forward, x, "rectgrad", q=90),),
    )


def test_an_exported_encoder_with_as_many_tokens_as_samples() -> None:
    case = CASES["encoder, as many tokens as samples"]
    model, inputs, kwargs = prepared(case)
    sizes = ({0: torch.export.Dim("n", min=1, max=9)},)
    exported = torch.export.export(model, inputs, dynamic_shapes=sizes).module()
    found = (maps(form, inputs, "rectgrad", case, kwargs, q=90.0) for form in (exported, model))
    same(*found)


class MaskedAttention(nn.Module):
    """Left padding under a causal mask: the first tokens attend to nothing, and torch makes that zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask[:, :2] = False
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.relu(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).mean(1))


@pytest.mark.parametrize("method", ["rectgrad", "epsilon_lrp", "deeplift"])
def test_tokens_that_attend_to_nothing(method: str) -> None:
    case = Case(MaskedAttention, tokens)
    model, inputs, _ = prepared(case)
    kept = rectgrad.record(model, inputs)
    torch.testing.assert_close(kept.outputs, model(*inputs).detach())
    kept.attribute(method, 0, **OPTIONS.get(method, {}))


@pytest.mark.parametrize("form", ["functional_call", "cached parametrisation"])
def test_weights_computed_before_the_call(form: str) -> None:
    case = CASES["parametrised weights"]
    model, inputs, kwargs = prepared(case)
    expected = maps(model, inputs, "epsilon_lrp", case, kwargs)
    if form == "functional_call":
        weights = {name: 1.0 * value for name, value in model.named_parameters()}
        found = maps(partial(call, model, weights), inputs, "epsilon_lrp", case, kwargs)
    else:
        with torch.nn.utils.parametrize.cached():
            model(*inputs)
            found = maps(model, inputs, "epsilon_lrp", case, kwargs)
    same(found, expected)


class CosineAttention(nn.Module):
    """Scores of normalised vectors, as in Swin V2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return self.head(F.relu(attn.softmax(-1) @ v + F.normalize(v, dim=-1)).mean(1))


def test_epsilon_lrp_of_normalised_vectors() -> None:
    case = Case(CosineAttention, tokens)
    model, inputs, kwargs = prepared(case)
    assert bool((maps(model, inputs, "epsilon_lrp", case, kwargs)[0] != 0).any())


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(6).roll(1, 0).to_sparse())
        self.fc, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc(x)).transpose(0, 1)
        mixed = torch.sparse.mm(self.adjacency, hidden.flatten(1)).view_as(hidden)
        return self.head(mixed.mean(0))


def test_a_graph_convolution_with_a_sparse_buffer() -> None:
    case = Case(GraphConvolution, tokens)
    found = maps(*prepared(case)[:2], "guided_backprop", case, {})
    same(found, explicit_maps(case, RULES["guided"][2]))


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv"])
@pytest.mark.parametrize("sixth", [lambda x: x / 6, lambda x: x * (1 / 6), lambda x: x.div_(6)])
def test_a_hard_sigmoid_written_with_relu6_is_no_rectifier(method: str, sixth: Any) -> None:
    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * sixth(F.relu6(x + 3))

    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * F.hardsigmoid(x)

    found = []
    for activation in (ByHand, Gated):
        case = Case(lambda act=activation: mobile(act, lambda: SqueezeExcitation(12, nn.ReLU, nn.Sigmoid)))
        model, inputs, kwargs = prepared(case)
        found.append(maps(model, inputs, method, case, kwargs)[0])
    # torch's own hard sigmoid is not exact to the last bits of float64
    assert (found[0] - found[1]).abs().max() <= 1e-6 * found[1].abs().max()


def test_layers_of_experts() -> None:
    """Each sample meets other experts: their layers do not pair up."""
    case = CASES["experts"]
    model, inputs, _ = prepared(case)
    with pytest.raises(ValueError, match="different paths"):
        rectgrad.layer_attributions(model, inputs, "rectgrad", 1, q=Q)
    pairs = rectgrad.layer_attributions(model, inputs[0][:1], "rectgrad", 1, q=Q)
    assert {name.split(".")[0] for name, _ in pairs} == {"experts"}
