"""Eval-mode batch norm on the CPU, when the arriving gradient is stored in another order.

PyTorch's own gradient is wrong there for one sample (seen up to 2.13). The networks below turn an image into
tokens after the batch norm, as vision transformers do. Every map is compared with that of a network in which
the batch norm is written out as x * scale + shift, and with the same sample in a batch of two.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

CHANNELS = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "rectgrad": {"q": 60.0},
    "rectgrad_prr": {"q": 60.0},
    "rectgrad_mod": {"q": 60.0},
    "integrated_gradients": {"steps": 4},
    "smoothgrad": {"samples": 2},
    "epsilon_lrp": {"epsilon": 1e-9},  # so small that it does not matter how many steps a batch norm is
}
METHODS = [
    "rectgrad",
    "rectgrad_prr",
    "rectgrad_mod",
    "saliency",
    "gradient_x_input",
    "guided_backprop",
    "deconv",
    "smoothgrad",
    "integrated_gradients",
    "epsilon_lrp",
    "deeplift",
]
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5}

Norm = Callable[[Tensor, nn.Module], Tensor]


def by_module(h: Tensor, norm: nn.Module) -> Tensor:
    return norm(h)


def by_functional(h: Tensor, norm: nn.Module) -> Tensor:
    return F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps)


def by_torch(h: Tensor, norm: nn.Module) -> Tensor:
    values = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return torch.batch_norm(h, *values, False, 0.1, norm.eps, torch.backends.cudnn.enabled)


def by_native(h: Tensor, norm: nn.Module) -> Tensor:
    values = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return torch.native_batch_norm(h, *values, False, 0.1, norm.eps)[0]


def by_hand(h: Tensor, norm: nn.Module) -> Tensor:
    scale, shift = folded(norm)
    shape = (1, -1) + (1,) * (h.dim() - 2)
    return h * scale.view(shape) + shift.view(shape)


def folded(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The scale and the shift of an eval-mode batch norm."""
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    return scale.detach(), (shift if norm.bias is None else shift + norm.bias).detach()


# What follows the tokens (N, T, C). In each of them, the gradient of the tokens is strided or expanded.
TAILS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "mean": lambda m, t: m.head(t.mean(1)),
    "linear_mean": lambda m, t: m.head(t).mean(1),
    "two_tokens": lambda m, t: m.head(t[:, -1] + t[:, t.shape[1] // 2]),
    "relu_mean": lambda m, t: m.head(F.relu(m.wide(t)).mean(1)),
    "attention": lambda m, t: m.head((t @ t.transpose(1, 2) / 20).softmax(-1).mean(1, keepdim=True) @ t)[
        :, 0
    ],
}


class Tokens(nn.Module):
    """Convolution and ReLU, convolution and batch norm, tokens, and a tail."""

    def __init__(self, norm: Norm, tail: str, dims: int = 2, affine: bool = True) -> None:
        super().__init__()
        self.stem = CONVS[dims](2, 8, 3, padding=1)
        self.conv = CONVS[dims](8, CHANNELS, 3, padding=1)
        self.norm = NORMS[dims](CHANNELS, affine=affine)
        self.wide, self.head = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 3)
        self.how, self.tail = norm, TAILS[tail]

    def forward(self, x: Tensor) -> Tensor:
        h = self.how(self.conv(F.relu(self.stem(x))), self.norm)
        return self.tail(self, h.flatten(2).transpose(1, 2))


def tokens(
    norm: Norm, tail: str = "mean", dims: int = 2, affine: bool = True, dtype: torch.dtype = torch.float64
) -> Tokens:
    """The same numbers for every way of writing the batch norm."""
    model = Tokens(norm, tail, dims, affine)
    generator = torch.Generator().manual_seed(dims)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 2
    model.norm.running_mean = torch.randn(CHANNELS, generator=generator)
    model.norm.running_var = torch.rand(CHANNELS, generator=generator) + 0.5
    return model.to(dtype).eval()


def images(n: int = 1, dims: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, 2, *[9, 8, 4][:dims], generator=torch.Generator().manual_seed(9)).to(dtype)


def attribute(model: nn.Module, x: Tensor, method: str) -> Tensor:
    return rectgrad.attribute(model, x, method, target=1, **OPTIONS.get(method, {}))


def assert_close(maps: Tensor, expected: Tensor) -> None:
    largest = float(expected.abs().max())
    assert largest > 0
    error = float((maps - expected).abs().max()) / largest
    assert error <= TOLERANCE[maps.dtype], f"wrong by {error:.2g} of the maximum"


@pytest.fixture(params=["unset", "portable", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RECTGRAD_KERNELS", raising=False)
    if request.param != "unset":
        monkeypatch.setenv("RECTGRAD_KERNELS", request.param)
    return request.param


def test_the_references_agree() -> None:
    """The batch norm by hand computes the same, and its gradient is that of finite differences."""
    model, x = tokens(by_hand), images()
    torch.testing.assert_close(model(x), tokens(by_module)(x))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    direction = torch.randn_like(x)
    step = 1e-6 * direction
    difference = (model(x + step) - model(x - step))[0, 1].item() / 2e-6
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("method", METHODS)
def test_as_by_hand(method: str, tail: str, dtype: torch.dtype, kernels: str) -> None:
    x = images(dtype=dtype)
    expected = attribute(tokens(by_hand, tail, dtype=dtype), x, method)
    assert_close(attribute(tokens(by_module, tail, dtype=dtype), x, method), expected)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("method", METHODS)
def test_alone_as_in_a_batch_of_two(method: str, tail: str, kernels: str) -> None:
    model, x = tokens(by_module, tail), images(2)
    together = attribute(model, x, method)
    for i in range(2):
        assert_close(attribute(model, x[i : i + 1], method), together[i : i + 1])


@pytest.mark.parametrize("norm", [by_module, by_functional, by_torch, by_native])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("dims", CONVS)
@pytest.mark.parametrize("method", METHODS)
def test_every_spelling_and_dimension(method: str, dims: int, affine: bool, norm: Norm) -> None:
    expected = attribute(tokens(by_hand, dims=dims, affine=affine), images(dims=dims), method)
    assert_close(attribute(tokens(norm, dims=dims, affine=affine), images(dims=dims), method), expected)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dims", CONVS)
def test_saliency_is_the_gradient_by_hand(dims: int, tail: str, kernels: str) -> None:
    """The same comparison without any map of ours on the other side."""
    leaf = images(dims=dims).requires_grad_()
    (expected,) = torch.autograd.grad(tokens(by_hand, tail, dims)(leaf)[:, 1].sum(), leaf)
    model = tokens(by_module, tail, dims)
    assert_close(attribute(model, leaf.detach(), "saliency"), expected)
    kept = rectgrad.record(model, leaf.detach())
    assert_close(kept.attribute("saliency", target=1), expected)
    assert_close(kept.attribute("gradient_x_input", target=1), expected * leaf.detach())


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "saliency"])
def test_layer_attributions(method: str, kernels: str) -> None:
    x = images()
    expected = rectgrad.layer_attributions(tokens(by_hand, "relu_mean"), x, method, target=1)
    found = rectgrad.layer_attributions(tokens(by_module, "relu_mean"), x, method, target=1)
    assert len(found) == len(expected) == 2
    for (_, maps), (_, other) in zip(found, expected, strict=True):
        assert_close(maps, other)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("norm", [by_module, by_functional, by_torch, by_native])
@pytest.mark.parametrize("tail", TAILS)
def test_a_backward_pass_of_the_user(tail: str, norm: Norm, n: int, kernels: str) -> None:
    """`propagate` with a rule for ReLU alone: the batch norm is not among the rules, and yet right."""

    def backward(model: nn.Module) -> Tensor:
        leaf = images(n).requires_grad_()
        with rectgrad.propagate({"relu": lambda op, R: R.clamp(min=0)}):
            model(leaf)[:, 1].sum().backward()
        return leaf.grad

    expected = backward(tokens(by_hand, tail))
    assert_close(expected, attribute(tokens(by_hand, tail), images(n), "deconv"))
    assert_close(backward(tokens(norm, tail)), expected)


def test_a_backward_pass_after_the_context() -> None:
    def backward(model: nn.Module) -> Tensor:
        leaf = images().requires_grad_()
        with rectgrad.propagate({"relu": lambda op, R: R * (op.output > 0)}):
            score = model(leaf)[:, 1].sum()
        return torch.autograd.grad(score, leaf)[0]

    assert_close(backward(tokens(by_module)), backward(tokens(by_hand)))


def test_several_batch_norms_in_a_row() -> None:
    """Each hands a strided gradient to the one before."""

    class Twice(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.how(self.conv(self.stem(x)), self.norm)).transpose(2, 3)
            h = self.how(self.how(h, self.norm), self.norm)
            return self.tail(self, h.flatten(2).transpose(1, 2))

    def model(norm: Norm) -> nn.Module:
        made, like = Twice(norm, "mean").double().eval(), tokens(norm)
        made.load_state_dict(like.state_dict())
        return made

    for method in METHODS:
        assert_close(
            attribute(model(by_module), images(), method), attribute(model(by_hand), images(), method)
        )
