"""Parts of a model that a rule cannot reach are refused, in one sentence that says what is wrong and what to
do: never a silent plain gradient."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rectgrad
from every_method import EVERY
from rectgrad import UnsupportedModelError
from refusals import FEW, RECTIFYING, net, points, refused, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]


# --- parts no rule can reach -------------------------------------------------------------------------------


def scripted(what: Any) -> Any:
    return torch.jit.script(what)


def script_relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def script_clamp(x: Tensor) -> Tensor:
    return torch.clamp(x, min=0.0)


def script_relu6(x: Tensor) -> Tensor:
    return torch.nn.functional.relu6(x)


def script_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


@pytest.mark.parametrize("name", [*RECTIFYING, "epsilon_lrp", "deeplift"])
def test_a_scripted_submodule_is_named(name: str) -> None:
    part = seeded(lambda: scripted(nn.Sequential(nn.Linear(60, 60), nn.ReLU())))
    refused(net(part), name, "'first'", "scripted", "original Python")


@pytest.mark.parametrize("name", RECTIFYING)
def test_a_traced_submodule_is_named(name: str) -> None:
    part = torch.jit.trace(nn.Sequential(nn.Linear(60, 60), nn.ReLU()), torch.zeros(2, 60))
    refused(net(part), name, "'first'", "scripted", "original Python")


@pytest.mark.parametrize("name", RECTIFYING)
def test_a_model_that_is_scripted_as_a_whole(name: str) -> None:
    refused(scripted(nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 3))), name, "scripted")


@pytest.mark.parametrize("outer", ["smoothgrad", "integrated_gradients"])
def test_an_average_over_a_refused_method_names_the_submodule_too(outer: str) -> None:
    part = seeded(lambda: scripted(nn.Sequential(nn.Linear(60, 60), nn.ReLU())))
    with pytest.raises(UnsupportedModelError, match="'first' is a scripted module"):
        rectgrad.attribute(net(part), points(), outer, over="rectgrad", **FEW[outer])


@pytest.mark.parametrize("calls_before", [0, 3])  # the first calls are interpreted, later ones compiled
@pytest.mark.parametrize("function", [script_relu, script_clamp, script_relu6, script_gelu])
@pytest.mark.parametrize("name", RECTIFYING)
def test_a_scripted_function_in_the_forward_pass(name: str, function: Callable, calls_before: int) -> None:
    fast = scripted(function)
    for _ in range(calls_before):
        fast(torch.randn(2, 60, requires_grad=True)).sum().backward()
    refused(net(lambda h: fast(h)), name, "script", "original Python")


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Hardswish])
def test_a_scripted_module_that_is_no_registered_submodule(activation: type) -> None:
    part = scripted(nn.Sequential(nn.Linear(60, 60), activation()))
    refused(net(lambda h: part(h)), "rectgrad", "script")


@pytest.mark.parametrize("name", ["saliency", "rectgrad"])
def test_a_part_that_is_compiled_without_graph_breaks(name: str) -> None:
    """Under a mode that sees every call, torch.compile fails, or runs the original code in older versions."""
    fast = torch.compile(lambda h: F.relu(h), backend="eager", fullgraph=True)
    said = "compiled by torch.compile; use the original Python code"
    found = expected = rectgrad.attribute(net(F.relu), points(), name)
    try:
        found = rectgrad.attribute(net(lambda h: fast(h)), points(), name)
    except UnsupportedModelError as error:
        said = str(error)
    assert torch.equal(found, expected)
    assert "compiled by torch.compile" in said
    assert "original Python" in said


class Block(nn.Sequential):
    """Runs under reentrant checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize("name", [*RECTIFYING, "epsilon_lrp", "deeplift"])
@pytest.mark.parametrize("with_activation", [True, False])
def test_reentrant_checkpointing(name: str, with_activation: bool) -> None:
    part = seeded(lambda: Block(nn.Linear(60, 60), *[nn.ReLU()] * with_activation))
    refused(net(part), name, "reentrant checkpointing", "use_reentrant=False")


def test_reentrant_checkpointing_and_a_plain_gradient() -> None:
    """No rule is lost, but torch cannot differentiate it this way: the words are what matters."""
    part = seeded(lambda: Block(nn.Linear(60, 60), nn.ReLU()))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        rectgrad.attribute(net(part), points(), "saliency")


@pytest.mark.parametrize("name", EVERY)
def test_other_checkpointing_gives_exactly_the_same_map(name: str) -> None:
    class Block(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.on = on
            self.body = nn.Sequential(
                nn.Conv2d(4, 6, 3, padding=1),
                nn.BatchNorm2d(6),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(6, 4, 3),
                nn.SiLU(),
            )

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x)

    def model(on: bool) -> nn.Module:
        return seeded(
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), Block(on), nn.Flatten(), nn.Linear(64, 3)
            ).eval()
        )

    x = torch.randn(2, 3, 14, 14, generator=torch.Generator().manual_seed(2))
    expected = rectgrad.attribute(model(False), x, name, 1, **FEW.get(name, {}))
    assert torch.equal(rectgrad.attribute(model(True), x, name, 1, **FEW.get(name, {})), expected)
    assert bool((expected != 0).any())
    if name != "random":
        assert torch.equal(rectgrad.record(model(True), x).attribute(name, 1, **FEW.get(name, {})), expected)


# --- custom autograd functions -----------------------------------------------------------------------------


class Hiding(torch.autograd.Function):
    """Subclasses say how the activation is computed; all go back as a ReLU does."""

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return R * (x > 0)


class WithRelu(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x)


class WithClamp(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)


class WithMask(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * (x > 0)


class WithWhere(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0)


class WithIndexing(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.clone()
        y[y < 0] = 0
        return y


class WithMinimum(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return -torch.minimum(-x, torch.zeros_like(x))


class WithSetupContext(Hiding):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class MemorySavingSwish(torch.autograd.Function):
    """The well-known one of EfficientNet ports."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return R * (s * (1 + x * (1 - s)))


class GeluByErf(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))


class SoftplusByExp(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.log1p(torch.exp(x))


class WithNumpy(Hiding):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.maximum(x.detach().numpy(), 0))


HIDING = [WithRelu, WithClamp, WithMask, WithWhere, WithIndexing, WithMinimum, WithSetupContext,
          MemorySavingSwish, GeluByErf, SoftplusByExp, WithNumpy]  # fmt: skip


@pytest.mark.parametrize("function", HIDING)
@pytest.mark.parametrize("name", RECTIFYING)
def test_a_custom_function_that_hides_an_activation(name: str, function: Any) -> None:
    refused(net(function.apply), name, "custom autograd.Function", function.__name__)


class Scaled(torch.autograd.Function):
    """The other way round on the way back; linear, so that nothing is hidden."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        return -R


def test_a_custom_function_that_hides_nothing_is_no_reason_to_refuse() -> None:
    x = points()
    with_function = rectgrad.attribute(net(lambda h: Scaled.apply(F.relu(h))), x, "saliency", 1)
    assert torch.equal(with_function, -rectgrad.attribute(net(F.relu), x, "saliency", 1))
    maps = rectgrad.attribute(net(lambda h: Scaled.apply(F.relu(h))), x, "deconv", 1)
    assert not torch.equal(maps, with_function)


def test_an_activation_beside_the_graph_is_no_reason_to_refuse() -> None:
    """A ReLU under no_grad that the custom function has nothing to do with."""

    def first(h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 1 + 0 * F.relu(h).mean()
        return F.relu(Scaled.apply(h)) * scale

    x = points()
    expected = rectgrad.attribute(net(lambda h: F.relu(Scaled.apply(h))), x, "deconv", 1)
    torch.testing.assert_close(rectgrad.attribute(net(first), x, "deconv", 1), expected)


# --- quantised and fused parts, and models with nothing to rectify -----------------------------------------


def quantised() -> nn.Module:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantisation engine in this build of torch")
    return torch.ao.quantization.quantize_dynamic(net(nn.ReLU()), {nn.Linear})


@pytest.mark.parametrize("name", RECTIFYING)
def test_a_quantised_module_is_named(name: str) -> None:
    refused(quantised(), name, "'a'", "quantised", "before quantisation")


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("name", ["saliency", "gradient_x_input", "smoothgrad", "integrated_gradients"])
def test_a_quantised_model_has_no_plain_gradient_either(name: str) -> None:
    """torch lets the gradient end there without an error: the map would be all zeros."""
    with pytest.raises((UnsupportedModelError, ValueError), match=r"quantised|does not depend"):
        rectgrad.attribute(quantised().eval(), points(), name, **FEW.get(name, {}))


def nested(h: Tensor) -> Tensor:
    """Multiplies rows by 2, as a nested tensor."""
    return torch.nested.to_padded_tensor(2 * torch.nested.as_nested_tensor(list(h.unbind())), 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", RECTIFYING)
def test_a_nested_tensor(name: str) -> None:
    refused(net(nested), name, "a nested tensor")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_a_plain_gradient() -> None:
    maps = (rectgrad.attribute(net(step), points(), "saliency", 1) for step in (nested, lambda h: 2 * h))
    torch.testing.assert_close(*maps)


def test_a_fused_recurrent_relu() -> None:
    rnn = seeded(lambda: nn.RNN(60, 60, nonlinearity="relu", batch_first=True))
    refused(net(lambda h: rnn(h[:, None])[0][:, 0]), "rectgrad", "ReLU")


BY_HAND: dict[str, tuple[Callable, str]] = {
    "x * (x > 0)": (lambda h: h * (h > 0), "by hand"),
    "where": (lambda h: torch.where(h > 0, h, 0), "by hand.*where"),
    "x * sigmoid(x)": (lambda h: h * torch.sigmoid(h), "by hand.*sigmoid"),
    "maximum": (lambda h: torch.maximum(h, torch.zeros_like(h)), "by hand.*maximum"),
    "(x + |x|) / 2": (lambda h: (h + h.abs()) / 2, "by hand.*abs"),
    "tanh only": (torch.tanh, "tanh"),
    "none": (lambda h: h, "no activation"),
    "unknown": (lambda h: torch.hypot(h, h.sinc()).cumsum(1), r"unknown call is one \(sinc, hypot\)"),
    "many unknown": (lambda h: h.sinc().deg2rad().i0().lgamma(), r"one \(sinc, deg2rad, i0\)"),
    "by hand and unknown": (lambda h: h.sinc() * (h > 0), r"by hand \(.*\) or an unknown .* \(sinc\)"),
}


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("name", RECTIFYING)
def test_a_model_without_a_known_activation(name: str, kind: str) -> None:
    activation, words = BY_HAND[kind]
    refused(net(activation, also_relu=False), name, "nothing to rectify", words, "'saliency'", "relu")


@pytest.mark.parametrize("name", ["rectgrad", "rectgrad_prr", "rectgrad_mod"])
def test_padding_and_pooling_are_no_activations(name: str) -> None:
    """These have rules too, and yet nothing is rectified."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).eval()
    with pytest.raises(UnsupportedModelError, match="nothing to rectify"):
        rectgrad.attribute(model, torch.randn(2, 1, 6, 6), name)


@pytest.mark.parametrize("name", RECTIFYING)
def test_an_activation_that_the_score_does_not_pass_does_not_count(name: str) -> None:
    class Aside(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, :3] * 2, F.relu(x)

    with pytest.raises(UnsupportedModelError, match="nothing to rectify between the score and the input"):
        rectgrad.attribute(Aside().eval(), points(), name, target=lambda out: out[0].sum(1))


def test_by_hand_beside_a_relu_is_listed_as_plain() -> None:
    kept = rectgrad.record(net(lambda h: h * (h > 0)), points())
    kept.attribute("rectgrad")
    rules = {line.split()[0]: line.split()[-1] for line in str(kept.trace).splitlines()[1:]}
    assert rules["mul"] == "plain"
    assert rules["relu"] == "rectified"
