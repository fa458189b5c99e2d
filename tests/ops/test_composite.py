"""Torch's own Python functions: which bodies run under the recorder."""

import pytest
import torch
from torch import nn

import rectgrad


class Coordinates(nn.Module):
    """Weights positions by coordinates that it computes in its forward pass."""

    def forward(self, x):
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(5.0), indexing="ij")
        return torch.stack([(x.relu() * each).sum((1, 2, 3)) for each in (rows, columns)], 1)


class Products(nn.Module):
    """A grid of values that depend on the input."""

    def forward(self, x):
        a, b = torch.meshgrid(x[0, 0, 0], x[0, 0, 1], indexing="ij")
        return (a * b).sum().relu().reshape(1)


@pytest.mark.parametrize("net", [Coordinates(), Products()], ids=lambda net: type(net).__name__)
def test_meshgrid_in_a_forward_pass(net):
    """Its body dispatches itself through a helper function."""
    x = torch.rand(1, 3, 4, 5, requires_grad=True)
    expected = torch.autograd.grad(net(x).reshape(1, -1).amax(1).sum(), x)[0]
    torch.testing.assert_close(rectgrad.attribute(net, x, "saliency"), expected)
    with rectgrad.propagate({}):
        out = net(x)
    torch.testing.assert_close(out, net(x))
