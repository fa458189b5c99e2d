"""Arithmetic between data tensors, and calls that change a gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from stored_networks.registry import Written, conv, conv_norm, head, network


@network()
def division():
    def forward(net, x):
        x = F.relu(net.a(x))
        x = x / (x.mean((1, 2, 3), keepdim=True) + 0.5)
        return net.head(F.relu(net.b(x)))

    return Written(forward, a=conv(3, 5), b=conv(5, 4), head=head(256))


@network((2, 10))
def elementary_functions():
    def forward(net, x):
        x = F.relu(net.a(x))
        x = torch.log1p(x) + (0.1 * x).exp() - torch.sqrt(x + 1) + x.pow(2) * 0.1 + (x - 0.5).abs()
        return net.head(F.relu(net.b(x))) + 1 / (1 + net.c(x) ** 2)

    return Written(forward, a=nn.Linear(10, 10), b=nn.Linear(10, 8), c=nn.Linear(10, 5), head=nn.Linear(8, 5))


@network()
def maximum_of_branches():
    """Maxout, and a maximum of two tensors."""

    def forward(net, x):
        x = torch.maximum(net.a(x), net.b(x))
        x = net.c(F.relu(x)).unflatten(1, (4, 2)).amax(2)
        return net.head(F.relu(net.d(torch.minimum(x, 2 - x))))

    return Written(forward, a=conv(3, 5), b=conv(3, 5), c=conv(5, 8), d=conv(4, 4), head=head(256))


@network((2, 10))
def softmax_output():
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5), nn.Softmax(-1))


@network((2, 10))
def log_softmax_output():
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5), nn.LogSoftmax(dim=1))


@network()
def computed_weights():
    """Weight standardisation and weight norm: weights computed in the forward pass."""

    def forward(net, x):
        weight = net.a.weight
        spread = weight.var((1, 2, 3), keepdim=True, unbiased=False)
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (spread + 1e-5).sqrt() * 0.3
        x = F.relu(F.conv2d(x, weight, net.a.bias, padding=1))
        return net.head(F.relu(net.b(x)))

    return Written(forward, a=conv(3, 5), b=parametrizations.weight_norm(conv(5, 4)), head=head(256))


@network()
def stopped_gradient():
    def forward(net, x):
        x = F.relu(net.a(x))
        with torch.no_grad():
            gate = torch.sigmoid(net.b(x))
        return net.head(F.relu(net.c(x * gate + x.detach())))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 4), head=head(256))


@network()
def checkpointed():
    def forward(net, x):
        x = checkpoint(net.first, x, use_reentrant=False)
        return net.head(checkpoint(net.second, x, use_reentrant=False))

    return Written(
        forward, first=nn.Sequential(conv_norm(3, 5), nn.ReLU()),
        second=nn.Sequential(conv(5, 4), nn.ReLU(inplace=True)), head=head(256),
    )  # fmt: skip


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        return -0.5 * R


@network((2, 10))
def gradient_reversal():
    """A custom autograd.Function that hides no activation."""

    def forward(net, x):
        x = F.relu(net.a(x))
        return net.head(F.relu(net.b(Reverse.apply(x) + 2 * x)))

    return Written(forward, a=nn.Linear(10, 10), b=nn.Linear(10, 8), head=nn.Linear(8, 5))


class HiddenSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return R * (s * (1 + x * (1 - s)))


@network((2, 10))
def hidden_activation():
    """A custom autograd.Function with an activation inside."""

    def forward(net, x):
        return net.head(F.relu(net.b(HiddenSwish.apply(net.a(x)))))

    return Written(forward, a=nn.Linear(10, 10), b=nn.Linear(10, 8), head=nn.Linear(8, 5))
