"""Residual networks (He et al., 2015): ResNet-50 v1.5 (a block's stride is in its 3×3 convolution), and
ResNet-20 for CIFAR-10, twice as wide.

Attributes are named like torchvision's keys, so that its files load unchanged.
"""

from __future__ import annotations

from torch import Tensor, nn


class ResNet50(nn.Module):
    """Takes images of 224×224 pixels; every activation is an in-place ReLU."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = stage(64, 64, 3, stride=1)
        self.layer2 = stage(256, 128, 4, stride=2)
        self.layer3 = stage(512, 256, 6, stride=2)
        self.layer4 = stage(1024, 512, 3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with four times as many output channels, and a residual connection."""

    def __init__(self, channels: int, narrow: int, stride: int) -> None:
        super().__init__()
        wide = 4 * narrow
        self.conv1, self.bn1 = nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or channels != wide:
            shortcut = nn.Conv2d(channels, wide, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class CifarResNet(nn.Module):
    """Takes images of 32×32 pixels scaled to -1..1: nine basic blocks, 1.1 million parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(32, 32, 1), Basic(32, 32, 1), Basic(32, 32, 1))
        self.layer2 = nn.Sequential(Basic(32, 64, 2), Basic(64, 64, 1), Basic(64, 64, 1))
        self.layer3 = nn.Sequential(Basic(64, 128, 2), Basic(128, 128, 1), Basic(128, 128, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(self.avgpool(x).flatten(1))


class Basic(nn.Module):
    """Two 3×3 convolutions and a residual connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or channels != out:
            shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def stage(channels: int, narrow: int, repeats: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, narrow, stride)
    return nn.Sequential(first, *(Bottleneck(4 * narrow, narrow, 1) for _ in range(repeats - 1)))
