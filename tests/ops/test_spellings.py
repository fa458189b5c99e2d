"""One network, written in many ways: every method gives the same map to the last bit.

A spelling is a function or a factory of modules that takes the place of one step in a fixed network with
residuals, batch norms, pooling and gates. The first spelling of each table is what the others must equal.
"""

import functools
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import ANY_NETWORK, BACKWARD, POSITIONS

aten, Spelling = torch.ops.aten, Callable[..., Tensor]

# Options that make a small network's maps neither empty nor slow.
OPTIONS = {
    **{name: {"q": 70, "positive_only": False} for name in ("rectgrad", "rectgrad_prr", "rectgrad_mod")},
    "smoothgrad": {"samples": 2, "over": "gradient_x_input"},
    "integrated_gradients": {"steps": 3, "over": "guided_backprop"},
    "expected_gradients": {"samples": 2},
    "deeplift": {"baseline": 0.1},
}
METHODS = BACKWARD
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


class Network(nn.Module):
    """Five convolutions and two dense layers; each step can be replaced by another spelling of it."""

    def __init__(self, **steps: Spelling | Callable[[], nn.Module]):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
            self.dense, self.head = nn.Linear(8 * 16, 40, bias=False), nn.Linear(40, 5)
            self.norm = nn.BatchNorm1d(40)
            self.apply(unsettle)
        self.steps = steps
        # A class stands for a module of its own at each place, an instance for one that is shared.
        own = isinstance(steps.get("act"), type)
        self.own = nn.ModuleList(steps["act"]() for _ in range(6)) if own else None

    def act(self, x: Tensor, place: int) -> Tensor:
        return self.own[place](x) if self.own is not None else self.steps.get("act", relu)(x)

    def step(self, name: str, default: Spelling, *args) -> Tensor:
        return self.steps.get(name, default)(*args)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.convs
        x = self.act(self.stem(x), 0)
        y = self.act(self.step("norm", batch_norm, self.convolved(x, a), self.norms[0]), 1)
        y = self.norms[1](self.convolved(y, b))
        x = self.act(self.step("add", operator.add, y, x), 2)
        x = self.step("pool", max_pool, x)
        gate = self.step("gate", torch.sigmoid, x.mean((2, 3), keepdim=True) - 0.1)
        x = self.act(self.step("mul", operator.mul, self.convolved(x, c), gate), 3)
        x = self.act(self.convolved(x, d), 4)
        x = self.step("dense", F.linear, x.flatten(1), self.dense.weight)
        return self.step("affine", F.linear, self.act(self.norm(x), 5), self.head.weight, self.head.bias)

    def convolved(self, x: Tensor, conv: nn.Conv2d) -> Tensor:
        return self.step("conv", convolution, x, conv.weight, conv.bias)


def batch_norm(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return norm(x)


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


@torch.no_grad()
def unsettle(module: nn.Module) -> None:
    """Weights that carry a signal to the end, and norms that are not those of a fresh layer."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        module.weight.mul_(2)
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
        module.running_mean.normal_(0, 0.3)
        module.running_var.uniform_(0.5, 2)
        module.weight.uniform_(0.5, 1.5)
        module.bias.normal_(0, 0.3)


def pictures(samples: int = 2) -> Tensor:
    return 2 * torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def maps(method: str, x: Tensor, **steps) -> Tensor:
    model = Network(**steps).double().eval()
    return rectgrad.attribute(model, x, method, target=2, **OPTIONS.get(method, {}))


@functools.cache
def first_map(method: str, step: str, first: Spelling, samples: int) -> Tensor:
    return maps(method, pictures(samples), **{step: first})


def check(method: str, step: str, first: Spelling, spelling: Spelling, samples: int = 2) -> None:
    if method in POSITIONS and spelling in {*NO_IMAGES, RELU["view(-1) in place"]}:
        with pytest.raises(rectgrad.UnsupportedModelError, match="no activation with positions"):
            maps(method, pictures(samples), **{step: spelling})
        return
    expected = first_map(method, step, first, samples)
    given = maps(method, pictures(samples), **{step: spelling})
    assert expected.abs().max() > 0, method
    atol = 1e-12 * float(expected.abs().max()) if method == "expected_gradients" else 0  # another order
    torch.testing.assert_close(given, expected, rtol=0, atol=atol, msg=lambda said: f"{method}: {said}")


def check_all(step: str, first: Spelling, spelling: Spelling, samples: int = 2) -> None:
    for method in METHODS:
        check(method, step, first, spelling, samples)


def spellings(table: dict[str, Spelling]) -> pytest.MarkDecorator:
    """Each spelling of a table but the first, with the first."""
    (_, first), *others = table.items()
    pairs = [pytest.param(first, other, id=name) for name, other in others]
    return pytest.mark.parametrize(("first", "spelling"), pairs)


def unused(function: Callable[[Tensor], object]) -> Spelling:
    """An in-place call whose return value is not looked at."""

    def spelling(x: Tensor) -> Tensor:
        function(x)
        return x

    return spelling


def module(make: Callable[[], nn.Module]) -> type:
    """A class that makes the module, so that each place gets its own."""
    return type("Own", (), {"__new__": lambda _: make()})


# --- activations -------------------------------------------------------------------------------------------

RELU = {
    "nn.ReLU": nn.ReLU,
    "nn.ReLU in place": module(lambda: nn.ReLU(inplace=True)),
    "nn.ReLU in nn.Sequential": module(lambda: nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))),
    "nn.ReLU shared": nn.ReLU(),
    "nn.ReLU shared in place": nn.ReLU(inplace=True),
    "nn.ReLU unused": unused(nn.ReLU(inplace=True)),
    "F.relu": F.relu,
    "F.relu keyword": lambda x: F.relu(input=x),
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "F.relu in place positional": lambda x: F.relu(x, True),
    "F.relu in place keywords": lambda x: F.relu(inplace=True, input=x),
    "F.relu unused": unused(lambda x: F.relu(x, inplace=True)),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "torch.relu_ unused": unused(torch.relu_),
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: x.relu_(),
    "Tensor.relu_ unused": unused(lambda x: x.relu_()),
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clamp(0)": lambda x: x.clamp(0),
    "clamp(0, None)": lambda x: x.clamp(0, None),
    "clamp(0, inf)": lambda x: x.clamp(0.0, float("inf")),
    "clamp_(min=0)": lambda x: x.clamp_(min=0),
    "clamp_ unused": unused(lambda x: x.clamp_(min=0.0)),
    "torch.clamp": lambda x: torch.clamp(x, min=0),
    "torch.clamp keywords": lambda x: torch.clamp(input=x, min=0, out=None),
    "torch.clamp_": lambda x: torch.clamp_(x, min=0),
    "clip": lambda x: x.clip(0),
    "clip_": lambda x: x.clip_(min=0),
    "torch.clip": lambda x: torch.clip(x, min=0),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_min_": lambda x: x.clamp_min_(0),
    "torch.clamp_min": lambda x: torch.clamp_min(x, 0.0),
    "F.threshold": lambda x: F.threshold(x, 0, 0),
    "F.threshold in place": lambda x: F.threshold(x, 0, 0, inplace=True),
    "F.threshold_": lambda x: F.threshold_(x, 0.0, 0.0),
    "torch.threshold": lambda x: torch.threshold(x, 0, 0),
    "torch.threshold_": lambda x: torch.threshold_(x, 0, 0),
    "nn.Threshold": module(lambda: nn.Threshold(0, 0)),
    "nn.Threshold in place": module(lambda: nn.Threshold(0.0, 0.0, inplace=True)),
    "nn.Hardtanh": module(lambda: nn.Hardtanh(0.0, float("inf"))),
    "aten.relu": aten.relu,
    "aten.relu.default": aten.relu.default,
    "aten.relu_": aten.relu_,
    "aten.clamp": lambda x: aten.clamp(x, 0),
    "aten.clamp.default": lambda x: aten.clamp.default(x, min=0),
    "aten.clamp_min": lambda x: aten.clamp_min(x, 0),
    "view(-1) in place": unused(lambda x: x.view(x.shape[0], -1).relu_()),
    "transposed in place": unused(lambda x: F.relu(x.transpose(0, 1).transpose(0, 1), inplace=True)),
    "copied": lambda x: x.clone().relu_(),
    "out of a list": lambda x: torch.cat([x]).relu_(),
}

RELU6 = {
    "nn.ReLU6": nn.ReLU6,
    "nn.ReLU6 in place": module(lambda: nn.ReLU6(inplace=True)),
    "nn.ReLU6 unused": unused(nn.ReLU6(inplace=True)),
    "F.relu6": F.relu6,
    "F.relu6 in place": lambda x: F.relu6(x, inplace=True),
    "F.relu6 positional": lambda x: F.relu6(x, True),
    "F.hardtanh": lambda x: F.hardtanh(x, 0, 6),
    "F.hardtanh keywords": lambda x: F.hardtanh(x, max_val=6.0, min_val=0.0),
    "F.hardtanh in place": lambda x: F.hardtanh(x, 0.0, 6.0, inplace=True),
    "F.hardtanh_": lambda x: F.hardtanh_(x, 0.0, 6.0),
    "nn.Hardtanh": module(lambda: nn.Hardtanh(0, 6)),
    "clamp": lambda x: x.clamp(0, 6),
    "clamp keywords": lambda x: x.clamp(max=6, min=0),
    "clamp_": lambda x: x.clamp_(0, 6),
    "clamp_ unused": unused(lambda x: x.clamp_(0, 6)),
    "torch.clip": lambda x: torch.clip(x, 0, 6),
    "aten.hardtanh": lambda x: aten.hardtanh(x, 0.0, 6.0),
    "aten.relu6": aten.relu6,
}

SILU = {
    "nn.SiLU": nn.SiLU,
    "nn.SiLU in place": module(lambda: nn.SiLU(inplace=True)),
    "nn.SiLU unused": unused(nn.SiLU(inplace=True)),
    "F.silu": F.silu,
    "F.silu in place": lambda x: F.silu(x, inplace=True),
    "aten.silu": aten.silu,
    "aten.silu_": aten.silu_,
}

LEAKY_RELU = {
    "nn.LeakyReLU": module(lambda: nn.LeakyReLU(0.1)),
    "nn.LeakyReLU in place": module(lambda: nn.LeakyReLU(0.1, inplace=True)),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "F.leaky_relu in place": lambda x: F.leaky_relu(x, 0.1, True),
    "F.leaky_relu_": lambda x: F.leaky_relu_(x, 0.1),
    "F.leaky_relu unused": unused(lambda x: F.leaky_relu(x, negative_slope=0.1, inplace=True)),
    "aten.leaky_relu": lambda x: aten.leaky_relu(x, 0.1),
}

ELU = {"nn.ELU": nn.ELU, "F.elu": F.elu, "F.elu positional": lambda x: F.elu(x, 1.0), "aten.elu": aten.elu}

SELU = {"nn.SELU": nn.SELU, "torch.selu": torch.selu, "F.selu": F.selu, "aten.selu": aten.selu}

CELU = {"nn.CELU": nn.CELU, "torch.celu": torch.celu, "F.celu": lambda x: F.celu(x, alpha=1.0)}

# In place, torch computes their derivative from the output: with another rounding.
ROUNDED = {
    "nn.ELU": (nn.ELU, module(lambda: nn.ELU(inplace=True))),
    "F.elu": (nn.ELU, lambda x: F.elu(x, 1.0, True)),
    "F.elu_": (nn.ELU, unused(F.elu_)),
    "F.selu": (nn.SELU, lambda x: F.selu(x, inplace=True)),
    "torch.selu_": (nn.SELU, unused(torch.selu_)),
    "F.celu": (nn.CELU, lambda x: F.celu(x, inplace=True)),
    "torch.celu_": (nn.CELU, torch.celu_),
}

GELU = {"nn.GELU": nn.GELU, "F.gelu": F.gelu, "aten.gelu": aten.gelu}

MISH = {"nn.Mish": nn.Mish, "F.mish": F.mish, "F.mish in place": lambda x: F.mish(x, inplace=True)}

HARDSWISH = {
    "nn.Hardswish": nn.Hardswish,
    "F.hardswish": F.hardswish,
    "F.hardswish in place": lambda x: F.hardswish(x, True),
    "aten.hardswish_": aten.hardswish_,
}

SOFTPLUS = {"nn.Softplus": nn.Softplus, "F.softplus": F.softplus, "aten.softplus": aten.softplus}

PRELU = {
    "nn.PReLU": nn.PReLU,
    "F.prelu": lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "torch.prelu": lambda x: torch.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "Tensor.prelu": lambda x: x.prelu(torch.tensor([0.25], dtype=x.dtype)),
}


@spellings(RELU)
def test_relu(first, spelling):
    check_all("act", first, spelling)


@spellings(RELU6)
def test_relu6(first, spelling):
    check_all("act", first, spelling)


def test_the_ceiling_of_relu6_is_reached():
    model, x = Network().double().eval(), pictures()
    assert (model.stem(x) > 6).any()


OTHERS = [SILU, LEAKY_RELU, ELU, SELU, CELU, GELU, MISH, HARDSWISH, SOFTPLUS, PRELU]


@EVERY_METHOD
@pytest.mark.parametrize("table", OTHERS, ids=lambda table: next(iter(table)))
@pytest.mark.filterwarnings("ignore:the relevance of sample")  # a sum near zero divides it
def test_other_activations(table, method):
    first, *others = table.values()
    for spelling in others:
        check(method, "act", first, spelling)


@EVERY_METHOD
@pytest.mark.parametrize("name", ROUNDED)
def test_exponential_units_in_place(name, method):
    first, spelling = ROUNDED[name]
    expected = first_map(method, "act", first, 2)
    given = maps(method, pictures(), act=spelling)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


WHOLE_LAYER_VIEWS = {
    "nn.ReLU": nn.ReLU,
    "view(-1).relu_": unused(lambda x: x.view(-1).relu_()),
    "x[0].relu_": unused(lambda x: x[0].relu_()),
    "F.relu of x[:]": unused(lambda x: F.relu(x[:], inplace=True)),
    "unsqueezed": unused(lambda x: x.unsqueeze(0).clamp_(min=0)),
    "transposed": unused(lambda x: x.transpose(0, 1).relu_()),
    "channels last": lambda x: x.movedim(1, -1).relu().movedim(-1, 1),
}


@spellings(WHOLE_LAYER_VIEWS)
def test_in_place_on_a_view_of_the_layer(first, spelling):
    check_all("act", first, spelling, samples=1)


NO_IMAGES = {WHOLE_LAYER_VIEWS[name] for name in ("view(-1).relu_", "x[0].relu_", "unsqueezed", "transposed")}


@pytest.mark.parametrize("method", [m for m in METHODS if m in ANY_NETWORK])
@pytest.mark.parametrize("spelling", ["view(-1).relu_", "unsqueezed", "transposed"])
def test_in_place_on_a_view_that_folds_samples(spelling, method):
    """Samples are then run one by one: equal but for the rounding of other batch sizes."""
    x = pictures(3)
    expected, given = (maps(method, x, act=WHOLE_LAYER_VIEWS[name]) for name in ("nn.ReLU", spelling))
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-10 * expected.abs().max().item())


def halves(x: Tensor) -> Tensor:
    middle = x.shape[1] // 2
    x[:, :middle].relu_()
    x[:, middle:].relu_()
    return x


def one_half(x: Tensor) -> Tensor:
    middle = x.shape[1] // 2
    return torch.cat([x[:, :middle].relu(), x[:, middle:]], 1)


def one_half_in_place(x: Tensor) -> Tensor:
    x[:, : x.shape[1] // 2].relu_()
    return x


def strips(x: Tensor) -> Tensor:
    for start in range(3):
        F.relu(x[:, start::3], inplace=True)
    return x


@pytest.mark.parametrize("spelling", [halves, strips])
@pytest.mark.parametrize("method", [m for m in METHODS if m in ANY_NETWORK and not m.startswith("rectgrad")])
def test_in_place_on_parts_of_the_layer(spelling, method):
    check(method, "act", nn.ReLU, spelling)


@EVERY_METHOD
def test_in_place_on_one_part_of_the_layer(method):
    check(method, "act", one_half, one_half_in_place)


@pytest.mark.parametrize("spelling", [halves, strips])
@pytest.mark.parametrize("rule", ["PR1", "PR2", "PR3", "PR4", "mod"])
def test_in_place_on_parts_of_the_layer_with_a_constant_tau(spelling, rule):
    """A percentile would be taken over each part."""
    options = {"tau": 0.01, "rule": rule, "positive_only": False, "prr": True}
    expected, given = (
        rectgrad.attribute(Network(act=act).double().eval(), pictures(), "rectgrad", target=2, **options)
        for act in (nn.ReLU, spelling)
    )
    assert expected.abs().max() > 0
    assert torch.equal(given, expected)


# --- other steps -------------------------------------------------------------------------------------------


def add_to(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def add_unused(x: Tensor, y: Tensor) -> Tensor:
    torch.Tensor.add_(x, y)
    return x


ADD = {
    "+": operator.add,
    "+=": add_to,
    "torch.add": torch.add,
    "torch.add alpha": lambda x, y: torch.add(x, y, alpha=1),
    "torch.add keywords": lambda x, y: torch.add(input=x, other=y),
    "Tensor.add": lambda x, y: x.add(y),
    "Tensor.add_": lambda x, y: x.add_(y),
    "Tensor.add_ unused": add_unused,
    "other way round": lambda x, y: y + x,
    "radd": lambda x, y: x.__radd__(y),
    "minus the negative": lambda x, y: x - (-y),
    "-=": lambda x, y: operator.isub(x, -y),
    "torch.sub": lambda x, y: torch.sub(x, y.neg()),
    "rsub": lambda x, y: torch.rsub(-y, x),
    "aten.add": aten.add,
    "aten.add_.Tensor": aten.add_.Tensor,
    "stacked": lambda x, y: torch.stack([x, y]).sum(0),
}


def mul_unused(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(y)
    return x


MUL = {
    "*": operator.mul,
    "*=": operator.imul,
    "torch.mul": torch.mul,
    "torch.mul keywords": lambda x, y: torch.mul(input=x, other=y),
    "torch.multiply": torch.multiply,
    "Tensor.mul": lambda x, y: x.mul(y),
    "Tensor.mul_": lambda x, y: x.mul_(y),
    "Tensor.mul_ unused": mul_unused,
    "Tensor.multiply_": lambda x, y: x.multiply_(y),
    "expanded": lambda x, y: x * y.expand_as(x),
    "aten.mul": aten.mul,
}

GATE = {
    "torch.sigmoid": torch.sigmoid,
    "nn.Sigmoid": nn.Sigmoid(),
    "F.sigmoid": F.sigmoid,
    "Tensor.sigmoid": lambda x: x.sigmoid(),
    "Tensor.sigmoid_": lambda x: x.sigmoid_(),
    "torch.sigmoid_ unused": unused(torch.sigmoid_),
    "torch.special.expit": torch.special.expit,
    "aten.sigmoid": aten.sigmoid,
}

# The product of a layer without bias, whose only reader is a batch norm.
DENSE = {
    "F.linear": F.linear,
    "F.linear keywords": lambda x, weight: F.linear(weight=weight, input=x, bias=None),
    "@": lambda x, weight: x @ weight.T,
    "torch.matmul": lambda x, weight: torch.matmul(x, weight.t()),
    "Tensor.matmul": lambda x, weight: x.matmul(weight.mT),
    "torch.mm": lambda x, weight: torch.mm(x, weight.t()),
    "Tensor.mm": lambda x, weight: x.mm(weight.transpose(0, 1)),
    "aten.mm": lambda x, weight: aten.mm(x, weight.t()),
    "aten.linear": aten.linear,
}

AFFINE = {
    "F.linear": F.linear,
    "torch.addmm": lambda x, weight, bias: torch.addmm(bias, x, weight.t()),
    "Tensor.addmm": lambda x, weight, bias: bias.addmm(x, weight.t()),
    "aten.addmm": lambda x, weight, bias: aten.addmm(bias, x, weight.t()),
    "aten.linear": aten.linear,
}

CONV = {
    "F.conv2d": convolution,
    "torch.conv2d": lambda x, weight, bias: torch.conv2d(x, weight, bias, 1, 1),
    "F.conv2d keywords": lambda x, weight, bias: F.conv2d(padding=1, bias=bias, weight=weight, input=x),
    "same": lambda x, weight, bias: F.conv2d(x, weight, bias, padding="same"),
    "tuples": lambda x, weight, bias: F.conv2d(x, weight, bias, (1, 1), (1, 1), (1, 1), 1),
    "aten.conv2d": lambda x, weight, bias: aten.conv2d(x, weight, bias, [1, 1], [1, 1]),
    "torch.convolution": lambda x, weight, bias: torch.convolution(
        x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ),
    "aten.convolution": lambda x, weight, bias: aten.convolution(
        x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ),
    "F.pad": lambda x, weight, bias: F.conv2d(F.pad(x, (1, 1, 1, 1)), weight, bias),
    "nn.ZeroPad2d": lambda x, weight, bias: F.conv2d(nn.ZeroPad2d(1)(x), weight, bias),
    "half of it each": lambda x, weight, bias: F.conv2d(F.pad(x, (1, 1)), weight, bias, padding=(1, 0)),
}

# A bias that is added after the layer. Rounded twice: equal but for that.
ADDED_BIAS = {
    "x @ w + b": lambda x, w, b: x @ w.t() + b,
    "b + x @ w": lambda x, w, b: b + x.matmul(w.T),
    "F.linear + b": lambda x, w, b: F.linear(x, w) + b,
    "two biases": lambda x, w, b: x @ w.t() + b / 4 + 3 * b / 4,
    "einsum + b": lambda x, w, b: torch.einsum("bi,oi->bo", [x, w]) + b,
    "conv + b": lambda x, w, b: F.conv2d(x, w, padding=1) + b[:, None, None],
    "conv += b": lambda x, w, b: F.conv2d(x, w, padding=1).add_(b.view(1, -1, 1, 1)),
}

NORM = {
    "nn.BatchNorm2d": batch_norm,
    "F.batch_norm": lambda x, n: F.batch_norm(
        x, n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps
    ),
    "torch.batch_norm": lambda x, n: torch.batch_norm(
        x, n.weight, n.bias, n.running_mean, n.running_var, False, 0.1, n.eps, False
    ),
    "aten.batch_norm": lambda x, n: aten.batch_norm(
        x, n.weight, n.bias, n.running_mean, n.running_var, False, 0.1, n.eps, False
    ),
}

POOL = {
    "F.max_pool2d": max_pool,
    "nn.MaxPool2d": nn.MaxPool2d(2),
    "nn.MaxPool2d with indices": lambda x: nn.MaxPool2d(2, return_indices=True)(x)[0],
    "F.max_pool2d in full": lambda x: F.max_pool2d(x, (2, 2), (2, 2), 0, 1, False),
    "F.max_pool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "F.max_pool2d_with_indices": lambda x: F.max_pool2d_with_indices(x, 2)[0],
    "F.max_pool2d ceil mode": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 2),
    "torch.max_pool2d in full": lambda x: torch.max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], False),
    "aten.max_pool2d": lambda x: aten.max_pool2d(x, [2, 2]),
    "aten.max_pool2d_with_indices": lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0],
    "F.adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 4),
    "F.adaptive_max_pool2d with indices": lambda x: F.adaptive_max_pool2d(x, (4, 4), True)[0],
    "nn.AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d((4, 4)),
    "torch.adaptive_max_pool2d": lambda x: torch._C._nn.adaptive_max_pool2d(x, (4, 4))[0],
    "F.max_pool3d": lambda x: F.max_pool3d(x[:, None], (1, 2, 2))[:, 0],
}


@spellings(ADD)
def test_add(first, spelling):
    check_all("add", first, spelling)


@spellings(MUL)
def test_mul(first, spelling):
    check_all("mul", first, spelling)


@spellings(GATE)
def test_sigmoid(first, spelling):
    check_all("gate", first, spelling)


@spellings(DENSE)
def test_matmul(first, spelling):
    check_all("dense", first, spelling)


@spellings(AFFINE)
def test_linear_with_bias(first, spelling):
    check_all("affine", first, spelling)


@spellings(CONV)
def test_conv(first, spelling):
    check_all("conv", first, spelling)


@EVERY_METHOD
@pytest.mark.parametrize("name", ADDED_BIAS)
def test_a_bias_that_is_added_after_the_layer(name, method):
    step, first = ("conv", convolution) if name.startswith("conv") else ("affine", F.linear)
    expected = first_map(method, step, first, 2)
    given = maps(method, pictures(), **{step: ADDED_BIAS[name]})
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-10 * expected.abs().max().item())


@spellings(NORM)
def test_batch_norm(first, spelling):
    check_all("norm", first, spelling)


@spellings(POOL)
def test_max_pool(first, spelling):
    check_all("pool", first, spelling)
