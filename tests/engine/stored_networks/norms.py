"""Batch norm and other norms."""

import torch.nn.functional as F
from torch import nn

from stored_networks.registry import TOKENS, Written, conv, conv_norm, head, network


@network()
def batch_norm_after():
    return nn.Sequential(
        conv_norm(3, 6), nn.ReLU(), conv_norm(6, 6, stride=2), nn.ReLU(), conv_norm(6, 4), nn.ReLU(), head(64)
    )


@network()
def batch_norm_before():
    return nn.Sequential(
        nn.BatchNorm2d(3), conv(3, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 5), nn.ReLU(), nn.BatchNorm2d(5),
        conv(5, 4), nn.ReLU(), head(256),
    )  # fmt: skip


@network()
def batch_norm_after_relu():
    return nn.Sequential(
        conv(3, 6), nn.ReLU(), nn.BatchNorm2d(6, affine=False), conv(6, 4), nn.ReLU(), nn.BatchNorm2d(4),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5),
    )  # fmt: skip


@network()
def group_norm():
    return nn.Sequential(
        conv(3, 6), nn.GroupNorm(2, 6), nn.ReLU(), conv(6, 6), nn.GroupNorm(6, 6), nn.ReLU(), head(384)
    )


@network()
def layer_norm():
    def forward(net, x):
        x = F.relu(net.norm(net.conv(x)))
        x = net.channels(x.permute(0, 2, 3, 1))
        return net.head(F.relu(net.linear(x)))

    return Written(
        forward, conv=conv(3, 4), norm=nn.LayerNorm((4, 8, 8)), channels=nn.LayerNorm(4),
        linear=nn.Linear(4, 4), head=head(256),
    )  # fmt: skip


@network()
def instance_norm():
    return nn.Sequential(
        conv(3, 5), nn.InstanceNorm2d(5, affine=True), nn.ReLU(), conv(5, 5), nn.InstanceNorm2d(5), nn.ReLU(),
        conv(5, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(), head(256),
    )  # fmt: skip


@network(TOKENS)
def rms_norm():
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.RMSNorm(12),
        nn.ReLU(),
        nn.Linear(12, 8),
        nn.RMSNorm(8, eps=1e-6),
        nn.SiLU(),
        head(48),
    )


@network()
def local_response_norm():
    return nn.Sequential(
        conv(3, 6),
        nn.ReLU(),
        nn.LocalResponseNorm(3, alpha=0.1),
        nn.MaxPool2d(2),
        conv(6, 5),
        nn.ReLU(),
        head(80),
    )


@network(TOKENS, seed=1)
def normalised_vectors():
    def forward(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return net.head(F.relu(scores.softmax(-1) @ v + F.normalize(v, dim=-1)).mean(1))

    return Written(forward, qkv=nn.Linear(8, 24), head=nn.Linear(8, 5))
