"""Agreement with Captum, method by method, on networks that it can explain.

Those are networks of modules, with each ReLU, pooling and addition a module of its own. Windows of pooling
do not overlap, because Captum's DeepLIFT keeps only one of the windows that share a winner; and a pooling
takes a copy of what the ReLU before it gave, because of Captum's hooks on one tensor the ReLU's reads the
gradient before the pooling's has replaced it.
"""

import copy
import itertools

import numpy as np
import pytest
import torch
from captum import attr
from captum.attr._utils.custom_modules import Addition_Module
from captum.attr._utils.lrp_rules import Alpha1_Beta0_Rule, EpsilonRule, GammaRule
from torch import Tensor, nn

import rectgrad
from rectgrad.kernels.draws import bytes_of, generator_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting (forward, )?backward hooks"),
    pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients"),
]

SEEDS = range(5)


class Flat(nn.Module):
    """Features, flattened, then a classifier; Captum's LRP has no rule for a module that flattens."""

    def __init__(self, features: nn.Module, classifier: nn.Module):
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class MaxPool(nn.Module):
    """Max pooling of a copy."""

    def __init__(self, size: int | tuple[int, int]):
        super().__init__()
        self.pool = nn.MaxPool2d(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x.clone())


def convolutions(*channels: int) -> list[nn.Module]:
    pairs = itertools.pairwise(channels)
    return [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding="same"), nn.ReLU())]


def cifar_cnn() -> tuple[nn.Module, Tensor]:
    """The paper's: Glorot-uniform weights, zero biases."""
    features = nn.Sequential(*convolutions(3, 32, 32), MaxPool(2), *convolutions(32, 64, 64), MaxPool(2))
    model = Flat(features, nn.Sequential(nn.Linear(64 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10)))
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model, torch.rand(2, 3, 32, 32) * 2 - 1


def vgg() -> tuple[nn.Module, Tensor]:
    features = nn.Sequential(
        *convolutions(3, 8, 8), MaxPool(2), *convolutions(8, 12, 12), MaxPool(2),
        *convolutions(12, 16), MaxPool((2, 1)),
    )  # fmt: skip
    head = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 7))
    return Flat(features, head), torch.randn(3, 3, 16, 8)


class Block(nn.Module):
    """Two convolutions beside a shortcut, each with its norm."""

    def __init__(self, channels: int, out: int, stride: int, norm: type[nn.Module] | None):
        super().__init__()
        self.body = nn.Sequential(
            *conv_norm(channels, out, 3, stride, norm), nn.ReLU(), *conv_norm(out, out, 3, 1, norm)
        )
        self.shortcut = nn.Sequential(*conv_norm(channels, out, 1, stride, norm)) if stride > 1 else None
        self.add, self.relu = Addition_Module(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.add(self.body(x), self.shortcut(x) if self.shortcut else x))


def conv_norm(channels: int, out: int, kernel: int, stride: int, norm: type[nn.Module] | None) -> list:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=norm is None)
    return [conv, norm(out)] if norm else [conv]


def resnet(norm: type[nn.Module] | None = nn.BatchNorm2d) -> tuple[nn.Module, Tensor]:
    features = nn.Sequential(
        *conv_norm(3, 8, 3, 1, norm), nn.ReLU(), MaxPool(2), Block(8, 8, 1, norm), Block(8, 12, 2, norm),
        Block(12, 12, 1, norm), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    return Flat(features, nn.Linear(12, 6)), torch.randn(3, 3, 16, 16)


def resnet_without_norms() -> tuple[nn.Module, Tensor]:
    return resnet(None)


@torch.no_grad()
def unsettle(module: nn.Module) -> None:
    """Norms that are not those of a fresh layer."""
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean.normal_(0, 0.3)
        module.running_var.uniform_(0.5, 2)
        nn.init.uniform_(module.weight, 0.5, 1.5)
        nn.init.normal_(module.bias, 0, 0.3)


def build(make, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and their classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, x = make()
        model = model.apply(unsettle).double().eval()
        return model, x.double(), model(x.double()).argmax(1)


def captum_lrp(model: nn.Module, x: Tensor, target: Tensor, epsilon: float, rule=None) -> Tensor:
    """rule: of the layers with weights, if it differs."""
    for module in model.modules():
        leaf = next(module.children(), None) is None
        if leaf and not isinstance(module, (nn.ReLU, nn.Dropout)):
            weighted = rule is not None and isinstance(module, (nn.Conv2d, nn.Linear))
            module.rule = rule() if weighted else EpsilonRule(epsilon)
    return attr.LRP(model).attribute(x, target=target)


def by_captum(name: str):
    return lambda model, x, target, **options: getattr(attr, name)(model).attribute(
        x, target=target, **options
    )


def captum_integral(rule: str):
    def integral(model: nn.Module, x: Tensor, target: Tensor, n: int, baseline: float) -> Tensor:
        maps = attr.IntegratedGradients(model).attribute(
            x, baselines=baseline, target=target, n_steps=n, method=rule
        )
        # Captum's n weights of the trapezoid sum to (n - 1) / n.
        return maps * n / (n - 1) if rule == "riemann_trapezoid" else maps

    return integral


def noise_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def captum_occlusion(model: nn.Module, x: Tensor, target: Tensor, window: tuple, stride: tuple) -> Tensor:
    """Captum's window has a side for the channels too, and its maps have the whole fall in every channel."""
    channels = x.shape[1]
    shapes = {"sliding_window_shapes": (channels, *window), "strides": (channels, *stride)}
    return attr.Occlusion(model).attribute(x, target=target, baselines=0.2, **shapes) / channels


def captum_gradient_shap(model: nn.Module, x: Tensor, target: Tensor, samples: int) -> Tensor:
    """With our draws: Captum asks numpy for all those of the first sample, then of the second, and so on."""
    parts = ((str(j).encode(), bytes_of(row.float())) for row in x for j in range(samples))
    drawn = [torch.rand(2, generator=generator_of(b"0", *each)).tolist() for each in parts]
    which, t = (np.array(each) for each in zip(*((int(u * len(x)), t) for u, t in drawn), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "choice", lambda count, size: which)
        patch.setattr(np.random, "uniform", lambda low, high, size: t)
        return attr.GradientShap(model).attribute(
            x, noise_like(x), n_samples=samples, stdevs=0.0, target=target
        )


CASES = {
    "saliency": (
        "saliency",
        {},
        lambda model, x, target: attr.Saliency(model).attribute(x, target=target, abs=False),
    ),
    "gradient_x_input": ("gradient_x_input", {}, by_captum("InputXGradient")),
    "guided_backprop": ("guided_backprop", {}, by_captum("GuidedBackprop")),
    "deconv": ("deconv", {}, by_captum("Deconvolution")),
    "integrated_right": (
        "integrated_gradients",
        {"quadrature": "right", "steps": 7, "baseline": 0.2},
        lambda *args: captum_integral("riemann_right")(*args, 7, 0.2),
    ),
    "integrated_trapezoid": (
        "integrated_gradients",
        {"steps": 8, "baseline": -0.1},
        lambda *args: captum_integral("riemann_trapezoid")(*args, 8, -0.1),
    ),
    "deeplift": ("deeplift", {}, by_captum("DeepLift")),
    "deeplift_noise": (
        "deeplift",
        {"baseline": noise_like},
        lambda model, x, target: attr.DeepLift(model).attribute(x, noise_like(x), target=target),
    ),
    "deeplift_shap": (
        "deeplift_shap",
        {"baselines": noise_like},
        lambda model, x, target: attr.DeepLiftShap(model).attribute(x, noise_like(x), target=target),
    ),
    "expected_gradients": (
        "expected_gradients",
        {"baselines": noise_like, "samples": 6},
        lambda *args: captum_gradient_shap(*args, 6),
    ),
    "occlusion": (
        "occlusion",
        {"window": 5, "stride": 3, "baseline": 0.2},
        lambda *args: captum_occlusion(*args, (5, 5), (3, 3)),
    ),
    "occlusion_side_by_side": (
        "occlusion",
        {"window": 4, "stride": 4, "baseline": 0.2},
        lambda *args: captum_occlusion(*args, (4, 4), (4, 4)),
    ),
    "epsilon_lrp": (
        "epsilon_lrp",
        {"epsilon": 1e-9},
        lambda *args: captum_lrp(*args, 1e-9),
    ),
}


def assert_agree(maps: Tensor, theirs: Tensor) -> None:
    for given, right in zip(maps, theirs.detach(), strict=True):
        error = (given - right).abs().max() / right.abs().max()
        assert error < 1e-5, f"differs by {error:.1e} of the largest value"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [cifar_cnn, vgg, resnet])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_captum(case, make, seed):
    method, options, captum = CASES[case]
    model, x, target = build(make, seed)
    options = {name: value(x) if callable(value) else value for name, value in options.items()}
    maps = rectgrad.attribute(model, x, method, target=target, **options)
    assert_agree(maps, captum(copy.deepcopy(model), x.clone(), target))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [cifar_cnn, vgg, resnet_without_norms])
def test_agrees_with_captum_at_a_large_epsilon(make, seed):
    """Without batch norms both stabilise the same sums; with one, Captum does so twice where we fold it."""
    model, x, target = build(make, seed)
    maps = rectgrad.attribute(model, x, "epsilon_lrp", target=target, epsilon=0.05)
    plain = rectgrad.attribute(model, x, "epsilon_lrp", target=target, epsilon=1e-9)
    assert (maps - plain).abs().max() > 0.01 * plain.abs().max()  # epsilon matters
    assert_agree(maps, captum_lrp(copy.deepcopy(model), x.clone(), target, 0.05))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("composite", "rule"), [("gamma", lambda: GammaRule(0.5)), ("zplus", Alpha1_Beta0_Rule)]
)
def test_rules_agree_with_captum(composite, rule, seed):
    """Captum leaves biases as they are and its rules are for inputs that are not negative: neither matters
    in a network without biases that sees bright pixels."""
    model, x, target = build(cifar_cnn, seed)
    x = x.abs()
    target = model(x).argmax(1)
    maps = rectgrad.attribute(model, x, "lrp", target=target, composite=composite, gamma=0.5, epsilon=1e-9)
    assert_agree(maps, captum_lrp(copy.deepcopy(model), x.clone(), target, 1e-9, rule))
