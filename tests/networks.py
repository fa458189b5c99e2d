"""Small random networks, one of each kind that the engine has to understand.

`NETWORKS[name](seed)` gives a float64 model in evaluation mode and a batch of inputs for it, a tensor or a
tuple of them. A seed always gives the same pair, and the global random state stays as it was. Nothing here
knows about attributions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Tensor | tuple[Tensor, ...]
NETWORKS: dict[str, Callable[[int], tuple[nn.Module, Inputs]]] = {}


def network(build: Callable[[], tuple[nn.Module, Inputs]]) -> Callable[[], tuple[nn.Module, Inputs]]:
    """List `build` in NETWORKS under its own name, seeded and in float64."""

    def make(seed: int = 0) -> tuple[nn.Module, Inputs]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, inputs = build()
            model.apply(unsettle)
        inputs = tuple(x.double() for x in inputs) if isinstance(inputs, tuple) else inputs.double()
        return model.double().eval(), inputs

    NETWORKS[build.__name__] = make
    return build


@torch.no_grad()
def unsettle(module: nn.Module) -> None:
    """Weights that carry a signal to the end, and normalisations that are not those of a fresh layer."""
    if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
        module.weight.mul_(2)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.running_mean.normal_(0, 0.3)
        module.running_var.uniform_(0.5, 2)
    if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)):
        nn.init.uniform_(module.weight, 0.5, 1.5)
        nn.init.normal_(module.bias, 0, 0.3)


class Residual(nn.Module):
    """x + f(x), then a ReLU when `last` is given; `shortcut` where the shapes differ."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, last: nn.Module | None = None):
        super().__init__()
        self.body, self.shortcut, self.last = body, shortcut or nn.Identity(), last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return self.last(out)


class Concat(nn.Module):
    """Branches side by side along the channels."""

    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class SqueezeExcite(nn.Module):
    """A gate for each channel, computed from the channels' means."""

    def __init__(self, channels: int, hidden: int, activation: nn.Module):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(self.activation(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(gate)


class SelfAttention(nn.Module):
    """Multi-head self-attention written out, with the parameters of nn.MultiheadAttention.

    x is (N, T, width); `project` stacks the query, key and value projections.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    @classmethod
    def like(cls, module: nn.MultiheadAttention) -> "SelfAttention":
        """The same map as `module`, batch first, with all of its parameters."""
        twin = cls(module.embed_dim, module.num_heads)
        twin.project.weight, twin.project.bias = module.in_proj_weight, module.in_proj_bias
        twin.out = module.out_proj
        return twin

    def split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, self.width // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self.project(x), self.width, dim=-1)
        q, k, v = self.split_heads(parts[0]), self.split_heads(parts[1]), self.split_heads(parts[2])
        scores = torch.matmul(q, k.transpose(-2, -1)) / (self.width // self.heads) ** 0.5
        mixed = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LibraryAttention(nn.Module):
    """nn.MultiheadAttention called as self-attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@network
def plain_cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(5, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 4),
    )  # fmt: skip
    return model, torch.randn(3, 3, 8, 8)


class Strided(nn.Module):
    """Every way of padding a convolution, the ones that are no zero padding included."""

    def __init__(self):
        super().__init__()
        self.strided = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(6, 6, 3, padding="same", dilation=2)
        self.even = nn.Conv2d(6, 6, (2, 4), padding="same")
        self.reflected = nn.Conv2d(6, 5, 3, padding=1, padding_mode="reflect")
        self.zero_pad = nn.ZeroPad2d((1, 0, 0, 2))
        self.own = nn.Conv2d(5, 6, 3, padding=(1, 0))
        self.pointwise = nn.Conv2d(8, 6, 1)
        self.transposed = nn.ConvTranspose2d(6, 3, 3, stride=2, padding=1)
        self.head = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.strided(x))
        x = F.relu(self.dilated(x))
        x = F.relu(self.even(F.pad(x, (1, 0, 0, 1))))
        x = F.relu(self.reflected(x))
        x = F.relu(self.own(self.zero_pad(x)))
        x = F.relu(self.pointwise(F.pad(x, (0, 0, 0, 0, 1, 1))))
        x = F.relu(self.transposed(x))
        return self.head(x).mean((2, 3))


@network
def strided():
    return Strided(), torch.randn(2, 3, 13, 13)


def conv_norm(channels: int, out: int, stride: int = 1, kernel: int = 3, **options) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


@network
def residual():
    body = nn.Sequential(conv_norm(5, 5), nn.ReLU(inplace=True), conv_norm(5, 5))
    down = nn.Sequential(conv_norm(5, 8, stride=2), nn.ReLU(inplace=True), conv_norm(8, 8))
    model = nn.Sequential(
        conv_norm(3, 5), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(body, last=nn.ReLU(inplace=True)),
        Residual(down, conv_norm(5, 8, stride=2, kernel=1), nn.ReLU(inplace=True)),
        nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6),
    )  # fmt: skip
    return model, torch.randn(2, 3, 8, 8)


@network
def inception():
    block = Concat(
        nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 3, (1, 3), padding=(0, 1)), nn.ReLU(), nn.Conv2d(3, 3, (3, 1)), nn.ReLU(),
                      nn.ZeroPad2d((0, 0, 1, 1))),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(4, 3, 1), nn.ReLU()),
        nn.MaxPool2d(3, 1, 1),
    )  # fmt: skip
    reduction = Concat(
        nn.Sequential(nn.Conv2d(13, 5, 3, stride=2, padding=1), nn.ReLU()),
        nn.MaxPool2d(2, 2, ceil_mode=True),
    )
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.ReLU(), block, reduction, nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(),
        nn.Linear(72, 5),
    )  # fmt: skip
    return model, torch.randn(2, 3, 8, 8)


@network
def mobile():
    depthwise = nn.Sequential(conv_norm(6, 6, groups=6), nn.SiLU(), SqueezeExcite(6, 4, nn.SiLU()),
                              conv_norm(6, 6, kernel=1))  # fmt: skip
    grouped = nn.Sequential(conv_norm(6, 8, stride=2, groups=2), nn.ReLU6(), SqueezeExcite(8, 4, nn.ReLU()))
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU6(), Residual(depthwise), grouped,
        nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    with torch.no_grad():
        model[0].weight.mul_(4)  # so that some units reach ReLU6's ceiling
    return model, torch.randn(2, 3, 8, 8)


@network
def mixer():
    tokens = nn.Sequential(nn.LayerNorm(6), Transpose(), nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9),
                           Transpose())  # fmt: skip
    channels = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.GELU(approximate="tanh"), nn.Linear(10, 6))
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=3), nn.Flatten(2), Transpose(), Residual(tokens), Residual(channels),
        nn.LayerNorm(6), MeanOverTokens(), nn.Linear(6, 5),
    )  # fmt: skip
    return model, torch.randn(2, 3, 9, 9)


class Transformer(nn.Module):
    """One pre-norm block over patches, with a class token, positions and a layer scale."""

    def __init__(self, attention: nn.Module, width: int = 8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.3 * torch.randn(1, 10, width))
        self.norm, self.attention = nn.LayerNorm(width), attention
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = x + self.scale * self.attention(self.norm(x))
        x = x + self.mlp(x)
        return self.head(x[:, 0])


@network
def attention():
    return Transformer(SelfAttention(8, 2)), torch.randn(2, 3, 9, 9)


@network
def library_attention():
    return Transformer(LibraryAttention(8, 2)), torch.randn(2, 3, 9, 9)


class Shared(nn.Module):
    """One convolution, one ReLU and one normalisation, each used several times."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3, padding=1)
        self.norm, self.relu = nn.GroupNorm(5, 5), nn.ReLU()
        self.pool, self.head = nn.AdaptiveMaxPool2d((4, 3)), nn.Linear(60, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        for _ in range(2):
            x = x + self.relu(self.norm(self.conv(x)))
        return self.head(self.pool(self.relu(self.conv(x))).flatten(1))


@network
def shared():
    return Shared(), torch.randn(2, 3, 8, 8)


class TwoInputs(nn.Module):
    """A picture and a vector; one score for each sample, of shape (N,)."""

    def __init__(self):
        super().__init__()
        self.conv, self.vector = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(7, 6)
        self.joint, self.head = nn.Linear(4 * 9 + 6, 9), nn.Linear(9, 1)

    def forward(self, picture: Tensor, vector: Tensor) -> Tensor:
        picture = F.max_pool2d(torch.relu(self.conv(picture)), 2).flatten(1)
        vector = torch.relu(self.vector(vector))
        return self.head(torch.relu(self.joint(torch.cat([picture, vector], dim=1)))).squeeze(1)


@network
def two_inputs():
    return TwoInputs(), (torch.randn(3, 2, 6, 6), torch.randn(3, 7))


class Folded(nn.Module):
    """Windows of a picture folded into the batch, so that activations have N * 4 rows."""

    def __init__(self):
        super().__init__()
        self.conv, self.mlp, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(64, 10), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        samples = x.shape[0]
        windows = x.reshape(samples, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(samples * 4, 3, 4, 4)
        rows = F.relu(self.mlp(F.relu(self.conv(windows)).flatten(1)))
        return self.head(rows.reshape(samples, 40))


@network
def folded():
    return Folded(), torch.randn(3, 3, 8, 8)


@network
def conv1d():
    model = nn.Sequential(
        nn.Conv1d(2, 6, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool1d(3, 2, 1, dilation=2),
        nn.Conv1d(6, 8, 3, padding="same"), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(3),
        nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip
    return model, torch.randn(3, 2, 25)


@network
def conv3d():
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2, ceil_mode=True),
        nn.Conv3d(4, 5, 2, padding=(1, 0, 0)), nn.ReLU(), nn.AdaptiveMaxPool3d((2, 1, 1)), nn.Flatten(),
        nn.Linear(10, 4),
    )  # fmt: skip
    return model, torch.randn(2, 2, 4, 5, 5)


class Functional(nn.Module):
    """A ReLU in each spelling that is no module, with results of in-place calls used and unused."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.convs
        x = F.relu(a(x))
        x = torch.relu(b(x)) + x
        x = c(x)
        x.relu_()
        x = d(x).relu() + x.clamp(min=0)
        x = e(x)
        F.relu(x, inplace=True)
        x = f(x).clamp_(min=0)
        return self.head(F.max_pool2d(x, 2).flatten(1))


@network
def functional():
    return Functional(), torch.randn(2, 3, 8, 8)


@network
def activations():
    """Every rectifier-like activation that the other networks lack, and a squashing one."""
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3), nn.Softplus()]
    for activation in (nn.LeakyReLU(0.1), nn.ELU(), nn.PReLU(4), nn.Mish(), nn.Hardswish(), nn.Softplus(2),
                       nn.Tanh(), nn.CELU(0.7), nn.SELU(), nn.PReLU()):  # fmt: skip
        layers += [nn.Conv2d(4, 4, 2, padding="same"), activation]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)), torch.randn(2, 3, 8, 8)


class Division(nn.Module):
    """A layer divided by its own mean: a quotient of two data tensors."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.head((x / (x.mean((1, 2, 3), keepdim=True) + 0.5)).flatten(1))


@network
def division():
    return Division(), torch.randn(2, 3, 8, 8)
