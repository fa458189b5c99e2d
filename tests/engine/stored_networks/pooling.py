"""Pooling and resizing."""

import torch
import torch.nn.functional as F
from torch import nn

from stored_networks.registry import Written, conv, head, network


@network((2, 3, 9, 9))
def max_pool_overlapping():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(), nn.MaxPool2d(3, 2, 1), conv(5, 5), nn.ReLU(), nn.MaxPool2d(3, 1), head(45)
    )


@network((2, 3, 9, 8), seed=1)
def max_pool_ceil():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(), nn.MaxPool2d((2, 3), ceil_mode=True), conv(5, 5), nn.ReLU(),
        nn.MaxPool2d(2, 2, 1, ceil_mode=True), head(30),
    )  # fmt: skip


@network((2, 3, 9, 9))
def max_pool_dilated():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(), nn.MaxPool2d(2, 1, dilation=2), conv(5, 5), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1, dilation=2), head(45),
    )  # fmt: skip


@network((2, 3, 9, 7))
def max_pool_adaptive():
    def forward(net, x):
        x = F.adaptive_max_pool2d(F.relu(net.a(x)), (5, 4))
        x, _ = F.adaptive_max_pool2d(F.relu(net.b(x)), 2, return_indices=True)
        return net.head(x)

    return Written(forward, a=conv(3, 5), b=conv(5, 5), head=head(20))


@network()
def max_pool_of_signed():
    """Windows with negative sums, and pooling before the activation."""
    return nn.Sequential(
        conv(3, 5), nn.MaxPool2d(2), nn.ReLU(), conv(5, 5), nn.MaxPool2d(2), nn.LeakyReLU(0.1), head(20)
    )


@network((2, 3, 15))
def max_pool1d():
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool1d(3, 2, 1, dilation=2), nn.Conv1d(6, 5, 3),
        nn.ReLU(), nn.AdaptiveMaxPool1d(2), head(10),
    )  # fmt: skip


@network((2, 2, 5, 5, 5))
def max_pool3d():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(3, 2, 1),
        nn.Conv3d(4, 5, 2),
        nn.ReLU(),
        head(40),
    )


@network()
def global_max():
    def forward(net, x):
        x = F.relu(net.b(F.relu(net.a(x))))
        return net.head(torch.cat([x.amax((2, 3)), x.flatten(2).max(dim=2).values], dim=1))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), head=nn.Linear(10, 5))


@network((2, 3, 9, 9))
def avg_pool_variants():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(), nn.AvgPool2d(3, 2, 1, count_include_pad=False), conv(5, 5), nn.ReLU(),
        nn.AvgPool2d(2, ceil_mode=True), conv(5, 5), nn.ReLU(),
        nn.AvgPool2d(2, 1, divisor_override=3), head(20),
    )  # fmt: skip


@network((2, 3, 9, 7))
def avg_pool_adaptive():
    return nn.Sequential(
        conv(3, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((4, 5)),
        conv(5, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        head(45),
    )


@network()
def global_mean():
    def forward(net, x):
        x = F.relu(net.b(F.relu(net.a(x))))
        return net.head(x.mean(dim=[2, 3])) + net.other(x.sum((2, 3)) / 64)

    return Written(forward, a=conv(3, 5), b=conv(5, 6, stride=2), head=nn.Linear(6, 5), other=nn.Linear(6, 5))


@network((2, 3, 6, 6))
def interpolated():
    def forward(net, x):
        x = F.interpolate(F.relu(net.a(x)), scale_factor=2, mode="nearest")
        x = F.interpolate(F.relu(net.b(x)), size=(5, 7), mode="bilinear", align_corners=False)
        return net.head(F.relu(net.c(x)))

    return Written(forward, a=conv(3, 4), b=conv(4, 4), c=conv(4, 4), head=head(140))


@network((2, 3, 6, 6))
def pixel_shuffle():
    return nn.Sequential(
        conv(3, 8), nn.PReLU(8), nn.PixelShuffle(2), conv(2, 3), nn.ReLU(), nn.PixelUnshuffle(3),
        conv(27, 4, 1), nn.ReLU(), head(64),
    )  # fmt: skip
