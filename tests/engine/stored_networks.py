"""Small deterministic networks, one for each way of writing a model that the engine has to follow.

`NETWORKS[name]()` returns a model in evaluation mode and its inputs, a tensor or a tuple of them. Weights,
buffers and inputs come from `numpy.random.RandomState`, whose stream never changes, and are seeded by their
own names: neither a torch version nor another network in this file affects them. Most networks are float64,
so that rounding cannot move a unit across a threshold. Nothing here knows about attributions.
"""

import math
import zlib
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Inputs = Tensor | tuple[Tensor, ...]
IMAGE = (2, 3, 8, 8)
TOKENS = (2, 6, 8)

NETWORKS: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {}


def network(
    *shapes: tuple[int, ...],
    name: str = "",
    seed: int = 0,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Add a function that builds a module to NETWORKS, under its own name or another.

    shapes: those of the inputs; default: one batch of images. seed: the default of what is registered; it is
    not 0 where 0 puts a unit's score next to the threshold or produces an empty map.
    """

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        key = name or build.__name__

        def make(seed: int = seed, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Inputs]:
            with torch.random.fork_rng(devices=[]):
                model = build()
            fill(model, f"{key} {seed}")
            inputs = [
                torch.from_numpy(normal(shape, f"{key} {seed} input {i}")).to(dtype)
                for i, shape in enumerate(shapes or (IMAGE,))
            ]
            model = model.to(dtype).eval()
            if memory_format is not None:
                model = model.to(memory_format=memory_format)
                inputs = [x.contiguous(memory_format=memory_format) for x in inputs]
            return model, inputs[0] if len(inputs) == 1 else tuple(inputs)

        NETWORKS[key] = make
        return build

    return register


def also_in(dtype: torch.dtype, name: str, seed: int | None = None) -> None:
    """Add the network `name` once more, in another floating type."""
    make = NETWORKS[name]
    kwargs = {} if seed is None else {"seed": seed}
    NETWORKS[f"{name}_{str(dtype).removeprefix('torch.')}"] = lambda **given: make(
        **{**kwargs, "dtype": dtype, **given}
    )


def uniform(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Numbers between 0 and 1 that depend on the name alone."""
    return np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)


def normal(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Almost normal: a sum of twelve uniform numbers is the same to the last bit on every platform, which a
    logarithm is not. RandomMap hashes these bits."""
    total = np.zeros(shape)
    for i in range(12):
        total += uniform(shape, f"{name} {i}")
    return total - 6


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


@torch.no_grad()
def fill(model: nn.Module, name: str) -> None:
    """Weights that carry a signal to the output, and norms unlike those of a fresh layer."""
    for path, module in model.named_modules():
        for key, value in module.named_parameters(recurse=False):
            value.copy_(torch.from_numpy(weights(module, key, tuple(value.shape), f"{name} {path}.{key}")))
        for key, value in module.named_buffers(recurse=False):
            if key == "running_mean":
                value.copy_(torch.from_numpy(0.3 * normal(tuple(value.shape), f"{name} {path}.{key}")))
            if key == "running_var":
                value.copy_(torch.from_numpy(0.5 + 1.5 * uniform(tuple(value.shape), f"{name} {path}.{key}")))


def weights(module: nn.Module, key: str, shape: tuple[int, ...], name: str) -> np.ndarray:
    if isinstance(module, NORMS) and key == "weight":
        return 0.5 + uniform(shape, name)
    if isinstance(module, nn.PReLU):
        return 0.1 + 0.3 * uniform(shape, name)
    if len(shape) < 2:
        return 0.2 * normal(shape, name)
    return normal(shape, name) * 1.5 / math.sqrt(math.prod(shape[1:]))


class Written(nn.Module):
    """Layers by name, and a forward pass written as a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def head(features: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 5))


def conv(channels: int, out: int, kernel: Any = 3, stride: int = 1, **options: Any) -> nn.Conv2d:
    """A convolution padded to keep the size, unless `options` say otherwise."""
    if "padding" not in options:
        options["padding"] = kernel // 2
    return nn.Conv2d(channels, out, kernel, stride, **options)


def conv_norm(channels: int, out: int, kernel: int = 3, stride: int = 1, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(channels, out, kernel, stride, bias=False, **options), nn.BatchNorm2d(out))


# --- convolutions and their padding ------------------------------------------------------------------------


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


# --- batch norm and other norms ----------------------------------------------------------------------------


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


# --- spellings of ReLU -------------------------------------------------------------------------------------


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


# --- gates -------------------------------------------------------------------------------------------------


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


# --- residual, dense and branched networks -----------------------------------------------------------------


@network()
def residual_in_place():
    def forward(net, x):
        x = F.relu(net.stem(x))
        out = net.b(F.relu(net.a(x)))
        out += x
        out = F.relu(out, inplace=True)
        branch = net.c(out)
        return net.head(branch.add_(out).relu_())

    return Written(forward, stem=conv(3, 5), a=conv(5, 5), b=conv(5, 5), c=conv(5, 5), head=head(320))


@network()
def residual_torch_add():
    def forward(net, x):
        x = torch.relu(net.stem(x))
        x = torch.add(x, net.b(torch.relu(net.a(x))))
        x = torch.relu(torch.add(x, net.c(x), alpha=0.5))
        return net.head(torch.sub(x, net.d(x), alpha=0.25).relu())

    return Written(
        forward, stem=conv(3, 5), a=conv(5, 5), b=conv(5, 5), c=conv(5, 5), d=conv(5, 5), head=head(320)
    )


@network()
def residual_operator():
    def forward(net, x):
        x = net.stem(x).relu()
        x = (x + net.b(net.a(x).relu())).relu()
        x = x - 0.5 * net.c(x).relu() + 0.1
        return net.head((1 - x).relu())

    return Written(forward, stem=conv(3, 5), a=conv(5, 5), b=conv(5, 5), c=conv(5, 5), head=head(320))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1):
        super().__init__()
        self.first, self.second = conv_norm(channels, out, stride=stride), conv_norm(out, out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None if channels == out else conv_norm(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.second(self.relu(self.first(x)))
        out += identity
        return self.relu(out)


@network((2, 3, 12, 12))
def resnet():
    return nn.Sequential(
        conv_norm(3, 6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), BasicBlock(6, 6), BasicBlock(6, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


@network()
def resnet_before_activation():
    def forward(net, x):
        x = net.stem(x)
        x = x + net.conv2(F.relu(net.norm2(net.conv1(F.relu(net.norm1(x))))))
        return net.head(F.relu(net.norm3(x)).mean((2, 3)))

    return Written(
        forward, stem=conv(3, 6), norm1=nn.BatchNorm2d(6), conv1=conv(6, 6), norm2=nn.BatchNorm2d(6),
        conv2=conv(6, 6), norm3=nn.BatchNorm2d(6), head=nn.Linear(6, 5),
    )  # fmt: skip


@network()
def densenet():
    def forward(net, x):
        features = [net.stem(x)]
        for norm, layer in ((net.norm0, net.conv0), (net.norm1, net.conv1), (net.norm2, net.conv2)):
            features.append(layer(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        x = F.avg_pool2d(net.transition(F.relu(torch.cat(features, 1))), 2)
        return net.head(F.relu(net.norm3(x), inplace=True))

    layers = {f"conv{i}": conv(5 + 3 * i, 3, bias=False) for i in range(3)}
    norms = {f"norm{i}": nn.BatchNorm2d(5 + 3 * i) for i in range(3)}
    return Written(
        forward, stem=conv(3, 5), **layers, **norms, transition=conv(14, 6, 1), norm3=nn.BatchNorm2d(6),
        head=head(96),
    )  # fmt: skip


class Concat(nn.Module):
    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


@network((2, 3, 9, 9))
def inception():
    block = Concat(
        nn.Sequential(conv(4, 3, 1), nn.ReLU()),
        nn.Sequential(
            conv(4, 3, (1, 3), padding=(0, 1)), nn.ReLU(), conv(3, 3, (3, 1), padding=(1, 0)), nn.ReLU()
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(4, 3, 1), nn.ReLU()),
        nn.MaxPool2d(3, 1, 1),
    )
    reduction = Concat(
        nn.Sequential(conv(13, 5, stride=2, padding=1), nn.ReLU()), nn.MaxPool2d(2, ceil_mode=True)
    )
    return nn.Sequential(conv(3, 4, 2, padding=0), nn.ReLU(), block, reduction, nn.AvgPool2d(2), head(72))


@network()
def mobilenet():
    def forward(net, x):
        x = net.stem(x)
        return net.head((x + net.block(x)).mean([2, 3]))

    block = nn.Sequential(
        conv_norm(5, 10, 1), nn.ReLU6(inplace=True), conv_norm(10, 10, groups=10), nn.ReLU6(inplace=True),
        conv_norm(10, 5, 1),
    )  # fmt: skip
    stem = nn.Sequential(conv_norm(3, 5, stride=2), nn.ReLU6(inplace=True))
    return Written(forward, stem=stem, block=block, head=nn.Linear(5, 5))


@network(seed=1)
def efficientnet():
    def forward(net, x):
        x = net.stem(x)
        return net.head(net.dropout(F.adaptive_avg_pool2d(x + net.block(x), 1).flatten(1)))

    block = nn.Sequential(
        conv_norm(5, 8, 1), nn.SiLU(inplace=True), conv_norm(8, 8, 5, groups=8), nn.SiLU(inplace=True),
        SqueezeExcite(8, torch.sigmoid, nn.SiLU(inplace=True)), conv_norm(8, 5, 1),
    )  # fmt: skip
    stem = nn.Sequential(conv_norm(3, 5, stride=2), nn.SiLU(inplace=True))
    return Written(forward, stem=stem, block=block, dropout=nn.Dropout(0.2), head=nn.Linear(5, 5))


@network()
def shufflenet():
    def forward(net, x):
        x = net.stem(x)
        for _ in range(2):
            left, right = x.chunk(2, dim=1)
            x = torch.cat((left, net.branch(right)), dim=1)
            n, c, h, w = x.size()
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return net.head(x.mean([2, 3]))

    branch = nn.Sequential(
        conv_norm(4, 4, 1), nn.ReLU(inplace=True), conv_norm(4, 4, groups=4), conv_norm(4, 4, 1),
        nn.ReLU(inplace=True),
    )  # fmt: skip
    return Written(forward, stem=conv(3, 8, stride=2), branch=branch, head=nn.Linear(8, 5))


@network()
def convnext():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.norm = conv(5, 5, 5, groups=5), nn.LayerNorm(5)
            self.expand, self.reduce = nn.Linear(5, 10), nn.Linear(10, 5)
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x):
            y = self.norm(self.mix(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.reduce(F.gelu(self.expand(y)))).permute(0, 3, 1, 2)

    def forward(net, x):
        return net.head(net.norm(net.blocks(net.stem(x)).mean([-2, -1])))

    return Written(
        forward, stem=conv(3, 5, 2, 2, padding=0), blocks=nn.Sequential(Block(), Block()),
        norm=nn.LayerNorm(5), head=nn.Linear(5, 5),
    )  # fmt: skip


@network()
def unet():
    def forward(net, x):
        x1 = net.down1(x)
        x2 = net.down2(F.max_pool2d(x1, 2))
        x3 = F.interpolate(net.up(x2), scale_factor=1.0, mode="nearest")
        y = net.merge(torch.cat([x1, x3], dim=1))
        return net.out(y)[:, :, 2:6, 3:7].mean((2, 3))

    return Written(
        forward, down1=nn.Sequential(conv_norm(3, 5), nn.ReLU(inplace=True)),
        down2=nn.Sequential(conv_norm(5, 6), nn.ReLU(inplace=True)), up=nn.ConvTranspose2d(6, 5, 2, stride=2),
        merge=nn.Sequential(conv(10, 5), nn.ReLU()), out=conv(5, 4, 1),
    )  # fmt: skip


# --- pooling and resizing ----------------------------------------------------------------------------------


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


# --- dense layers and tokens -------------------------------------------------------------------------------


@network((3, 20))
def mlp():
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))


@network((3, 20))
def mlp_with_norm_and_dropout():
    layers: list[nn.Module] = []
    for width, out in ((20, 16), (16, 16), (16, 12)):
        layers += [
            nn.Linear(width, out),
            nn.BatchNorm1d(out),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Linear(12, 5))


@network((2, 12), seed=1)
def linear_by_hand():
    """Linear layers written as products with their weights."""

    def forward(net, x):
        x = torch.relu(x @ net.a.weight.t() + net.a.bias)
        x = torch.relu(torch.addmm(net.b.bias, x, net.b.weight.T))
        x = torch.relu(torch.matmul(net.c.weight, x.unsqueeze(-1)).squeeze(-1))
        return torch.einsum("nf,of->no", x, net.d.weight) + net.d.bias

    sizes = ((12, 10), (10, 10), (10, 8), (8, 5))
    return Written(forward, **{name: nn.Linear(*size) for name, size in zip("abcd", sizes, strict=True)})


@network()
def mixer():
    def forward(net, x):
        x = net.patches(x).flatten(2).transpose(1, 2)
        x = x + net.tokens(net.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + net.channels(net.norm2(x))
        return net.head(net.norm3(x).mean(1))

    return Written(
        forward, patches=conv(3, 6, 2, 2, padding=0), norm1=nn.LayerNorm(6), norm2=nn.LayerNorm(6),
        norm3=nn.LayerNorm(6), tokens=nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 16)),
        channels=nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)), head=nn.Linear(6, 5),
    )  # fmt: skip


class Attention(nn.Module):
    """Self-attention written out; `fused` calls scaled_dot_product_attention with these options instead."""

    def __init__(self, width: int, heads: int = 2, fused: dict[str, Any] | None = None):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused is not None:
            x = F.scaled_dot_product_attention(q, k, v, **self.fused)
        else:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            x = scores.softmax(dim=-1) @ v
        return self.out(x.transpose(1, 2).reshape(n, t, width))


class LibraryAttention(nn.Module):
    def __init__(self, width: int, need_weights: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Transformer(nn.Module):
    """A pre-norm block over patches, with positions and a class token; reads the token at position `read`."""

    def __init__(self, attention: nn.Module, activation: nn.Module, read: int = 0, width: int = 8):
        super().__init__()
        self.read = read
        self.patches = conv(3, width, 2, 2, padding=0)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 17, width))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(width, 12), activation, nn.Dropout(0.1), nn.Linear(12, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x)[:, self.read])


@network()
def attention_by_hand():
    return Transformer(Attention(8), nn.GELU())


@network()
def attention_fused():
    return Transformer(Attention(8, fused={}), nn.GELU())


@network()
def attention_fused_causal():
    return Transformer(Attention(8, 1, fused={"is_causal": True, "scale": 0.3}), nn.ReLU(), read=-1)


@network()
def multihead_attention():
    return Transformer(LibraryAttention(8, need_weights=False), nn.ReLU())


@network()
def multihead_attention_with_weights():
    return Transformer(LibraryAttention(8, need_weights=True), nn.GELU())


@network(TOKENS)
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Written(lambda net, x: net.head(net.encoder(x).mean(1)), encoder=encoder, head=nn.Linear(8, 5))


@network(TOKENS)
def einsum_attention():
    def forward(net, x):
        q, k, v = net.q(x), net.k(x), net.v(x)
        weights = torch.softmax(torch.einsum("bic,bjc->bij", q, k) / 8**0.5, dim=-1)
        x = F.relu(torch.einsum("bij,bjc->bic", weights, v))
        return net.head(torch.einsum("bic,co->bio", x, net.out.weight).mean(1))

    projections = {name: nn.Linear(8, 8) for name in "qkv"}
    return Written(forward, **projections, out=nn.Linear(6, 8), head=nn.Linear(6, 5))


@network(TOKENS)
def batched_products():
    """bmm and baddbmm of two data tensors, and a mean over tokens by a product."""

    def forward(net, x):
        h = F.relu(net.a(x))
        gram = torch.bmm(h, h.transpose(1, 2)) / 6
        mixed = torch.baddbmm(h, gram, net.b(x), beta=0.5, alpha=0.2)
        return net.head(F.relu(mixed).transpose(1, 2) @ x.new_full((6, 1), 1 / 6)).squeeze(1)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x):
            return self.linear(x.transpose(1, 2))

    return Written(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), head=Head())


@network((2, 3, 8, 8))
def windows_folded_into_batch():
    """Four windows of each picture become rows of the batch."""

    def forward(net, x):
        n = x.shape[0]
        windows = x.reshape(n, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(n * 4, 3, 4, 4)
        rows = F.relu(net.mlp(F.relu(net.conv(windows)).flatten(1)))
        return net.head(rows.reshape(n, 40))

    return Written(forward, conv=conv(3, 4), mlp=nn.Linear(64, 10), head=nn.Linear(40, 5))


@network(TOKENS)
def tokens_folded_into_batch():
    def forward(net, x):
        rows = net.b(F.gelu(net.a(x.flatten(0, 1))))
        return net.head(F.relu(rows.view_as(x)).mean(1))

    return Written(forward, a=nn.Linear(8, 12), b=nn.Linear(12, 8), head=nn.Linear(8, 5))


@network((2, 3, 8, 8), seed=1)
def shifted_windows():
    """A Swin block: rolled, windows of 2x2 tokens folded into the batch, attention inside each."""

    def forward(net, x):
        x = net.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        rolled = torch.roll(net.norm(x), shifts=(-1, -1), dims=(1, 2))
        windows = (
            rolled.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c)
        )
        y = F.relu(net.attention(windows)).view(n, h // 2, w // 2, 2, 2, c)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(n, h, w, c)
        x = x + torch.roll(y, shifts=(1, 1), dims=(1, 2))
        return net.head((x + net.mlp(x)).flatten(1, 2).mean(1))

    mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    return Written(
        forward, patches=conv(3, 8, 2, 2, padding=0), norm=nn.LayerNorm(8), attention=Attention(8), mlp=mlp,
        head=nn.Linear(8, 5),
    )  # fmt: skip


@network(TOKENS)
def experts():
    """Each token goes to one expert, so samples take different paths."""

    def forward(net, x):
        flat = x.reshape(-1, 8)
        gates = net.gate(flat).softmax(-1)
        best = gates.argmax(-1)
        final = torch.zeros_like(flat)
        for i, expert in enumerate((net.a, net.b)):
            chosen = best == i
            if chosen.any():
                final[chosen] += gates[chosen, i, None] * expert(flat[chosen])
        return net.head(final.view_as(x).mean(1))

    pair = {name: nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8)) for name in "ab"}
    return Written(forward, **pair, gate=nn.Linear(8, 2), head=nn.Linear(8, 5))


@network((2, 5, 4))
def lstm():
    def forward(net, x):
        return net.head(F.relu(net.fc(net.rnn(x)[0][:, -1])))

    return Written(forward, rnn=nn.LSTM(4, 6, batch_first=True), fc=nn.Linear(6, 10), head=nn.Linear(10, 5))


@network((2, 5, 4), seed=1)
def gru_bidirectional():
    def forward(net, x):
        out, last = net.rnn(F.relu(net.embed(x)))
        return net.head(F.relu(net.fc(torch.cat([out.mean(1), last[0]], dim=1))))

    return Written(
        forward, embed=nn.Linear(4, 6), rnn=nn.GRU(6, 4, batch_first=True, bidirectional=True),
        fc=nn.Linear(12, 10), head=nn.Linear(10, 5),
    )  # fmt: skip


@network((2, 5, 4))
def recurrent_by_hand():
    """One cell, unrolled over the steps."""

    def forward(net, x):
        h = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            h = F.relu(net.a(step) + net.b(h))
        return net.head(h)

    return Written(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 8), head=nn.Linear(8, 5))


@network((2, 5, 4))
def relu_rnn():
    """ReLUs inside a fused recurrent layer, out of reach of any rule."""

    def forward(net, x):
        return net.head(F.relu(net.fc(net.rnn(x)[0][:, -1])))

    rnn = nn.RNN(4, 6, nonlinearity="relu", batch_first=True)
    return Written(forward, rnn=rnn, fc=nn.Linear(6, 10), head=nn.Linear(10, 5))


# --- shared weights, views and in-place writes -------------------------------------------------------------


@network()
def shared_weights():
    def forward(net, x):
        x = net.relu(net.first(x))
        for _ in range(2):
            x = x + net.relu(net.norm(net.conv(x)))
        return net.head(net.relu(net.conv(x)))

    return Written(
        forward, first=conv(3, 5), conv=conv(5, 5), norm=nn.BatchNorm2d(5), relu=nn.ReLU(), head=head(320)
    )


@network((2, 3, 6, 6), (2, 3, 6, 6))
def siamese():
    def forward(net, left, right):
        a, b = (F.relu(net.tower(x)).amax((2, 3)) for x in (left, right))
        return net.head(torch.cat([a, b, torch.abs(a - b), a * b], dim=1))

    tower = nn.Sequential(conv(3, 6), nn.ReLU(inplace=True), conv(6, 6, stride=2))
    return Written(forward, tower=tower, head=nn.Linear(24, 5))


@network()
def views_and_slices():
    def forward(net, x):
        x = F.relu(net.a(x))
        x = x[:, :, 1:7, ::2] + x[..., 1:7, 1::2]
        x = x.narrow(1, 1, 4).reshape(-1, 4, 24).permute(0, 2, 1).unflatten(1, (6, 4)).movedim(-1, 1)
        x = F.relu(net.b(x)).flip(3).transpose(2, 3)
        return net.head(x.index_select(1, torch.tensor([3, 0, 0])).expand(-1, -1, -1, -1))

    return Written(forward, a=conv(3, 5), b=conv(4, 4), head=head(72))


@network()
def splits_and_chunks():
    def forward(net, x):
        a, b, c = net.a(x).split([2, 3, 1], dim=1)
        d, e = F.relu(net.b(x)).chunk(2, 1)
        first, *rest = torch.tensor_split(net.c(x), 3, dim=2)
        y = torch.cat([F.relu(a), b.relu(), c * c, d - e], dim=1)
        return net.head(y) + net.other(torch.cat([F.relu(first), *rest], dim=2))

    return Written(
        forward, a=conv(3, 6), b=conv(3, 4), c=conv(3, 2), head=head(512), other=head(128)
    )  # fmt: skip


@network()
def stacks_and_unbinds():
    def forward(net, x):
        x = torch.stack([F.relu(net.a(x)), F.relu(net.b(x)), net.c(x)], dim=2)
        p, q, r = x.unbind(2)
        y = torch.stack((p + q, q * r), -1).sum(-1)
        rows = [F.relu(row) for row in net.d(y).unbind(dim=3)]
        return net.head(torch.stack(rows[::-1], dim=3))

    return Written(forward, a=conv(3, 4), b=conv(3, 4), c=conv(3, 4), d=conv(4, 4), head=head(256))


@network()
def writes_on_views():
    def forward(net, x):
        x = net.a(x)
        x[:, :2].relu_()
        x = net.b(x)
        F.relu(x[:, 2:, ::2], inplace=True)
        x = net.c(x)
        flat = x.view(x.shape[0], -1)
        flat[:, :32].mul_(0.5)
        x.transpose(2, 3)[:, 1].add_(1.0)
        flat.clamp_(min=0)
        return net.head(x)

    return Written(forward, a=conv(3, 5), b=conv(5, 5), c=conv(5, 4), head=head(256))


@network()
def setitem():
    def forward(net, x):
        out = x.new_zeros(x.shape[0], 6, 8, 8)
        out[:, :4] = F.relu(net.a(x))
        out[:, 4:] = net.b(x)
        out[:, 5] = out[:, 3]
        out[:, :, 0] += 1
        out = net.c(out)
        out[:, 1, 2:4] = 0.5
        return net.head(F.relu(out))

    return Written(forward, a=conv(3, 4), b=conv(3, 2), c=conv(6, 4), head=head(256))


@network()
def in_place_arithmetic():
    def forward(net, x):
        y = net.a(x)
        y.mul_(2).add_(0.1).div_(1.5)
        y.relu_()
        z = torch.empty_like(y).copy_(net.b(y))
        z -= y
        z *= 0.7
        z.masked_fill_(torch.eye(8, dtype=torch.bool), 0.3)
        return net.head(F.relu(z))

    return Written(forward, a=conv(3, 5), b=conv(5, 5), head=head(320))


@network((2, 3, 6, 6))
def gathers_and_repeats():
    def forward(net, x):
        x = F.relu(net.a(x)).flatten(2)
        order = torch.arange(35, -1, -1).expand(x.shape[0], 4, -1)
        x = x.gather(2, order).cumsum(-1) * 0.1
        x = F.relu(net.b(x.transpose(1, 2)))
        x = x.repeat(1, 1, 2) + x.repeat_interleave(2, dim=-1)
        return net.head(x[:, torch.tensor([0, 5, 5, 20]), :])

    return Written(forward, a=conv(3, 4), b=nn.Linear(4, 4), head=head(32))


# --- arithmetic between data tensors -----------------------------------------------------------------------


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


# --- inputs and outputs ------------------------------------------------------------------------------------


@network((3, 2, 6, 6), (3, 7), seed=2)
def two_inputs():
    """A picture and a vector in, one score of shape (N,) out."""

    def forward(net, picture, vector):
        picture = F.max_pool2d(torch.relu(net.conv(picture)), 2).flatten(1)
        vector = torch.relu(net.vector(vector))
        return net.head(torch.relu(net.joint(torch.cat([picture, vector], dim=1)))).squeeze(1)

    return Written(
        forward, conv=conv(2, 4), vector=nn.Linear(7, 6), joint=nn.Linear(42, 9), head=nn.Linear(9, 1)
    )


Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


@network()
def logits_object():
    def forward(net, x):
        x = F.relu(net.a(x))
        return Outputs(net.head(F.relu(net.b(x))), net.aux(x))

    return Written(forward, a=conv(3, 5), b=conv(5, 4), head=head(256), aux=head(320))


@network((3, 10))
def one_score():
    """An output of shape (N, 1)."""
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))


@network((1, 3, 8, 8), seed=1)
def one_sample():
    return nn.Sequential(conv(3, 5), nn.ReLU(), nn.MaxPool2d(2), conv(5, 5), nn.ReLU(), head(80))


@network((3, 10))
def output_is_an_activation():
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5), nn.ReLU())


@network()
def input_is_activated():
    """The first step is an activation of the input itself, which is used elsewhere too."""

    def forward(net, x):
        return net.head(F.relu(net.a(F.relu(x)) + net.b(x)))

    return Written(forward, a=conv(3, 4), b=conv(3, 4, 1), head=head(256))


for _name in (
    "plain_cnn",
    "resnet",
    "inception",
    "mobilenet",
    "densenet",
    "mixer",
    "multihead_attention",
    "mlp",
):
    also_in(torch.float32, _name)
for _name in ("mlp", "one_score"):
    also_in(torch.bfloat16, _name)
