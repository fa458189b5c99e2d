"""What a GPU's backend merges, done with torch on the CPU: a batch norm's scale in the convolution's weights,
and the padding mask in the selection. Both give the map of the two steps apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rectgrad
from networks import NETWORKS
from passes import agree, by_bridge
from rectgrad import kernels
from rectgrad.kernels.linear_ops import Conv, Scale, outside_zeroed
from rectgrad.kernels.reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore:the map of sample", "ignore:Using padding='same'")


class Merging(Reference):
    """The reference with the abilities of the GPU's backend."""

    merges = True

    def __init__(self):
        self.regions = []

    def masks(self, a):
        return a.dim() == 4

    def rectify(self, a, R, rows, k, tau, rule, sums, within=None):
        self.regions.append(within)
        return outside_zeroed(super().rectify(a, R, rows, k, tau, rule, sums), within)


@pytest.fixture
def merging(monkeypatch):
    backend = Merging()
    backend.scaled = []

    def times(norm, weight):
        backend.scaled.append(weight)
        return weight * norm._scale().reshape(-1, *(1,) * (weight.dim() - 1))

    monkeypatch.setattr(kernels, "_backend", lambda device, choice: backend)
    monkeypatch.setattr(Conv, "merges", lambda self, norm: True)  # whatever their size
    monkeypatch.setattr(Scale, "times", times)
    return backend


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "saliency"])
@pytest.mark.parametrize("name", ["residual", "mobile"])
def test_batch_norms_in_the_weights(name, method, merging, passes):
    model, inputs = NETWORKS[name](0)
    maps = rectgrad.attribute(model, inputs, method, target=0)
    assert set(passes) == {"recorded"}
    assert merging.scaled
    merging.scaled.clear()
    assert agree(maps, by_bridge(model, inputs, method, target=0))
    assert not merging.scaled
    assert agree(maps, rectgrad.record(model, inputs).attribute(method, target=0))


@pytest.mark.parametrize("name", ["plain_cnn", "residual", "inception", "strided"])
def test_the_padding_trick_in_the_selection(name, merging, passes):
    model, inputs = NETWORKS[name](0)
    maps = rectgrad.attribute(model, inputs, "rectgrad", target=0, q=60.0)
    assert passes == ["recorded"]
    assert any(within is not None for within in merging.regions)
    merging.regions.clear()
    assert agree(maps, by_bridge(model, inputs, "rectgrad", target=0, q=60.0))
    rectgrad.attribute(model, inputs, "rectgrad", target=0, q=60.0, padding_trick=False)
    assert not any(within is not None for within in merging.regions)


def test_what_is_read_beside_the_activation_is_not_masked(merging, passes):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            x = self.conv(x)
            return (F.relu(self.last(F.relu(x))) + x).sum((1, 2, 3)).unsqueeze(1)

    torch.manual_seed(0)
    model, x = Beside().double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    maps = rectgrad.attribute(model, x, "rectgrad", target=0, q=50.0)
    assert passes == ["recorded"]
    assert [within is not None for within in merging.regions] == [True, False]
    assert agree(maps, by_bridge(model, x, "rectgrad", target=0, q=50.0))


def test_an_activation_whose_result_is_unused_masks_nothing(merging):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            x = self.conv(F.relu(x))
            F.relu(x)
            return x.sum((2, 3))

    torch.manual_seed(0)
    model, x = Unused().double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    maps = rectgrad.attribute(model, x, "rectgrad", target=0, q=50.0)
    assert agree(maps, by_bridge(model, x, "rectgrad", target=0, q=50.0))


def test_what_is_read_beside_the_batch_norm_is_not_scaled(merging, passes):
    class Twice(nn.Module):
        def __init__(self, beside):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.norm.running_var.fill_(9)
            self.beside = beside

        def forward(self, x):
            x = self.conv(F.relu(x))
            if self.beside:
                return F.relu(self.norm(x)).sum((1, 2, 3)) + x.sum((1, 2, 3))
            self.norm(x)
            return x.sum((2, 3))

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    for beside in (True, False):
        net = Twice(beside).double().eval()
        passes.clear()
        maps = rectgrad.attribute(net, x, "guided_backprop", target=0)
        assert passes == ["recorded"]
        assert agree(maps, by_bridge(net, x, "guided_backprop", target=0))
    assert not merging.scaled


def test_a_rule_for_batch_norms_sees_them(merging):
    """Nothing is merged where a rule needs the steps apart."""
    model, inputs = NETWORKS["residual"](0)
    maps = rectgrad.attribute(model, inputs, "epsilon_lrp", target=0)
    assert not merging.scaled
    assert agree(maps, by_bridge(model, inputs, "epsilon_lrp", target=0))
    layers = rectgrad.layer_attributions(model, inputs, "rectgrad", target=0)
    assert not merging.scaled
    assert layers
