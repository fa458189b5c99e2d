"""The engine against the slow reference on every kind of network, and the reference against itself.

The first half compares `rectgrad.attribute` with `reference_attribute` in float64. The second half asks of
the reference what must hold for any correct version: it is what makes the first half worth something.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import rectgrad
import reference
from networks import NETWORKS
from reference import reference_attribute

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

SEED = 0  # no score near tau and no empty map
RELU_NETWORKS = ["plain_cnn", "strided", "residual", "inception", "two_inputs", "folded", "conv1d", "conv3d",
                 "functional"]  # fmt: skip


def build(name: str):
    return NETWORKS[name](SEED)


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def assert_same(maps, expected, tolerance: float = 1e-8) -> None:
    for given, right in zip(as_tuple(maps), as_tuple(expected), strict=True):
        assert given.shape == right.shape
        error = (given - right).abs().max() / right.abs().max()
        assert error < tolerance, f"differs by {error:.1e} of the largest value"


def noise_like(inputs):
    """A baseline without symmetries, so that no two units tie on it."""
    generator = torch.Generator().manual_seed(5)
    return 0.3 * torch.randn(as_tuple(inputs)[0].shape, generator=generator, dtype=torch.float64)


# --- the engine against the reference ----------------------------------------------------------------------

PLAIN = {"padding_trick": False, "positive_only": False}
CASES = {
    "saliency": ("saliency", {}),
    "gradient_x_input": ("gradient_x_input", {}),
    "guided": ("guided_backprop", {}),
    "guided_x_input": ("guided_backprop", {"multiply_by_input": True}),
    "deconv": ("deconv", {}),
    "deconv_x_input": ("deconv", {"multiply_by_input": True}),
    "rectgrad": ("rectgrad", {"q": 60}),
    "rectgrad_signed": ("rectgrad", {"q": 75, "positive_only": False}),
    "rectgrad_no_padding_trick": ("rectgrad", {"q": 70, **PLAIN}),
    "rectgrad_raw": ("rectgrad", {"q": 50, "multiply_by_input": False}),
    "rectgrad_linear": ("rectgrad", {"q": 61.7, "interpolation": "linear", "positive_only": False}),
    "rectgrad_tau": ("rectgrad", {"tau": 1e-4, "positive_only": False}),
    "rectgrad_negative_tau": ("rectgrad", {"tau": -1e-3, "positive_only": False}),
    "rectgrad_PR2": ("rectgrad", {"q": 60, "rule": "PR2", "positive_only": False}),
    "rectgrad_PR3": ("rectgrad", {"q": 60, "rule": "PR3", "positive_only": False}),
    "rectgrad_PR4": ("rectgrad", {"q": 60, "rule": "PR4", "positive_only": False}),
    "rectgrad_mod": ("rectgrad_mod", {"q": 60, "positive_only": False}),
    "rectgrad_prr": ("rectgrad_prr", {"q": 60, "positive_only": False}),
    "epsilon_lrp": ("epsilon_lrp", {}),
    "epsilon_lrp_large": ("epsilon_lrp", {"epsilon": 0.1}),
    "lrp": ("lrp", {}),
    "lrp_alpha_beta": ("lrp", {"composite": "epsilon_alpha2_beta1_flat", "epsilon": 0.01}),
    "lrp_box": ("lrp", {"composite": "epsilon_gamma_box", "low": -5.0, "high": 4.0}),
    "lrp_zplus": ("lrp", {"composite": "zplus", "epsilon": 0.01}),
    "lrp_gamma": ("lrp", {"composite": "gamma", "gamma": 0.5}),
    "lrp_deep_taylor": ("lrp", {"composite": "deep_taylor"}),
    "attn_lrp": ("attn_lrp", {"epsilon": 1e-12}),  # on which side of the scale the sum is stabilised
    "excitation": ("excitation_backprop", {}),
    "excitation_contrastive": ("excitation_backprop", {"contrastive": True}),
    "deeplift": ("deeplift", {}),
    "deeplift_noise": ("deeplift", {"baseline": noise_like}),
    "deeplift_shap": ("deeplift_shap", {"baselines": lambda x: torch.stack([0.3 * x[0], -x[1]])}),
    "occlusion": ("occlusion", {"window": 3, "stride": 2}),
    "occlusion_noise": ("occlusion", {"window": 2, "baseline": noise_like}),
    "integrated": ("integrated_gradients", {"steps": 4}),
    "integrated_right": ("integrated_gradients", {"steps": 3, "quadrature": "right", "baseline": 0.2}),
    "integrated_guided": ("integrated_gradients", {"steps": 3, "over": "guided_backprop"}),
    "integrated_rectgrad": (
        "integrated_gradients",
        {"steps": 3, "over": "rectgrad", "inner": {"q": 60}, "quadrature": "right"},
    ),
}
UNDEFINED = {  # no meaning is fixed for these
    ("division", "epsilon_lrp"): "a quotient of two data tensors",
    ("division", "epsilon_lrp_large"): "a quotient of two data tensors",
    ("two_inputs", "deeplift_noise"): "one baseline tensor for two inputs",
    ("two_inputs", "deeplift_shap"): "one tensor of baselines for two inputs",
    ("two_inputs", "occlusion_noise"): "one baseline tensor for two inputs",
}
PAIRS = [(n, c) for n in NETWORKS for c in CASES if (n, c) not in UNDEFINED]


def for_the_engine(method: str, options: dict) -> dict:
    """The same options as `rectgrad.attribute` takes them."""
    options = dict(options)
    if "inner" in options:
        options["over"] = dataclasses.replace(rectgrad.METHODS[options["over"]], **options.pop("inner"))
    return options


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=[f"{n}-{c}" for n, c in PAIRS])
def test_engine_agrees_with_reference(name: str, case: str):
    model, inputs = build(name)
    method, options = CASES[case]
    options = {k: v(inputs) if callable(v) else v for k, v in options.items()}
    maps = rectgrad.attribute(model, inputs, method, **for_the_engine(method, options))
    if not method.startswith("rectgrad"):
        assert_same(maps, reference_attribute(model, inputs, method, **options))
        return
    # Rounding cannot move a unit over tau, and the comparison compares something in every sample.
    margins: list[float] = []
    expected = reference_attribute(model, inputs, method, margins=margins, **options)
    assert_same(maps, expected)
    assert min(margins) > 1e-9
    assert all(sum(m[n].abs().sum() for m in as_tuple(expected)) > 0 for n in range(len(as_tuple(maps)[0])))


TARGETS = {
    "class": 2,
    "list": [1, 0, 3],
    "tensor": torch.tensor([3, 3, 0]),
    "difference": lambda outputs: outputs[:, 1] - 0.5 * outputs[:, 0],
    "square": lambda outputs: outputs[:, 1] - 0.5 * outputs[:, 0] ** 2,
}
TARGETED = ["saliency", "rectgrad", "epsilon_lrp", "lrp", "deeplift", "integrated_gradients"]


@pytest.mark.parametrize("method", TARGETED)
@pytest.mark.parametrize("kind", TARGETS)
def test_targets_agree_with_reference(method: str, kind: str):
    target = TARGETS[kind]
    model, inputs = build("plain_cnn")
    options = {"rectgrad": {"q": 60}, "integrated_gradients": {"steps": 3}}.get(method, {})
    maps = rectgrad.attribute(model, inputs, method, target, **options)
    assert_same(maps, reference_attribute(model, inputs, method, target, **options))


@pytest.mark.parametrize("name", NETWORKS)
def test_chunks_agree_with_reference(name: str):
    model, inputs = build(name)
    maps = rectgrad.attribute(model, inputs, "rectgrad", batch_size=2, q=60)
    assert_same(maps, reference_attribute(model, inputs, "rectgrad", q=60))


# --- the reference against what is known -------------------------------------------------------------------


def gradient(model: Callable[..., Tensor], inputs) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in as_tuple(inputs)]
    return torch.autograd.grad(largest(model(*leaves)).sum(), leaves)


def largest(outputs: Tensor) -> Tensor:
    return outputs if outputs.ndim == 1 else outputs.amax(1)


def without_tricks(model, inputs, **options):
    options = {**PLAIN, "multiply_by_input": False, **options}
    return reference_attribute(model, inputs, "rectgrad", **options)


def test_networks_repeat_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    for make in NETWORKS.values():
        (model, inputs), (again, inputs_again) = make(3), make(3)
        assert torch.equal(model(*as_tuple(inputs)), again(*as_tuple(inputs_again)))
        assert not torch.equal(as_tuple(inputs)[0], as_tuple(make(4)[1])[0])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", NETWORKS)
def test_saliency_is_the_gradient(name: str):
    model, inputs = build(name)
    assert_same(reference_attribute(model, inputs, "saliency"), gradient(model, inputs), 1e-12)


@pytest.mark.parametrize("name", RELU_NETWORKS)
def test_positive_activations_pass_the_gradient(name: str):
    """On a ReLU network I(a > 0) * R is the derivative."""
    model, inputs = build(name)
    assert_same(without_tricks(model, inputs, rule="PR3", tau=0.0), gradient(model, inputs), 1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_positive_gradients_pass_as_in_deconv(name: str):
    model, inputs = build(name)
    maps = without_tricks(model, inputs, rule="PR4", tau=0.0)
    assert_same(maps, reference_attribute(model, inputs, "deconv"), 1e-12)


@pytest.mark.parametrize("name", RELU_NETWORKS)
def test_tau_zero_is_guided_backprop(name: str):
    """Claim 2 of the paper."""
    model, inputs = build(name)
    maps = without_tricks(model, inputs, tau=0.0)
    assert_same(maps, reference_attribute(model, inputs, "guided_backprop"), 1e-12)


@pytest.mark.parametrize("name", ["plain_cnn", "conv1d", "conv3d", "inception"])
def test_guided_backprop_is_a_clamped_gradient(name: str):
    model, inputs = build(name)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0].clamp(min=0),))
    expected = gradient(model, inputs)
    model, inputs = build(name)
    assert_same(reference_attribute(model, inputs, "guided_backprop"), expected, 1e-12)


@pytest.mark.parametrize("name", RELU_NETWORKS)
def test_epsilon_lrp_tends_to_gradient_times_input(name: str):
    model, inputs = build(name)
    maps = reference_attribute(model, inputs, "epsilon_lrp", epsilon=1e-13)
    assert_same(maps, reference_attribute(model, inputs, "gradient_x_input"), 1e-7)


class Frozen(fx.Interpreter):
    """A network made linear at its input: activations as factors, softmax and deviations as constants.

    Its gradient times its input is what Epsilon-LRP tends to as epsilon goes to 0, on any network.
    """

    def run_node(self, node: fx.Node):
        args, kwargs = self.fetch_args_kwargs_from_env(node)

        def call(*args):
            return getattr(self, node.op)(node.target, args, kwargs)

        kind = reference.family(node)
        if kind in reference.RECTIFIERS | reference.SQUASHING:
            z = args[0].detach()
            return args[0] * (call(z.clone(), *args[1:]) / torch.where(z == 0, 1.0, z))
        if kind == "softmax":
            return call(*args).detach()
        if kind in ("mul", "matmul") and all(getattr(a, "requires_grad", False) for a in args):
            return (call(args[0].detach(), args[1]) + call(args[0], args[1].detach())) / 2
        if kind == "layer_norm":
            x, variance = args[0], args[0].var(-1, unbiased=False, keepdim=True).detach()
            unit = (x - x.mean(-1, keepdim=True)) / (variance + kwargs["eps"]).sqrt()
            return unit * kwargs["weight"] + kwargs["bias"]
        return call(*args) if node.op.startswith("call") else super().run_node(node)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("shared", "division")])
def test_epsilon_lrp_tends_to_the_frozen_network(name: str):
    model, inputs = build(name)
    frozen = Frozen(reference.trace(model.requires_grad_(False)))
    expected = tuple(g * x for g, x in zip(gradient(frozen.run, inputs), as_tuple(inputs), strict=True))
    maps = reference_attribute(model, inputs, "epsilon_lrp", epsilon=1e-13)
    assert_same(maps, expected, 1e-6)


def folded_residual() -> tuple[nn.Module, Tensor]:
    """The residual network with every convolution and its normalisation merged into one convolution."""
    model, inputs = build("residual")
    for module in list(model.modules()):
        if isinstance(module, nn.Sequential) and [type(m) for m in module] == [nn.Conv2d, nn.BatchNorm2d]:
            module[0], module[1] = fuse_conv_bn_eval(module[0], module[1]), nn.Identity()
    return model, inputs


def test_folding_a_normalisation_changes_no_relevance():
    maps = reference_attribute(*folded_residual(), "epsilon_lrp", epsilon=0.1)
    assert_same(maps, reference_attribute(*build("residual"), "epsilon_lrp", epsilon=0.1), 1e-10)


@pytest.mark.parametrize("baseline", [0.1, noise_like])
@pytest.mark.parametrize("name", NETWORKS)
def test_deeplift_adds_up_to_the_difference(name: str, baseline):
    model, inputs = build(name)
    if callable(baseline):
        baseline = baseline(inputs) if isinstance(inputs, Tensor) else -0.2
    maps = as_tuple(reference_attribute(model, inputs, "deeplift", baseline=baseline))
    start = [torch.zeros_like(x) + baseline for x in as_tuple(inputs)]
    outputs, outputs0 = model(*as_tuple(inputs)), model(*start)
    if outputs.ndim == 2:
        top = outputs.argmax(1, keepdim=True)
        outputs, outputs0 = outputs.gather(1, top).squeeze(1), outputs0.gather(1, top).squeeze(1)
    total = sum(m.flatten(1).sum(1) for m in maps)
    torch.testing.assert_close(total, (outputs - outputs0).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("quadrature", ["trapezoid", "right"])
def test_integrated_gradients_of_a_linear_model(quadrature: str):
    model, inputs = nn.Linear(6, 3).double(), noise_like(torch.empty(2, 6))
    maps = reference_attribute(
        model, inputs, "integrated_gradients", 1, steps=3, baseline=0.5, quadrature=quadrature
    )
    assert_same(maps, model.weight[1].detach() * (inputs - 0.5), 1e-12)


def test_trapezoid_is_exact_on_a_quadratic():
    """The gradient is linear along the path, and the trapezoid integrates that exactly; right does not."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).sum(1)

    inputs = noise_like(torch.empty(2, 6))
    maps = reference_attribute(Square(), inputs, "integrated_gradients", steps=4, baseline=0.5)
    torch.testing.assert_close(maps.sum(1), (inputs**2 - 0.25).sum(1))
    right = reference_attribute(Square(), inputs, "integrated_gradients", steps=4, quadrature="right")
    torch.testing.assert_close(right, inputs**2 * (1 + 1 / 4))


# --- the rules by themselves -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "unit"), [("PR1", 2), ("PR2", 3), ("PR3", 1), ("PR4", 4)])
def test_four_units_of_the_paper(rule: str, unit: int):
    weights = torch.tensor([1.0, 10.0, -100.0, 1000.0], dtype=torch.float64)
    a = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    passed = reference.rectified(a, weights, q=74, rule=rule)
    assert passed.nonzero().flatten().tolist() == [unit - 1]
    assert passed[unit - 1] == weights[unit - 1]


@pytest.mark.parametrize(("rule", "unit"), [("PR1", 2), ("PR2", 3), ("PR3", 1), ("PR4", 4), ("mod", 2)])
def test_four_units_of_the_paper_in_the_engine(rule: str, unit: int):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 1, bias=False)).double().eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, 10.0, -100.0, 1000.0]]))
    inputs = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    options = {"q": 74, "rule": rule, "multiply_by_input": False, "positive_only": False}
    passed = rectgrad.attribute(model, inputs, "rectgrad", **options)
    assert passed.nonzero()[:, 1].tolist() == [unit - 1]


@pytest.mark.parametrize(
    ("name", "last", "others"),
    [("plain_cnn", 1, 2), ("residual", 1, 4), ("inception", 5, 1), ("shared", 1, 3), ("attention", 1, 0)],
)
def test_rectifiers_that_the_output_reaches_first(name: str, last: int, others: int):
    """In `inception` four of the last five reach the output through pooling and concatenation alone."""
    model, inputs = build(name)
    record = reference.run(reference.trace(model), [inputs[:1]])
    found = reference.last_rectifiers(record)
    rectifiers = [node for node in record.values if reference.family(node) in reference.RECTIFIERS]
    assert (len(found), len(rectifiers) - len(found)) == (last, others)


def test_a_ring_of_one_for_the_common_convolution():
    mask = reference.padding_mask([5, 4], [3, 3], [1, 1], [(1, 1), (1, 1)], [1, 1])
    expected = torch.zeros(5, 4, dtype=torch.float64)
    expected[1:-1, 1:-1] = 1
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("length", [5, 8, 9])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (0, 2), (2, 1)])
def test_padding_mask_is_a_convolution_of_ones(length, kernel, stride, dilation, padding):
    """A window is inside the image where all of its taps meet the image."""
    image = F.pad(torch.ones(1, 1, length, dtype=torch.float64), padding)
    if dilation * (kernel - 1) >= image.shape[-1]:
        pytest.skip("the window is wider than the padded image")
    ones = torch.ones(1, 1, kernel, dtype=torch.float64)
    taps = F.conv1d(image, ones, stride=stride, dilation=dilation).flatten()
    expected = (taps == kernel).double()
    mask = reference.padding_mask([length], [kernel], [stride], [(0, 0)], [dilation], [padding])
    assert torch.equal(mask, expected if expected.any() else torch.ones_like(expected))


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 1}])
def test_prr_is_the_papers_listing(options: dict):
    """input * (gradient of average pooling at R / (average pool + 1e-10)), where nothing is padded."""
    x = noise_like(torch.empty(1, 2, 6, 6)).abs().requires_grad_()
    z = F.avg_pool2d(x, **options)
    R = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    (c,) = torch.autograd.grad(z, x, R / (z.detach() + 1e-10))
    kernel, stride = options["kernel_size"], options.get("stride", options["kernel_size"])
    windows = reference.pool_windows((6, 6), z.shape[2:], *((v, v) for v in (kernel, stride, 0, 1)))
    assert_same(reference.prr_max_pool(x.detach(), R, windows), (x * c).detach(), 1e-12)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(2, 1, dilation=2),
        nn.AdaptiveMaxPool2d((3, 2)),
    ],
    ids=str,
)
def test_prr_of_negative_windows_is_the_plain_gradient(pool: nn.Module):
    x = -noise_like(torch.empty(1, 2, 7, 5)).abs().requires_grad_()
    out = pool(x)
    R = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    (expected,) = torch.autograd.grad(out, x, R)
    record = reference.run(reference.trace(pool), [x.detach()])
    windows = reference.windows_of(record, reference.output_node(record.graph))
    assert_same(reference.prr_max_pool(x.detach(), R, windows), expected, 1e-12)
    shares = reference.prr_max_pool(-x.detach(), R, windows)
    assert shares.sum().item() == pytest.approx(R.sum().item(), abs=1e-6)


def test_an_empty_window_passes_nothing():
    x, R = torch.zeros(1, 1, 2, 2, dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    assert not reference.prr_max_pool(x, R, [[[0, 1]], [[0, 1]]]).any()
