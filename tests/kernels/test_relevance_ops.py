"""How units share relevance: the native kernels against the formulas, and maps with and without them."""

from unittest import mock

import pytest
import torch
from torch import nn

import rectgrad
from native_levels import LEVELS, close, library, needs_native
from rectgrad.kernels import native, relevance_ops

EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS)


def units(seed=0, shape=(2, 5, 7, 3)):
    """c, z and a sum of some summands, of which some are 0; scale, shift and offset of each channel."""
    torch.manual_seed(seed)
    c, z, part = torch.randn(shape), torch.randn(shape), torch.rand(shape)
    part[torch.rand(shape) < 0.2] = 0
    return c, z, part, torch.randn(shape[1]), torch.randn(shape[1]), torch.tensor([0, 0.3, -1, 2, 0])


def in_double(units):
    """The same units, and the size of each channel's scale."""
    *wide, scale, shift, offset = (x.double() if x.dim() > 1 else x.double()[:, None, None] for x in units)
    return *wide, scale, shift, offset, scale.abs()


@needs_native
@EVERY_LEVEL
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("biased", [True, False])
def test_the_sum_of_one_sign(level, sign, biased):
    given = units()
    c, z, part, scale, shift, offset, size = in_double(given)
    with mock.patch.object(native, "load", return_value=library(level)):
        found, none = native.share((*given[:2], sign * given[2], *given[3:]), 0.05, 2.0, sign, biased=biased)
    s = part + (sign * offset / size).clamp(min=0) * biased
    assert none is None
    assert (s == 0).any()
    close(found, torch.where(s > 0, 2 * c * (scale * z + shift) / (s + 0.05 / size), 0))


@needs_native
@EVERY_LEVEL
@pytest.mark.parametrize("mixed", [False, True])
def test_the_gamma_rule(level, mixed):
    given = units(1)
    c, z, part, scale, shift, offset, size = in_double(given)
    with mock.patch.object(native, "load", return_value=library(level)):
        found, favoured = native.share(given, 0.05, gamma=0.4, mixed=mixed)
    total = scale * z + shift
    own, above = total / size, part + (offset / size).clamp(min=0)
    s = own + 0.4 * (torch.where(own > 0, above, own - above) if mixed else above)
    share = c * total / (s + 0.05 / size * s.sign())
    if not mixed:
        close(found, torch.where(s > 0, share, 0))
        return
    close(found, torch.where(own > 0, share, 1.4 * share))
    close(favoured, 0.4 * torch.where(own > 0, share, -share))


@needs_native
@EVERY_LEVEL
def test_the_stabiliser(level):
    torch.manual_seed(0)
    c, z = torch.randn(3, 40_000), torch.randn(3, 40_000)
    z[:, ::7] = 0
    with mock.patch.object(native, "load", return_value=library(level)):
        found = native.stabilised(c, z, 0.01)
    close(found, c * z.abs() / (z.abs() + 0.01))
    assert not found[:, ::7].any()


def network():
    """Layers that a ReLU reads and one that it does not, with scales of either sign in one of them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

        def forward(self, x):
            y = self.norms[0](self.a(x)).relu_()
            y = self.norms[1](self.b(y))
            y += x
            return y.relu_()

    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Block(), Block(), nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(2, 3, 8, 8))
    for k, norm in enumerate(each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, -1.0 if k % 2 else 0.2, 1)
        nn.init.normal_(norm.bias, 0, 0.3)
    return model.eval(), torch.randn(2, 3, 8, 8)


@needs_native
@pytest.mark.parametrize("composite", relevance_ops.COMPOSITES)
def test_maps_are_those_of_the_portable_kernels(composite, monkeypatch):
    model, x = network()
    options = {"composite": composite, "epsilon": 1e-3} | (
        {"low": -5.0, "high": 5.0} if "box" in composite else {}
    )
    with mock.patch.object(native, "share", wraps=native.share) as share:
        found = rectgrad.attribute(model, x, "lrp", target=1, **options)
    assert share.called is (composite != "epsilon")
    monkeypatch.setenv("RECTGRAD_KERNELS", "portable")
    close(
        found / found.abs().max(),
        rectgrad.attribute(model, x, "lrp", target=1, **options) / found.abs().max(),
    )


@pytest.mark.parametrize("composite", ["zplus", "gamma", "epsilon_alpha2_beta1_flat"])
def test_a_bias_for_each_position(composite):
    """It is not a number for each channel, as the native kernel wants it."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.positions = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(4, 6, 6))

        def forward(self, x):
            return torch.relu(self.layer(x) + self.positions).mean((2, 3))

    torch.manual_seed(0)
    model, x = Positions(), torch.rand(2, 3, 8, 8)
    found = rectgrad.attribute(model, x, "lrp", target=1, composite=composite)
    again = rectgrad.attribute(model.double(), x.double(), "lrp", target=1, composite=composite)
    close(found / found.abs().max(), again / again.abs().max())


@pytest.mark.parametrize("composite", relevance_ops.COMPOSITES)
def test_scaled_weights_give_the_same_maps(composite):
    """As on a GPU; on a CPU, weights get the signs of the scales alone."""
    model, x = network()
    model, x = model.double(), x.double()
    options = {"composite": composite, "epsilon": 1e-3}
    options |= {"low": -5.0, "high": 5.0} if "box" in composite else {}
    found = rectgrad.attribute(model, x, "lrp", target=1, **options)
    with mock.patch.object(relevance_ops, "scales_weights", return_value=True) as asked:
        again = rectgrad.attribute(model, x, "lrp", target=1, **options)
    assert asked.called is (composite != "epsilon")
    torch.testing.assert_close(again, found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_channel_that_a_batch_norm_switches_off_keeps_maps_finite(kind):
    model, x = network()
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        nn.init.constant_(norm.weight[:2], 0), nn.init.constant_(norm.weight[2:4], 1e-38)
    model, x = model.to(kind), x.to(kind)
    for composite in ("zplus", "gamma", "epsilon_alpha2_beta1_flat", "deep_taylor"):
        assert bool(rectgrad.attribute(model, x, "lrp", target=1, composite=composite).any())
