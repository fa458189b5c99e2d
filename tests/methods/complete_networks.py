"""Networks on which DeepLIFT is exact, one for each kind of step; `DEEPLIFT` lists them."""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Network = Callable[[], tuple[nn.Module, Tensor]]
DEEPLIFT: dict[str, Network] = {}


def complete(build: Network) -> Network:
    """List a network on which DeepLIFT is exact."""
    DEEPLIFT[build.__name__] = build
    return build


class Apply(nn.Module):
    """Modules and a function of them and the input: forward(x) = function(self, x)."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def cnn(*middle: nn.Module) -> tuple[nn.Module, Tensor]:
    """`middle` between two convolutions and a ReLU network behind: channels 6, 10 x 9 pixels."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), *middle, nn.LazyConv2d(5, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    return model, 2 * torch.randn(3, 3, 10, 9)


def between(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    return cnn(Apply(lambda _, x: function(x)))


def mlp(*middle: nn.Module, width: int = 8) -> tuple[nn.Module, Tensor]:
    """`middle` in a network of vectors."""
    model = nn.Sequential(nn.Linear(5, width), *middle, nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 4))
    return model, 2 * torch.randn(3, 5)


def tokens(*middle: nn.Module) -> tuple[nn.Module, Tensor]:
    """`middle` on 7 tokens of width 8."""
    flat = nn.Flatten()
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.GELU(), flat, nn.Linear(56, 4)), torch.randn(3, 7, 5)


# --- activations -------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu6": nn.ReLU6(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "softplus": nn.Softplus(beta=2, threshold=3),
    "prelu": nn.PReLU(6, init=0.2),
    "leaky_relu": nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU(0.7),
    "selu": nn.SELU(),
    "celu": nn.CELU(1.3),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardtanh": nn.Hardtanh(-0.5, 0.8),
    "softsign": nn.Softsign(),
    "threshold": nn.Threshold(0.3, -0.2),
    "hardshrink": nn.Hardshrink(0.4),
    "softshrink": nn.Softshrink(0.2),
    "log_sigmoid": nn.LogSigmoid(),
    "tanhshrink": nn.Tanhshrink(),
}
DEEPLIFT |= {name: lambda a=a: cnn(copy.deepcopy(a)) for name, a in ACTIVATIONS.items()}

# --- elementary functions ----------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: (0.5 * x).exp(),
    "log": lambda x: torch.log(x * x + 0.1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x**2 + 0.01),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 0.5),
    "cube": lambda x: x**3,
    "pow": lambda x: torch.pow(x.abs() + 0.1, 1.7),
    "power_of_two": lambda x: 2**x,
    "reciprocal": lambda x: 1 / (1 + x.exp()),
    "number_over_data": lambda x: 3.0 / (x**2 + 1),
    "quotient": lambda x: x / (x.abs() + 1),
    "quotient_broadcast": lambda x: x / (x.mean((1, 2, 3), keepdim=True).abs() + 0.5),
    "quotient_in_place": lambda x: x.clone().div_(x.abs() + 1),
    "clamp": lambda x: x.clamp(-0.7, 0.4),
    "clamp_max": lambda x: x.clamp(max=0.3),
    "abs": torch.abs,
    "sin": torch.sin,
    "erf": torch.erf,
    "square_by_hand": lambda x: x * x,
    "product_in_place": lambda x: x.clone().mul_(x.sigmoid()),
    "maximum": lambda x: torch.maximum(x[:, :3], x[:, 3:]),
    "minimum": lambda x: torch.minimum(x[:, :3], x[:, 3:]),
    "maximum_broadcast": lambda x: torch.maximum(x, x.mean(1, keepdim=True)),
    "maximum_with_number": lambda x: torch.maximum(x, torch.full_like(x, 0.2)),
    "minimum_constant_first": lambda x: torch.minimum(torch.full_like(x, 0.2), x),
    "max_of_two": lambda x: torch.max(x[:, :3], x[:, 3:]),
    "max_along": lambda x: x.max(1, keepdim=True).values,
    "max_along_unpacked": lambda x: torch.max(x, dim=1, keepdim=True)[0],
    "amax": lambda x: x.amax(1, keepdim=True),
    "amax_of_two_dims": lambda x: x - x.amax((1, 2), keepdim=True),
    "amin": lambda x: x.amin(1, keepdim=True),
    "min_along": lambda x: x.min(1, keepdim=True).values,
    "maxout": lambda x: x.reshape(x.shape[0], 3, 2, *x.shape[2:]).amax(2),
    "logsumexp_by_hand": lambda x: x.exp().sum(1, keepdim=True).log(),
    "norm_by_hand": lambda x: x / (x * x).sum(1, keepdim=True).add(0.1).sqrt(),
    "lerp_by_hand": lambda x: x[:, :3] * x[:, 3:].sigmoid() + (1 - x[:, 3:].sigmoid()) * x[:, :3].tanh(),
    "outer_in_einsum": lambda x: torch.einsum("nchw,ndhw->ncdhw", x[:, :2], x[:, 2:4]).flatten(1, 2),
    "gram_in_einsum": lambda x: torch.einsum("nchw,nchv->ncwv", x, x),
    "gram_in_matmul": lambda x: x.mT @ x,
    "where_between_two": lambda x: torch.where(torch.arange(9) % 2 == 0, x.relu(), x.tanh()),
}  # fmt: skip
DEEPLIFT |= {name: lambda f=f: between(f) for name, f in FUNCTIONS.items()}


# --- pooling -----------------------------------------------------------------------------------------------

POOLS = {
    "max_pool": nn.MaxPool2d(2),
    "max_pool_overlapping": nn.MaxPool2d(3, 1),
    "max_pool_padded": nn.MaxPool2d(3, 2, 1),
    "max_pool_ceil": nn.MaxPool2d(2, 2, ceil_mode=True),
    "max_pool_all": nn.MaxPool2d((3, 2), (2, 1), (1, 0), (2, 1), ceil_mode=True),
    "adaptive_max_pool": nn.AdaptiveMaxPool2d((4, 3)),
    "avg_pool": nn.AvgPool2d(3, 2, 1),
}
DEEPLIFT |= {name: lambda p=p: cnn(p) for name, p in POOLS.items()}
DEEPLIFT |= {f"{name}_of_relu": lambda p=p: cnn(nn.ReLU(), p) for name, p in POOLS.items()}


@complete
def max_pool_1d():
    layers = nn.Conv1d(2, 6, 3), nn.Tanh(), nn.MaxPool1d(3, 1, 1), nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True)
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4)), torch.randn(3, 2, 17)


@complete
def max_pool_3d():
    layers = nn.Conv3d(2, 5, 3), nn.ReLU(), nn.MaxPool3d(2, 1), nn.AdaptiveMaxPool3d((2, 1, 3))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4)), torch.randn(3, 2, 5, 6, 7)


# --- blocks ------------------------------------------------------------------------------------------------


def residual(self: Apply, x: Tensor) -> Tensor:
    x = x + self.body(x)
    y = self.again(x)
    y += x
    return torch.relu(y - 0.5 * self.body(x))


@complete
def residuals():
    body = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
    again = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    return cnn(Apply(residual, body=body, again=again))


@complete
def dense_block():
    layer = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1))
    return cnn(Apply(lambda self, x: torch.cat([x, self.layer(x)], 1), layer=layer))


@complete
def squeeze_excite():
    gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 3, 1), nn.SiLU(), nn.Conv2d(3, 6, 1))
    return cnn(nn.SiLU(), Apply(lambda self, x: x * self.gate(x).sigmoid(), gate=gate))


@complete
def squeeze_excite_hard():
    gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Hardsigmoid())
    return cnn(nn.Hardswish(), Apply(lambda self, x: self.gate(x).mul(x), gate=gate))


@complete
def glu():
    return mlp(nn.GLU(), width=8)


@complete
def glu_of_channels():
    return between(lambda x: F.glu(x, dim=1))


@complete
def glu_by_hand():
    return mlp(Apply(lambda _, x: x[:, :4] * torch.sigmoid(x[:, 4:])))


@complete
def swiglu():
    up, gate = nn.Linear(8, 9), nn.Linear(8, 9)
    return mlp(Apply(lambda self, x: F.silu(self.gate(x)) * self.up(x), up=up, gate=gate))


@complete
def bilinear():
    return mlp(Apply(lambda self, x: self.pair(x.tanh(), x.relu()), pair=nn.Bilinear(8, 8, 7)))


def tiny_lstm(self: Apply, x: Tensor) -> Tensor:
    hidden = cell = x[:, 0] * 0
    for t in range(x.shape[1]):
        i, f, g, o = self.weights(torch.cat([x[:, t], hidden], 1)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    return hidden[:, None].expand(-1, 7, -1)


@complete
def recurrent_by_hand():
    return tokens(Apply(tiny_lstm, weights=nn.Linear(16, 32)))


# --- attention ---------------------------------------------------------------------------------------------


def attend(self: Apply, x: Tensor) -> Tensor:
    q, k, v = self.project(x).chunk(3, -1)
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), dim=-1)
    return x + weights @ v


@complete
def attention_by_hand():
    return tokens(Apply(attend, project=nn.Linear(8, 24)))


def attend_in_einsum(self: Apply, x: Tensor) -> Tensor:
    q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).unbind(-3)
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k)
    weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
    return x + torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(-2)


@complete
def attention_in_einsum():
    return tokens(Apply(attend_in_einsum, project=nn.Linear(8, 24)))


def fused(**options) -> tuple[nn.Module, Tensor]:
    def forward(self: Apply, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(-2)

    return tokens(Apply(forward, project=nn.Linear(8, 24)))


@complete
def attention_fused():
    return fused()


@complete
def attention_fused_causal():
    return fused(is_causal=True, scale=0.7)


@complete
def attention_fused_mask():
    return fused(attn_mask=torch.rand(7, 7) > 0.3 * (1 - torch.eye(7)))


@complete
def attention_fused_bias():
    return fused(attn_mask=torch.randn(3, 1, 7, 7))


@complete
def multihead_attention():
    inner = nn.MultiheadAttention(8, 2, batch_first=True)
    return tokens(Apply(lambda self, x: x + self.inner(x, x, x, need_weights=False)[0], inner=inner))


@complete
def multihead_attention_with_weights():
    inner = nn.MultiheadAttention(8, 4, batch_first=True)
    return tokens(Apply(lambda self, x: self.inner(x, x.tanh(), x.relu())[0], inner=inner))


@complete
def encoder_layer():
    return tokens(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True))


@complete
def encoder_layer_pre_norm():
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True, norm_first=True)
    return tokens(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


# --- normalisation -----------------------------------------------------------------------------------------

NORMS = {
    "batch_norm": nn.BatchNorm2d(6),
    "group_norm": nn.GroupNorm(3, 6),
    "instance_norm": nn.InstanceNorm2d(6, affine=True),
    "instance_norm_running": nn.InstanceNorm2d(6, track_running_stats=True),
    "layer_norm": nn.LayerNorm([6, 10, 9]),
}
DEEPLIFT |= {name: lambda n=n: cnn(copy.deepcopy(n)) for name, n in NORMS.items()}


@complete
def layer_norm_of_tokens():
    return tokens(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False))


@complete
def rms_norm():
    return tokens(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-3))


# --- heads -------------------------------------------------------------------------------------------------


@complete
def softmax_head():
    model, x = cnn(nn.ReLU())
    return nn.Sequential(model, nn.Softmax(1)), x


@complete
def log_softmax_head():
    model, x = cnn(nn.ReLU())
    return nn.Sequential(model, nn.LogSoftmax(-1)), x


@complete
def entropy_head():
    def forward(self: Apply, x: Tensor) -> Tensor:
        logits = self.inner(x)
        return (F.log_softmax(logits, 1) * F.softmax(logits, dim=1)).cumsum(1)

    model, x = cnn(nn.ReLU())
    return Apply(forward, inner=model), x


@complete
def log_of_softmax_head():
    model, x = cnn(nn.ReLU())
    return Apply(lambda self, x: self.inner(x).softmax(1).log(), inner=model), x


# --- preparation -------------------------------------------------------------------------------------------


@torch.no_grad()
def unsettle(module: nn.Module) -> None:
    """Norms that are not those of a fresh layer."""
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d)) and module.track_running_stats:
        module.running_mean.normal_(0, 0.3)
        module.running_var.uniform_(0.5, 2)
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        for parameter in module.parameters():
            parameter.normal_(0.3, 1)


def prepare(build: Network, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, x = build()
        model.eval()(x)  # lazy layers learn their sizes
        return model.apply(unsettle).to(dtype), x.to(dtype)


def noise_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(x.shape, generator=generator).to(x.dtype)
