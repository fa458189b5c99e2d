"""EfficientNet-Lite0 to Lite2 (https://github.com/tensorflow/tpu, models/official/efficientnet/lite), for
inference.

Attributes are named like the keys of the published weights, so that their files load unchanged. Dropout and
stochastic depth, which only training needs, are omitted.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

# of Lite0: repeats, kernel, stride of the first block, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLite0(nn.Module):
    """Takes images of 224×224 pixels scaled as (pixel - 127) / 128; every activation is a ReLU6."""

    pixels, width, depth = 224, 1.0, 1.0  # width and depth are factors of the channels and repeats in STAGES

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem, self._bn0, self._relu0 = SameConv2d(3, 32, 3, stride=2), norm(32), nn.ReLU6()
        self._blocks = nn.Sequential(*blocks(32, self.width, self.depth))
        last = scaled(STAGES[-1][-1], self.width)
        self._conv_head, self._bn1, self._relu1 = SameConv2d(last, 1280, 1), norm(1280), nn.ReLU6()
        self._fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(self._relu0(self._bn0(self._conv_stem(x))))
        x = self._relu1(self._bn1(self._conv_head(x)))
        return self._fc(x.mean((2, 3)))


class EfficientNetLite1(EfficientNetLite0):
    """Takes images of 240×240 pixels."""

    pixels, depth = 240, 1.1


class EfficientNetLite2(EfficientNetLite0):
    """Takes images of 260×260 pixels."""

    pixels, width, depth = 260, 1.1, 1.2


class Block(nn.Module):
    """Expansion (unless it is 1), depthwise convolution and projection, with a residual if shapes match."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and channels == out
        if self.expands:
            self._expand_conv, self._bn0, self._relu0 = SameConv2d(channels, wide, 1), norm(wide), nn.ReLU6()
        self._depthwise_conv = SameConv2d(wide, wide, kernel, stride=stride, groups=wide)
        self._bn1, self._relu1 = norm(wide), nn.ReLU6()
        self._project_conv, self._bn2 = SameConv2d(wide, out, 1), norm(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self._relu0(self._bn0(self._expand_conv(x))) if self.expands else x
        y = self._relu1(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding, which may be one larger at the bottom and the right."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = self.margins(x.shape[2]), self.margins(x.shape[3])
        if (top, left) != (bottom, right):
            x = F.pad(x, (0, right - left, 0, bottom - top))
        return F.conv2d(x, self.weight, None, self.stride, (top, left), groups=self.groups)

    def margins(self, length: int) -> tuple[int, int]:
        kernel, stride = self.kernel_size[0], self.stride[0]
        total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
        return total // 2, total - total // 2


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def scaled(channels: int, width: float) -> int:
    """The nearest multiple of 8."""
    return int(channels * width + 4) // 8 * 8


def blocks(channels: int, width: float, depth: float) -> list[Block]:
    """All stages; the first and the last one always have a single block."""
    made = []
    for repeats, kernel, stride, expansion, out in STAGES:
        out = scaled(out, width)
        for i in range(repeats if repeats == 1 else math.ceil(repeats * depth)):
            made.append(Block(channels, out, kernel, stride if i == 0 else 1, expansion))
            channels = out
    return made
