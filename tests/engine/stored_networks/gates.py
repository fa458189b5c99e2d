"""Products with a gate that is computed from the data."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stored_networks.registry import TOKENS, Written, conv, head, network


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, gate: Callable[[Tensor], Tensor], activation: nn.Module):
        super().__init__()
        self.reduce, self.expand = conv(channels, 4, 1), conv(4, channels, 1)
        self.activation, self.gate = activation, gate

    def forward(self, x: Tensor) -> Tensor:
        scale = self.expand(self.activation(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * self.gate(scale)


@network()
def squeeze_excite():
    return nn.Sequential(
        conv(3, 6), nn.ReLU(), SqueezeExcite(6, torch.sigmoid, nn.ReLU()), conv(6, 5), nn.SiLU(),
        SqueezeExcite(5, torch.sigmoid, nn.SiLU()), head(320),
    )  # fmt: skip


@network()
def squeeze_excite_hard():
    return nn.Sequential(
        conv(3, 6), nn.Hardswish(), SqueezeExcite(6, F.hardsigmoid, nn.ReLU(inplace=True)), conv(6, 5),
        nn.ReLU(), SqueezeExcite(5, lambda x: F.relu6(x + 3) / 6, nn.ReLU()), head(320),
    )  # fmt: skip


@network((2, 10))
def highway():
    def forward(net, x):
        for transform, gate in ((net.a, net.p), (net.b, net.q)):
            g = torch.sigmoid(gate(x))
            x = g * F.relu(transform(x)) + (1 - g) * x
        return net.head(x)

    return Written(
        forward, a=nn.Linear(10, 10), b=nn.Linear(10, 10), p=nn.Linear(10, 10), q=nn.Linear(10, 10),
        head=nn.Linear(10, 5),
    )  # fmt: skip


@network(TOKENS)
def glu():
    return nn.Sequential(
        nn.Linear(8, 24), nn.GLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 8), nn.GLU(1), head(24)
    )


@network(TOKENS)
def swiglu():
    def forward(net, x):
        x = x + net.down(F.silu(net.gate(x)) * net.up(x))
        value, gate = net.both(x).chunk(2, dim=-1)
        return net.head((value * F.gelu(gate)).mean(1))

    return Written(
        forward, gate=nn.Linear(8, 12), up=nn.Linear(8, 12), down=nn.Linear(12, 8), both=nn.Linear(8, 16),
        head=nn.Linear(8, 5),
    )  # fmt: skip


@network()
def softmax_gates():
    """Branches weighted by a softmax, as in selective kernels."""

    def forward(net, x):
        branches = torch.stack([F.relu(net.a(x)), F.relu(net.b(x))], dim=1)
        pooled = branches.sum(1).mean((2, 3))
        gates = F.softmax(net.gate(F.relu(net.squeeze(pooled))).view(-1, 2, 5), dim=1)
        return net.head((branches * gates[..., None, None]).sum(dim=1))

    return Written(
        forward, a=conv(3, 5), b=conv(3, 5, 5), squeeze=nn.Linear(5, 6), gate=nn.Linear(6, 10), head=head(320)
    )


@network((2, 10))
def mixture_of_all():
    """Every expert on every sample, weighted by softmax."""

    def forward(net, x):
        gates = net.gate(x).softmax(-1)
        outputs = torch.stack([F.relu(net.a(x)), F.relu(net.b(x)), F.relu(net.c(x))], dim=-1)
        return net.head(torch.einsum("nfe,ne->nf", outputs, gates))

    experts = {name: nn.Linear(10, 8) for name in "abc"}
    return Written(forward, **experts, gate=nn.Linear(10, 3), head=nn.Linear(8, 5))
