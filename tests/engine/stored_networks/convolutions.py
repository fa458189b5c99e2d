"""Convolutions and their padding."""

import torch
import torch.nn.functional as F
from torch import nn

from stored_networks.registry import Written, conv, head, network


@network()
def plain_cnn():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(), nn.MaxPool2d(2), conv(5, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 5),
    )  # fmt: skip


@network()
def all_convolutional():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(), conv(5, 6, stride=2), nn.ReLU(), conv(6, 5, padding=0), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


@network((2, 3, 6, 6))
def pointwise():
    return nn.Sequential(
        conv(3, 6, 1), nn.ReLU(), conv(6, 6, 1), nn.ReLU(), conv(6, 4, 1), nn.ReLU(), head(144)
    )


@network((2, 3, 11, 9))
def strided():
    return nn.Sequential(
        conv(3, 6, stride=2), nn.ReLU(), nn.Conv2d(6, 6, 3, (1, 2), (0, 1)), nn.ReLU(), head(72)
    )


@network((2, 3, 10, 10))
def dilated():
    return nn.Sequential(
        conv(3, 5, dilation=2, padding=2), nn.ReLU(), conv(5, 5, dilation=3, padding=1), nn.ReLU(), head(180)
    )


@network()
def grouped():
    return nn.Sequential(conv(3, 6, groups=3), nn.ReLU(), conv(6, 8, groups=2), nn.ReLU(), head(512))


@network()
def depthwise():
    return nn.Sequential(
        conv(3, 6, 1), nn.ReLU(), conv(6, 6, groups=6), nn.ReLU(), conv(6, 4, 1), nn.ReLU(),
        conv(4, 8, 5, groups=4), nn.ReLU(), nn.AvgPool2d(4), head(32),
    )  # fmt: skip


@network()
def same_padding():
    return nn.Sequential(
        conv(3, 5, padding="same"), nn.ReLU(), conv(5, 5, (5, 1), padding="same"), nn.ReLU(),
        conv(5, 4, 3, padding="same", dilation=2), nn.ReLU(), head(256),
    )  # fmt: skip


@network()
def same_padding_even_kernel():
    return nn.Sequential(
        conv(3, 5, 2, padding="same"), nn.ReLU(), conv(5, 5, 4, padding="same"), nn.ReLU(), head(320)
    )


@network()
def asymmetric_pad():
    def forward(net, x):
        x = F.relu(net.a(F.pad(x, (1, 0, 0, 2))))
        x = F.relu(net.b(F.pad(x, (0, 1, 2, 0), value=0.0)))
        return net.head(x)

    return Written(forward, a=conv(3, 5, padding=0), b=conv(5, 4), head=head(320))


@network()
def zero_pad_module():
    return nn.Sequential(
        nn.ZeroPad2d((1, 1, 0, 2)), conv(3, 5, padding=0), nn.ReLU(), nn.ConstantPad2d(1, 0.5),
        conv(5, 4, padding=0), nn.ReLU(), head(256),
    )  # fmt: skip


@network()
def reflection_pad():
    return nn.Sequential(
        nn.ReflectionPad2d(1), conv(3, 5, padding=0), nn.ReLU(), conv(5, 5, padding_mode="reflect"),
        nn.ReLU(), conv(5, 5, padding_mode="replicate"), nn.ReLU(), conv(5, 4, padding_mode="circular"),
        nn.ReLU(), head(256),
    )  # fmt: skip


@network(seed=1)
def cropped_and_channel_padded():
    def forward(net, x):
        x = F.relu(net.a(x))
        x = F.relu(net.b(F.pad(x, (-1, -1, -2, 0))))
        return net.head(F.relu(net.c(F.pad(x, (0, 0, 0, 0, 1, 2)))))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(8, 4), head=head(144))


@network((2, 2, 20))
def conv1d():
    return nn.Sequential(
        nn.Conv1d(2, 6, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool1d(3, 2, 1),
        nn.Conv1d(6, 6, 3, padding="same"), nn.BatchNorm1d(6), nn.ReLU(), nn.AdaptiveAvgPool1d(3), head(18),
    )  # fmt: skip


@network((2, 2, 4, 5, 5))
def conv3d():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2, ceil_mode=True),
        nn.Conv3d(4, 5, 2, padding=(1, 0, 0)), nn.ReLU(), nn.AdaptiveMaxPool3d((2, 1, 1)), head(10),
    )  # fmt: skip


@network((2, 3, 5, 5))
def transposed():
    return nn.Sequential(
        nn.ConvTranspose2d(3, 5, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(5, 4, 2), nn.ReLU(), conv(4, 3), nn.ReLU(), head(300),
    )  # fmt: skip


@network((2, 4, 7))
def transposed1d_grouped():
    return nn.Sequential(
        nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), nn.ReLU(),
        nn.Conv1d(6, 4, 3, padding=1), nn.ReLU(), head(56),
    )  # fmt: skip


@network((2, 2, 3, 3, 3))
def transposed3d():
    return nn.Sequential(
        nn.ConvTranspose3d(2, 4, 2, stride=2), nn.ReLU(), nn.Conv3d(4, 3, 3), nn.ReLU(), head(192)
    )


@network(memory_format=torch.channels_last)
def channels_last():
    return nn.Sequential(
        conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), conv(6, 6, groups=6),
        nn.ReLU6(), conv(6, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), head(32),
    )  # fmt: skip


@network((2, 2, 4, 5, 5), memory_format=torch.channels_last_3d)
def channels_last_3d():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.AvgPool3d(2), nn.Conv3d(4, 5, 1),
        nn.ReLU(), head(40),
    )  # fmt: skip


@network()
def unfolded_convolution():
    """A convolution written as a matrix product of patches."""

    def forward(net, x):
        patches = F.unfold(x, 3, padding=1, stride=2)
        x = F.relu(net.a(patches.transpose(1, 2))).transpose(1, 2)
        x = F.fold(x, (8, 8), 2, stride=2)
        return net.head(F.relu(net.b(x)))

    return Written(forward, a=nn.Linear(27, 12), b=conv(3, 4), head=head(256))
