"""Spellings of ReLU, and other activations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stored_networks.registry import Written, conv, head, network


@network()
def relu_modules_in_place():
    return nn.Sequential(
        conv(3, 5), nn.ReLU(inplace=True), conv(5, 5), nn.ReLU(inplace=True), conv(5, 4),
        nn.ReLU(inplace=True), head(256),
    )  # fmt: skip


@network()
def relu_functional_in_place():
    def forward(net, x):
        x = net.a(x)
        F.relu(x, inplace=True)
        x = F.relu_(net.b(x))
        return net.head(torch.relu_(net.c(x)))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 4), head=head(256))


@network()
def relu_methods():
    def forward(net, x):
        x = net.a(x)
        x.relu_()
        x = net.b(x).relu()
        y = net.c(x)
        z = y.relu_()
        return net.head(y + 0.5 * z)

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 4), head=head(256))


@network()
def clamps():
    def forward(net, x):
        x = net.a(x)
        x.clamp_(min=0)
        x = net.b(x).clamp(min=0)
        x = net.c(x).clamp_min_(0)
        x = torch.clip(net.d(x), 0, 6)
        return net.head(F.threshold(net.e(x), 0, 0))

    return Written(
        forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 5), d=conv(5, 5), e=conv(5, 4), head=head(256)
    )  # fmt: skip


@network()
def one_relu_many_times():
    def forward(net, x):
        for layer in (net.a, net.b, net.c):
            x = net.relu(layer(x))
        return net.head(net.relu(net.relu(net.d(x))))

    return Written(
        forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 5), d=conv(5, 4), relu=nn.ReLU(), head=head(256)
    )


@network()
def relu_and_its_input():
    """Uses the pre-activation once more after the ReLU, and two ReLUs of the same tensor."""

    def forward(net, x):
        z = net.a(x)
        x = F.relu(z) + 0.3 * z + torch.relu(-z)
        return net.head(F.relu(net.b(x)))

    return Written(forward, a=conv(3, 5), b=conv(5, 4), head=head(256))


# --- other activations -------------------------------------------------------------------------------------


def activated(first: nn.Module, second: nn.Module) -> nn.Module:
    return nn.Sequential(conv(3, 5), first, conv(5, 5, stride=2), second, conv(5, 6), nn.ReLU(), head(96))


class Scale(nn.Module):
    """Scales the input up, so that some units reach the ceiling of ReLU6."""

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x


ACTIVATIONS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "relu6": lambda: (nn.Sequential(nn.ReLU6(), Scale()), nn.ReLU6(inplace=True)),
    "hardswish": lambda: (nn.Hardswish(), nn.Hardswish(inplace=True)),
    "silu": lambda: (nn.SiLU(), nn.SiLU(inplace=True)),
    "gelu": lambda: (nn.GELU(), nn.GELU(approximate="tanh")),
    "elu": lambda: (nn.ELU(), nn.ELU(0.5, inplace=True)),
    "celu": lambda: (nn.CELU(0.7), nn.CELU(inplace=True)),
    "selu": lambda: (nn.SELU(), nn.SELU(inplace=True)),
    "prelu": lambda: (nn.PReLU(5), nn.PReLU()),
    "leaky_relu": lambda: (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2, inplace=True)),
    "rrelu": lambda: (nn.RReLU(), nn.RReLU(0.1, 0.3, inplace=True)),
    "mish": lambda: (nn.Mish(), nn.Mish(inplace=True)),
    "softplus": lambda: (nn.Softplus(), nn.Softplus(beta=2)),
}
for _name, _pair in ACTIVATIONS.items():
    network(name=_name)(lambda pair=_pair: activated(*pair()))


@network()
def squashing():
    """Activations that keep their plain derivative, before a ReLU."""
    return nn.Sequential(
        conv(3, 5), nn.Tanh(), conv(5, 5), nn.Sigmoid(), conv(5, 5), nn.Hardsigmoid(), conv(5, 5),
        nn.Hardtanh(), conv(5, 4), nn.Softsign(), conv(4, 4), nn.ReLU(), head(256),
    )  # fmt: skip


@network()
def hard_sigmoid_gates():
    """Hard swish and hard sigmoid as older MobileNets write them."""

    def forward(net, x):
        x = net.a(x)
        x = x * (F.relu6(x + 3) / 6)
        x = net.b(x)
        x = x * (F.relu6(x + 3.0, inplace=True) * (1 / 6))
        x = net.c(x)
        x = x.mul(F.relu6(x + 3.0).div_(6))
        return net.head(F.relu(net.d(x)))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 5), d=conv(5, 4), head=head(256))


@network()
def tanh_only():
    """Nothing to rectify."""
    return nn.Sequential(conv(3, 5), nn.Tanh(), conv(5, 4), nn.Sigmoid(), head(256))


@network((2, 6))
def linear_only():
    return nn.Linear(6, 5)
