"""Convolutional networks in miniature, written as their authors write them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def images(n: int = 2) -> tuple[Tensor, ...]:
    return (torch.randn(n, 3, 16, 16),)


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
