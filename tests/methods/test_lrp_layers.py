"""LRP's rules on every kind of layer with weights, against the slow versions: batch norms before and after,
strides, dilation, groups, transposed convolutions, padding, and the spellings of a layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from complete_networks import Apply, mlp, prepare
from rectgrad.engine.backward import remember_bridged
from reference import reference_attribute

COMPOSITES = {
    "epsilon": {"composite": "epsilon", "epsilon": 0.01},
    "epsilon_plus_flat": {},
    "epsilon_alpha2_beta1_flat": {"epsilon": 0.01},
    "epsilon_gamma_box": {"low": -6.0, "high": 5.0, "gamma": 0.4},
    "zplus": {},
    "gamma": {"epsilon": 0.01},
    "deep_taylor": {},
}
EVERY_COMPOSITE = pytest.mark.parametrize("composite", COMPOSITES)


def norm(channels: int, kind: type = nn.BatchNorm2d) -> nn.Module:
    """With scales of either sign."""
    made = kind(channels)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1.5, 2, channels))
        made.bias.normal_(0, 0.4)
        made.running_mean.normal_(0, 0.4)
        made.running_var.uniform_(0.5, 2)
    return made


def cnn(*middle: nn.Module) -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(3, 6, 3, padding=1), *middle, nn.LazyConv2d(5, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.LazyLinear(4)), 2 * torch.randn(2, 3, 7, 6)


def after() -> tuple[nn.Module, Tensor]:
    strided = nn.Conv2d(6, 8, 3, stride=2, padding=1), norm(8), nn.ReLU()
    grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4), norm(8), nn.ReLU()
    return cnn(norm(6), nn.ReLU(), *strided, *grouped)


def before() -> tuple[nn.Module, Tensor]:
    """The shift does not reach the padding."""
    dilated = norm(6), nn.Conv2d(6, 8, 3, padding=2, dilation=2)
    return cnn(
        nn.ReLU(), *dilated, nn.ReLU(), norm(8), nn.Conv2d(8, 6, (2, 3), padding=1, groups=2), nn.ReLU()
    )


def between() -> tuple[nn.Module, Tensor]:
    """A norm between two convolutions belongs to the first."""
    return cnn(nn.ReLU(), nn.Conv2d(6, 7, 3), norm(7), nn.Conv2d(7, 6, 1), norm(6), nn.ReLU())


def transposed() -> tuple[nn.Module, Tensor]:
    up = nn.ConvTranspose2d(6, 4, 3, 2, 1, groups=2, output_padding=1), norm(4), nn.ReLU()
    return cnn(nn.ReLU(), *up, norm(4), nn.ConvTranspose2d(4, 6, 2, dilation=2, bias=False), nn.GELU())


def dense() -> tuple[nn.Module, Tensor]:
    first = norm(8, nn.BatchNorm1d), nn.ReLU(), nn.Linear(8, 9, bias=False), norm(9, nn.BatchNorm1d)
    model, x = mlp(*first, nn.SiLU(), norm(9, nn.BatchNorm1d), nn.Linear(9, 9), nn.ReLU())
    model(x)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    return model, x


def padded() -> tuple[nn.Module, Tensor]:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 4, padding="same")
            self.c = nn.Conv2d(5, 4, 3, padding=1, padding_mode="reflect")

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.a(F.pad(x, (2, 0, 1, 1))))
            return self.c(F.relu(self.b(x))).relu().mean((2, 3))

    return Padded(), torch.randn(2, 3, 6, 6)


class Normalised(nn.Module):
    """Normalises its input itself; pixels that are 0 among them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, -0.1]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1))
        self.conv, self.head = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.std
        return self.head(self.conv(x).relu().mean((2, 3)))


def normalised() -> tuple[nn.Module, Tensor]:
    x = torch.rand(2, 3, 6, 6)
    x[:, :, ::2, ::3] = 0
    return Normalised(), x


def residual() -> tuple[nn.Module, Tensor]:
    """Sums of which some are negative and reach a layer without a ReLU."""

    def forward(self: Apply, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        return self.head((self.norm(self.conv(y)) + self.skip(y)).relu().flatten(1))

    convs = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": norm(4), "skip": nn.Conv2d(4, 4, 1)}
    net = Apply(forward, first=nn.Conv2d(3, 4, 3), **convs, head=nn.Linear(64, 4))
    return net, torch.randn(2, 3, 6, 6)


def all_convolutional() -> tuple[nn.Module, Tensor]:
    """The score is a mean of what the last layer makes, some of it negative."""
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers), torch.randn(2, 3, 6, 6)


NETWORKS = [after, before, between, transposed, dense, padded, normalised, residual, all_convolutional]


def assert_near(maps: Tensor, expected: Tensor) -> None:
    for given, right in zip(maps, expected, strict=True):
        error = float((given - right).abs().max() / right.abs().max())
        assert error < 1e-9, f"differs by {error:.1e} of the largest value"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("build", NETWORKS)
@EVERY_COMPOSITE
def test_agrees_with_the_formulas(build, composite):
    model, x = prepare(build)
    options = {"composite": composite, "epsilon": 1e-6, **COMPOSITES[composite]}
    maps = rectgrad.attribute(model, x, "lrp", **options)
    expected = reference_attribute(model, x, "lrp", **options)
    assert_near(maps, expected)
    kept = rectgrad.record(model, x)
    assert torch.equal(kept.attribute("lrp", **options), maps)


@pytest.mark.parametrize("build", [after, padded, residual, all_convolutional])
@pytest.mark.parametrize("contrastive", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_excitation_agrees_with_the_formulas(build, contrastive):
    model, x = prepare(build)
    options = {"contrastive": contrastive}
    maps = rectgrad.attribute(model, x, "excitation_backprop", **options)
    expected = reference_attribute(model, x, "excitation_backprop", **options)
    assert_near(maps, expected)


def test_the_map_of_a_bridged_model_has_no_graph():
    """The bridge's scores have one, and the map is divided by them."""
    torch.manual_seed(0)
    model, x = dense()
    remember_bridged(model)
    assert not rectgrad.attribute(model.eval(), x, "excitation_backprop", 1).requires_grad


@EVERY_COMPOSITE
def test_an_einsum_may_sum_over_channels(composite):
    """Its gradient is then a view with one number for all of them, which must not be written."""
    torch.manual_seed(0)
    conv, w, x = nn.Conv2d(3, 4, 3).double(), torch.randn(16, 5).double(), torch.randn(2, 3, 6, 6).double()
    options = {"composite": composite, **COMPOSITES[composite]}

    def summed(x: Tensor) -> Tensor:
        return torch.einsum("ncd,dk->nk", conv(x).flatten(2), w)

    def dense(x: Tensor) -> Tensor:
        return conv(x).flatten(1) @ w.repeat(4, 1)

    maps, expected = (rectgrad.attribute(each, x, "lrp", **options) for each in (summed, dense))
    assert_near(maps, expected)
