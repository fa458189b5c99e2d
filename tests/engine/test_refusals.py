"""What cannot be explained is refused, in one sentence that says what is wrong and what to do.

First the parts of a model that a rule cannot reach (never a silent plain gradient), then wrong arguments,
then numbers that are not finite, then maps that are zero because a layer passed nothing.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rectgrad
from rectgrad import UnsupportedModelError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]

RECTIFYING = ["rectgrad", "rectgrad_prr", "rectgrad_mod", "guided_backprop", "deconv"]
FEW = {"smoothgrad": {"samples": 2}, "integrated_gradients": {"steps": 2}}


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def points(n: int = 2, d: int = 6) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two hidden layers: `first` is the part under test, the second a plain ReLU where `also_relu`."""

    def __init__(self, first: Callable, also_relu: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 60), nn.Linear(60, 60), nn.Linear(60, 3)
        self.first, self.also_relu = first, also_relu

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.first(self.a(x)))
        return self.c(F.relu(h) if self.also_relu else h)


def net(first: Callable, also_relu: bool = True) -> nn.Module:
    return seeded(lambda: Net(first, also_relu).eval())


def refused(model: Any, name: str, *words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        rectgrad.attribute(model, points(), name)
    sentence = str(caught.value)
    for word in words:
        assert re.search(word, sentence), f"{word!r} is missing in: {sentence}"


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


@pytest.mark.parametrize("name", rectgrad.METHODS)
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
}


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("name", RECTIFYING)
def test_a_model_without_a_known_activation(name: str, kind: str) -> None:
    activation, words = BY_HAND[kind]
    refused(net(activation, also_relu=False), name, "nothing to rectify", words, "'saliency'", "relu")


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


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n != "random"])
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (3, ValueError, "target 3 is out of range.*3 outputs, 0 to 2"),
        (-1, ValueError, "target -1 is out of range"),
        ([0, 7], ValueError, "target 7 is out of range"),
        ([0], ValueError, r"shape \(1,\).*each of 2 samples"),
        ([0, 1, 2], ValueError, r"shape \(3,\).*each of 2 samples"),
        ([[0], [1]], ValueError, r"shape \(2, 1\).*each of 2 samples"),
        (1.0, TypeError, "target must be .*an int.*got 1.0"),
        (torch.tensor([0.0, 1.0]), TypeError, "integer tensor"),
        (True, TypeError, "got True"),
        ("cat", TypeError, "got 'cat'"),
        ([], (TypeError, ValueError), "one class for each"),
    ],
)
def test_a_target_that_names_no_class(name: str, target: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        rectgrad.attribute(net(F.relu), points(), name, target, **FEW.get(name, {}))


@pytest.mark.parametrize("target", [3, [0, 7], "cat", rectgrad.contrast(0, 9)])
def test_a_bad_target_in_chunks_and_on_a_record(target: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"out of range|must be"):
        rectgrad.attribute(net(F.relu), points(), "saliency", target, batch_size=1)
    with pytest.raises((ValueError, TypeError), match=r"out of range|must be"):
        rectgrad.record(net(F.relu), points()).attribute("saliency", target)


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("rectgradd", ValueError, "unknown method 'rectgradd'; methods are rectgrad, .*random"),
        ("RectGrad", ValueError, "unknown method 'RectGrad'"),
        (None, TypeError, "name or an instance.*not None"),
        (rectgrad.RectGrad, TypeError, "instance"),
    ],
)
def test_an_unknown_method(method: Any, error: type, words: str) -> None:
    for call in (rectgrad.attribute, rectgrad.layer_attributions):
        with pytest.raises(error, match=words):
            call(net(F.relu), points(), method)
    with pytest.raises(error, match=words):
        rectgrad.record(net(F.relu), points()).attribute(method)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("rectgrad", {"Q": 90}, TypeError, "'rectgrad' has no option 'Q'; its options are q, tau"),
        ("saliency", {"q": 90}, TypeError, "'saliency' has no option 'q'"),
        ("rectgrad", {"q": 101}, ValueError, "q must be from 0 to 100, not 101"),
        ("rectgrad", {"q": -1}, ValueError, "q must be from 0 to 100"),
        ("rectgrad", {"q": NAN}, ValueError, "q must be from 0 to 100, not nan"),
        ("rectgrad", {"q": "a"}, TypeError, "q must be a number, not 'a'"),
        ("rectgrad", {"q": None}, TypeError, "q must be a number"),
        ("rectgrad", {"q": True}, TypeError, "q must be a number"),
        ("rectgrad", {"q": torch.tensor([90.0, 95.0])}, (TypeError, ValueError), "q must be a number"),
        ("rectgrad", {"q": np.array([90.0, 95.0])}, (TypeError, ValueError), "q must be a number"),
        ("rectgrad", {"tau": NAN}, ValueError, "tau must be a number"),
        ("rectgrad", {"tau": "0"}, TypeError, "tau must be a number"),
        ("rectgrad", {"rule": "PR9"}, ValueError, "rule must be one of 'PR1'.*'mod', not 'PR9'"),
        ("rectgrad", {"interpolation": "cubic"}, ValueError, "one of 'nearest', 'linear'"),
        ("rectgrad", {"prr": "yes"}, TypeError, "prr must be True or False, not 'yes'"),
        ("smoothgrad", {"samples": 0}, ValueError, "samples must be at least 1, not 0"),
        ("smoothgrad", {"samples": 2.5}, TypeError, "samples must be an integer"),
        ("smoothgrad", {"noise": -0.1}, ValueError, "noise must be at least 0"),
        ("smoothgrad", {"noise": NAN}, ValueError, "noise must be at least 0"),
        ("smoothgrad", {"noise": INF, "samples": 2}, ValueError, "noise"),
        ("smoothgrad", {"over": "nothing"}, ValueError, "unknown method 'nothing'"),
        ("smoothgrad", {"over": None}, TypeError, "over must be a method or its name"),
        ("integrated_gradients", {"steps": 0}, ValueError, "steps must be at least"),
        ("integrated_gradients", {"steps": 1}, ValueError, "steps must be at least 2"),
        ("integrated_gradients", {"steps": "many"}, TypeError, "steps must be an integer"),
        ("integrated_gradients", {"quadrature": "left"}, ValueError, "one of 'trapezoid', 'right'"),
        ("integrated_gradients", {"baseline": "black"}, TypeError, "baseline must be a number or a tensor"),
        ("integrated_gradients", {"baseline": NAN, "steps": 2}, ValueError, "baseline"),
        ("deeplift", {"baseline": NAN}, ValueError, "baseline"),
        ("deeplift", {"baseline": torch.tensor([INF] * 6)}, ValueError, "baseline"),
        ("deeplift", {"baseline": torch.zeros(5)}, ValueError, r"shape \(5,\).*broadcast.*\(2, 6\)"),
        ("deeplift", {"baseline": torch.zeros(3, 2, 6)}, ValueError, "broadcast"),
        ("deeplift", {"baseline": (0.0, 0.0)}, ValueError, "2 baselines.*1 input"),
        ("integrated_gradients", {"baseline": torch.zeros(5), "steps": 2}, ValueError, "broadcast"),
        ("epsilon_lrp", {"epsilon": -1}, ValueError, "epsilon must be at least 0"),
        ("epsilon_lrp", {"epsilon": NAN}, ValueError, "epsilon must be at least 0"),
        ("epsilon_lrp", {"epsilon": INF}, ValueError, "epsilon"),
        ("random", {"seed": "a"}, TypeError, "seed must be an integer"),
    ],
)
def test_an_option_out_of_range(name: str, options: dict, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        rectgrad.attribute(net(F.relu), points(), name, **options)


def test_options_go_with_a_name() -> None:
    with pytest.raises(TypeError, match=r"options \(q\).*dataclasses.replace"):
        rectgrad.attribute(net(F.relu), points(), rectgrad.RectGrad(), q=90)


@pytest.mark.parametrize("batch_size", [0, -1, "a", 1.5, True])
def test_a_batch_size_that_is_no_count(batch_size: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="batch_size must be an integer of at least 1"):
        rectgrad.attribute(net(F.relu), points(), batch_size=batch_size)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (torch.ones(2, 6, dtype=torch.long), TypeError, "torch.int64.*floating"),
        (torch.ones(2, 6, dtype=torch.uint8), TypeError, r"torch.uint8.*\.float\(\) / 255"),
        (torch.ones(2, 6, dtype=torch.complex64), TypeError, "complex64.*(real|floating)"),
        (np.zeros((2, 6), dtype=np.float32), TypeError, "tensor.*ndarray"),
        ([points()], TypeError, "tuple.*list"),
        (None, TypeError, "NoneType"),
        (torch.tensor(1.0), ValueError, "first dimension of samples"),
        ((), ValueError, "empty tuple"),
        ((points(2), points(3)), ValueError, "number of samples: 2 and 3"),
        ((points(), torch.ones(2, dtype=torch.long)), TypeError, "torch.int64"),
    ],
)
def test_inputs_that_have_no_map(inputs: Any, error: type, words: str) -> None:
    for call in (rectgrad.attribute, rectgrad.record, rectgrad.layer_attributions):
        with pytest.raises(error, match=words):
            call(net(F.relu), inputs)


@pytest.mark.parametrize("model", [3, "resnet50", None])
def test_a_model_that_cannot_be_called(model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a module or a function"):
        rectgrad.attribute(model, points())


def test_forward_args_that_are_one_tensor() -> None:
    """A tensor is a sequence of its rows: unpacking it would call the model with arguments nobody gave."""
    with pytest.raises(TypeError, match="forward_args"):
        rectgrad.attribute(lambda x, *rows: x * 2, points(), "saliency", forward_args=torch.zeros(2, 3))


@pytest.mark.parametrize("call", [rectgrad.attribute, rectgrad.record, rectgrad.layer_attributions])
def test_training_mode_is_said(call: Callable) -> None:
    model = net(F.relu)
    model.b = nn.Sequential(model.b, nn.Dropout(0.1))
    model.train()
    with pytest.warns(UserWarning, match=r"training mode.*model.eval\(\)") as caught:
        call(model, points())
    assert caught[0].filename == __file__, "the warning should point at the caller's line"
    model.eval()
    model.b.train()
    with pytest.warns(UserWarning, match="training mode"):
        call(model, points())


def test_layers_of_a_method_without_a_backward_pass() -> None:
    with pytest.raises(ValueError, match="SmoothGrad has no single backward pass"):
        rectgrad.layer_attributions(net(F.relu), points(), "smoothgrad")


# --- outputs -----------------------------------------------------------------------------------------------


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(F.relu)(x)


WEIGHT = torch.ones(6, 3, requires_grad=True)

CUT_OFF: dict[str, Callable] = {
    "detach": lambda x: net(F.relu)(x).detach(),
    "detached input": lambda x: net(F.relu)(x.detach()),
    "no_grad": without_gradient,
    "numpy": lambda x: torch.from_numpy(net(F.relu)(x).detach().numpy()),
    "argmax": lambda x: F.one_hot(net(F.relu)(x).argmax(1), 3).float(),
    "a weight that requires grad": lambda x: F.relu(x.detach() @ WEIGHT),
}


@pytest.mark.parametrize("model", CUT_OFF)
@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n != "random"])
def test_an_output_that_does_not_depend_on_the_input(name: str, model: str) -> None:
    with pytest.raises(ValueError, match="does not depend on the input"):
        rectgrad.attribute(CUT_OFF[model], points(), name, 1, **FEW.get(name, {}))


@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n != "random"])
@pytest.mark.parametrize(
    ("wrap", "error", "words"),
    [
        (lambda y: y[:, :, None, None].expand(-1, -1, 4, 5), ValueError, r"\(2, 3, 4, 5\).*callable target"),
        (lambda y: (y, y), TypeError, "a tuple of 2.*callable target"),
        (lambda y: {"out": y}, TypeError, "a dict with 'out'.*callable target"),
        (lambda y: y.sum(), ValueError, r"shape \(\) for 2 samples.*callable target"),
        (lambda y: y[:1], ValueError, r"shape \(1, 3\) for 2 samples"),
        (lambda y: y[:, :0], ValueError, r"\(2, 0\)"),
        (lambda y: None, TypeError, "NoneType.*callable target"),
    ],
)
def test_an_output_that_needs_a_callable_target(name: str, wrap: Callable, error: type, words: str) -> None:
    model = net(F.relu)
    with pytest.raises(error, match=words):
        rectgrad.attribute(lambda x: wrap(model(x)), points(), name, **FEW.get(name, {}))


@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n != "random"])
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (lambda out: out[:, :1], ValueError, r"callable target returned shape \(2, 1\); it must be \(2,\)"),
        (lambda out: out.sum(), ValueError, r"returned shape \(\); it must be \(2,\)"),
        (lambda out: 1.0, TypeError, r"a float.*tensor \(2,\)"),
        (lambda out: None, TypeError, "NoneType"),
        (lambda out: list(out[:, 0]), TypeError, "a list of 2"),
        (lambda out: out[:, 0].detach(), ValueError, "does not depend on the input"),
        (lambda out: out.argmax(1), ValueError, "does not depend on the input"),
    ],
)
def test_a_callable_target_that_gives_no_scores(name: str, target: Callable, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        rectgrad.attribute(net(F.relu), points(), name, target, **FEW.get(name, {}))


# --- not a number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", rectgrad.METHODS)
def test_an_input_that_is_not_finite(name: str, value: float) -> None:
    x = points()
    x[1, 2] = value
    words = "NaN" if value != value else "infinity"
    with pytest.raises(ValueError, match=f"input.*contains (an )?{words}"):
        rectgrad.attribute(net(F.relu), x, name, 0, **FEW.get(name, {}))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("layer", ["a", "b", "c"])
@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n != "random"])
def test_a_weight_that_is_not_finite_names_the_first_layer(name: str, layer: str, value: float) -> None:
    model = net(F.relu)
    with torch.no_grad():
        getattr(model, layer).bias[0] = value
    with pytest.raises(ValueError, match=f"output of layer '{layer}'.*contains"):
        rectgrad.attribute(model, points(), name, 0, **FEW.get(name, {}))


class Root(nn.Module):
    """sqrt behind a ReLU: where the ReLU is off, an infinite gradient arrives that its mask would hide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.c = nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.gate(self.a(x)).sqrt())


# DeepLIFT's multiplier of a square root is finite everywhere.
@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n not in ("random", "deeplift")])
def test_a_gradient_that_is_not_finite_behind_a_mask(name: str) -> None:
    with pytest.raises(ValueError, match=r"gradient arriving at layer 'gate'.*contains an infinity"):
        rectgrad.attribute(seeded(lambda: Root().eval()), points(), name, 0, **FEW.get(name, {}))


@pytest.mark.parametrize("name", [n for n in rectgrad.METHODS if n not in ("random", "smoothgrad")])
def test_large_finite_numbers_are_no_error(name: str) -> None:
    """Their sum overflows, they do not."""
    model, x = nn.Sequential(nn.ReLU(), nn.Flatten()).eval(), 3e38 * torch.ones(1, 6)
    options = {"tau": 0.0} if "rectgrad" in name else FEW.get(name, {})
    maps = rectgrad.attribute(model, x, name, 0, **options)
    assert bool(maps.isfinite().all())
    assert int(maps.count_nonzero()) == 1


# --- maps that are zero because a layer passed nothing -----------------------------------------------------


def narrow(d: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, d), nn.ReLU(), nn.Linear(d, 1)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(d)) + 0.1)
    return model


@pytest.mark.parametrize("d", [2, 3, 7, 13, 24, 25])
def test_a_layer_too_small_for_q(d: int) -> None:
    """At q = 98 tau is the largest score of a layer of up to 25 units. The q that is named passes one unit,
    the next hundredth none."""
    model, x = narrow(d), points(1).abs()
    with pytest.warns(UserWarning, match="is zero") as caught:
        maps = rectgrad.attribute(model, x, "rectgrad", 0)
    assert not maps.any()
    assert caught[0].filename == __file__
    found = re.search(r"layer '1' with (\d+) units.*q=98.*largest q .* is (\d+\.\d+)", str(caught[0].message))
    assert found, str(caught[0].message)
    assert int(found[1]) == d
    q = float(found[2])
    assert bool(rectgrad.attribute(model, x, "rectgrad", 0, q=q).any())
    with pytest.warns(UserWarning, match="is zero"):
        assert not rectgrad.attribute(model, x, "rectgrad", 0, q=round(q + 0.01, 2)).any()


def test_a_layer_just_large_enough_for_q_is_silent() -> None:
    assert bool(rectgrad.attribute(narrow(27), points(1).abs(), "rectgrad", 0).any())


def test_a_layer_with_tied_scores() -> None:
    """Three units share the largest score: the q that is named passes all three."""
    model = narrow(10)
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[0].bias.copy_(torch.tensor([3.0, 3, 3, 1, 1, 1, 1, 1, 1, 1]))
        model[2].weight.fill_(1.0)
    x = points(1).abs()
    with pytest.warns(UserWarning, match="with 10 units") as caught:
        rectgrad.attribute(model, x, "rectgrad", 0)
    q = float(re.search(r"largest q .* is (\d+\.\d+)", str(caught[0].message))[1])
    assert bool(rectgrad.attribute(model, x, "rectgrad", 0, q=q).any())
    with pytest.warns(UserWarning, match="is zero"):
        rectgrad.attribute(model, x, "rectgrad", 0, q=round(q + 0.01, 2))


def test_the_advice_holds_for_linear_interpolation() -> None:
    """Two units share the largest score, so a linear percentile reaches it before q = 100."""
    model = narrow(11)
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[0].bias.copy_(torch.tensor([3.0, 3, *range(9)]) / 3)
        model[0].bias[:2] = 9.0
        model[2].weight.fill_(1.0)
    x, linear = points(1).abs(), {"interpolation": "linear"}
    with pytest.warns(UserWarning, match="with 11 units") as caught:
        rectgrad.attribute(model, x, "rectgrad", 0, q=98, **linear)
    q = float(re.search(r"largest q .* is (\d+\.\d+)", str(caught[0].message))[1])
    assert bool(rectgrad.attribute(model, x, "rectgrad", 0, q=q, **linear).any())
    with pytest.warns(UserWarning, match="is zero"):
        rectgrad.attribute(model, x, "rectgrad", 0, q=round(q + 0.01, 2), **linear)


def said(model: nn.Module, x: Tensor) -> str:
    """What is warned of when the map turns out zero, if anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not rectgrad.attribute(model, x, "rectgrad", 0).any()
    return " ".join(str(warning.message) for warning in caught)


def test_a_layer_that_did_pass_something_is_not_blamed() -> None:
    """The gradient that passed the ReLU ends in weights that are zero: no advice about q helps."""
    model = narrow(100)
    with torch.no_grad():
        model[0].weight.zero_()
    assert "passed nothing" not in said(model, points(1))


def test_a_layer_whose_gradient_the_padding_trick_took_is_not_blamed() -> None:
    """The one unit that passes lies on the border: what stopped it is the padding trick, not the layer."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1)
    )
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[3].weight.fill_(0.01)
        model[3].weight[0, 0] = 100.0
    assert "passed nothing" not in said(model.eval(), torch.ones(1, 1, 6, 6))


def test_one_silent_sample_among_others_is_named() -> None:
    model, x = narrow(20), points(3).abs()
    with torch.no_grad():
        model[0].weight.zero_()[0, 0] = model[0].weight[1, 1] = 1.0
        model[0].bias.zero_()
    x[:, 0], x[:, 1] = torch.tensor([2.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0])
    with torch.no_grad():
        model[2].weight.fill_(1.0)
    with pytest.warns(UserWarning, match="map of sample 1 is zero.*20 units"):
        rectgrad.attribute(model, x, "rectgrad", 0, q=95)
