"""Where relevance goes: DeepLIFT's maps sum to the difference of the scores, epsilon-LRP's to the score less
what biases and epsilon absorbed. Both are checked against sums that do not come from the engine."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import rectgrad

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


# --- DeepLIFT ----------------------------------------------------------------------------------------------


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


def deeplift_error(model: nn.Module, x: Tensor, baseline: float | Tensor, target: int) -> float:
    """The largest |sum of a map - difference of scores|, in parts of that map's absolute sum."""
    maps = rectgrad.attribute(model, x, "deeplift", target=target, baseline=baseline).double()
    with torch.no_grad():
        difference = (model(x) - model(torch.zeros_like(x) + baseline))[:, target].double()
    assert difference.abs().min() > 0
    return ((maps.flatten(1).sum(1) - difference).abs() / maps.abs().flatten(1).sum(1)).max().item()


@pytest.mark.parametrize("name", DEEPLIFT)
def test_deeplift_sums_to_the_difference(name):
    model, x = prepare(DEEPLIFT[name])
    for baseline in (0.0, 0.4, noise_like(x[:1]), noise_like(x)):
        assert deeplift_error(model, x, baseline, target=1) < 1e-9


@pytest.mark.parametrize("name", DEEPLIFT)
def test_deeplift_sums_to_the_difference_in_float32(name):
    model, x = prepare(DEEPLIFT[name], torch.float32)
    for baseline in (0.0, noise_like(x)):
        assert deeplift_error(model, x, baseline, target=2) < 1e-4


INEXACT: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "power_of_data": ("pow", lambda x: (x.abs() + 0.5) ** (0.3 * x)),
    "variance": ("var", lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 0.1).sqrt()),
    "cumprod": ("cumprod", lambda x: x.cumprod(1)),
    "logsumexp": ("logsumexp", lambda x: x - x.logsumexp(1, keepdim=True)),
    "atan2": ("atan2", lambda x: torch.atan2(x[:, :3], x[:, 3:])),
}


@pytest.mark.filterwarnings("ignore:DeepLIFT's map")
@pytest.mark.parametrize("name", INEXACT)
def test_an_op_without_an_exact_rule_is_listed(name):
    """The trace names the op to blame for a wrong sum, and it alone."""
    op, function = INEXACT[name]
    model, x = prepare(lambda: between(function))
    kept = rectgrad.record(model, x)
    kept.attribute("deeplift", target=1)
    plain, rows = kept.trace.plain(), zip(kept.trace.rows, kept.trace.layers(), strict=True)
    exact = deeplift_error(model, x, 0.0, target=1) < 1e-9
    assert {row.name for row, layer in rows if layer in plain} == (set() if exact else {op})


# --- epsilon-LRP -------------------------------------------------------------------------------------------


def relu_mlp() -> tuple[nn.Module, Tensor]:
    return mlp(nn.ReLU(), nn.Linear(8, 8), nn.ReLU())


def relu_cnn() -> tuple[nn.Module, Tensor]:
    return cnn(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))


def relu_resnet() -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1))
    again = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
    return cnn(nn.BatchNorm2d(6), nn.ReLU(), Apply(residual, body=body, again=again), nn.MaxPool2d(2))


RELU_NETWORKS = [relu_mlp, relu_cnn, relu_resnet]


def lrp(model: nn.Module, x: Tensor, **options) -> Tensor:
    return rectgrad.attribute(model, x, "epsilon_lrp", target=1, **options)


def shifts(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """For each layer its bias and the constant it adds to a linear map of its input."""
    found = []
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            scale = module.weight / (module.running_var + module.eps).sqrt()
            found.append((module.bias, (module.bias - scale * module.running_mean).detach()))
        elif getattr(module, "bias", None) is not None:
            found.append((module.bias, module.bias.detach()))
    return found


@pytest.mark.parametrize("build", RELU_NETWORKS)
def test_lrp_and_what_shifts_absorb_sum_to_the_score(build):
    """A ReLU network is linear around an input: score = input * gradient + shifts * their gradients."""
    model, x = prepare(build)
    for sample in x.split(1):
        score = model(sample)[0, 1]
        biases, constants = zip(*shifts(model), strict=True)
        slopes = torch.autograd.grad(score, biases)
        absorbed = sum((g * b).sum() for g, b in zip(slopes, constants, strict=True))
        assert absorbed.abs() > 0.1 * score.abs()
        torch.testing.assert_close(lrp(model, sample, epsilon=1e-12).sum() + absorbed, score.detach())


@pytest.mark.parametrize("build", RELU_NETWORKS)
def test_lrp_tends_to_gradient_times_input(build):
    model, x = prepare(build)
    limit = rectgrad.attribute(model, x, "gradient_x_input", target=1)
    errors = [
        ((lrp(model, x, epsilon=epsilon) - limit).abs().max() / limit.abs().max()).item()
        for epsilon in (1e-1, 1e-4, 1e-7, 1e-10, 0)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01
    assert errors[-2] < 1e-6
    assert errors[-1] < 1e-12


@torch.no_grad()
def lrp_by_hand(layers: nn.Sequential, x: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of linear layers and ReLUs, for output 1 of one sample: its relevance, what was absorbed, its score.

    R_i = sum_j x_i w_ij R_j / (z_j + epsilon * sign(z_j)); a ReLU passes relevance as it is.
    """
    values = [x]
    for layer in layers:
        values.append(layer(values[-1]))
    relevance = torch.zeros_like(values[-1])
    relevance[1] = score = values[-1][1]
    absorbed = torch.zeros_like(score)
    for layer, a, z in reversed(list(zip(layers, values, values[1:], strict=False))):
        if isinstance(layer, nn.Linear):
            share = relevance / (z + epsilon * z.sign())
            absorbed += (share * (layer.bias + epsilon * z.sign())).sum()
            relevance = a * (share @ layer.weight)
    return relevance, absorbed, score


@pytest.mark.parametrize("epsilon", [1e-4, 0.05, 1.0])
def test_lrp_layer_by_layer(epsilon):
    model, x = prepare(relu_mlp)
    for sample, given in zip(x, lrp(model, x, epsilon=epsilon), strict=True):
        relevance, absorbed, score = lrp_by_hand(model, sample, epsilon)
        torch.testing.assert_close(given, relevance)
        torch.testing.assert_close(given.sum() + absorbed, score)


# --- batch norm, folded into the layer before it or not ----------------------------------------------------


def conv_norms() -> tuple[nn.Module, Tensor]:
    strided = nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return cnn(nn.BatchNorm2d(6), nn.ReLU(), *strided, nn.Conv2d(8, 8, 3, groups=4), nn.BatchNorm2d(8))


def linear_norms() -> tuple[nn.Module, Tensor]:
    return mlp(
        nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU(),
        nn.Linear(9, 9),
    )  # fmt: skip


def transposed_conv_norms() -> tuple[nn.Module, Tensor]:
    up = nn.ConvTranspose2d(6, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU()
    return cnn(nn.BatchNorm2d(6), nn.ReLU(), *up)


def norms_in_blocks() -> tuple[nn.Module, Tensor]:
    def block(self: Apply, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return F.relu(y, inplace=True)

    def conv_norm(kernel: int) -> list[nn.Module]:
        return [nn.Conv2d(6, 6, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(6)]

    blocks = [
        Apply(
            block,
            body=nn.Sequential(*conv_norm(3), nn.ReLU(), *conv_norm(3)),
            shortcut=nn.Sequential(*conv_norm(1)),
        )
        for _ in range(2)
    ]
    return cnn(nn.ReLU(), *blocks)


def folded(model: nn.Module) -> nn.Module:
    """The same network with every batch norm that follows a layer of a Sequential put into its weights."""
    model = copy.deepcopy(model)
    for sequence in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        for i, (layer, norm) in enumerate(zip(list(sequence), list(sequence)[1:], strict=False)):
            if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
                sequence[i], sequence[i + 1] = fuse(layer, norm), nn.Identity()
    return model


def fuse(layer: nn.Module, norm: nn.Module) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, nn.ConvTranspose2d))


@pytest.mark.parametrize("build", [conv_norms, linear_norms, transposed_conv_norms, norms_in_blocks])
@pytest.mark.parametrize("method", ["epsilon_lrp", "deeplift", "gradient_x_input"])
def test_folding_batch_norms_changes_nothing(build, method):
    model, x = prepare(build)
    plain = folded(model).eval()
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in plain.modules())
    torch.testing.assert_close(model(x), plain(x))
    maps, expected = (rectgrad.attribute(m, x, method, target=1) for m in (model, plain))
    assert (maps - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_batch_norm_is_folded_through_a_change_of_shape():
    """Tokens: a linear layer has its channels last, the norm wants them second."""
    linear, norm, head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(56, 4)
    tail = nn.Sequential(nn.ReLU(), nn.Flatten(), head)

    def forward(self: Apply, x: Tensor) -> Tensor:
        return self.tail(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2))

    net = Apply(forward, linear=linear, norm=norm, tail=tail)
    model, x = prepare(lambda: (net, torch.randn(3, 7, 5)))
    expected = lrp(nn.Sequential(fuse_linear_bn_eval(linear, norm), *tail).eval(), x)
    assert (lrp(model, x) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("epsilon", [1e-4, 0.1])
def test_a_layer_with_two_readers_is_not_folded(epsilon):
    """y = linear(x) goes into a norm and past it: y, norm(y) and their sum are each a sum of their own."""
    linear, norm, head = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    net = Apply(
        lambda self, x: self.head((self.norm(y := self.linear(x)) + y).relu()),
        linear=linear,
        norm=norm,
        head=head,
    )
    model, x = prepare(lambda: (net, torch.randn(3, 5)))

    def stable(z: Tensor) -> Tensor:
        return z / (z + epsilon * z.sign())

    with torch.no_grad():
        y = linear(x)
        normed = norm(y)
        score = head((normed + y).relu())[:, 1:2]
        at_sum = head.weight[1] * stable(score) * (normed + y > 0) * stable(normed + y)
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        at_y = at_sum * stable(normed) * scale + at_sum
        expected = x * ((at_y * stable(y)) @ linear.weight)
    torch.testing.assert_close(lrp(model, x, epsilon=epsilon), expected)
