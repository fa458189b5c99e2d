"""Weights that are plain tensors: given from outside, they are no data; complex, they have a conjugate."""

import pytest
import torch
import torch.nn.functional as F
from test_spellings import EVERY_METHOD, OPTIONS, Network, first_map, maps, pictures, relu
from torch import Tensor

import rectgrad


@EVERY_METHOD
def test_weights_that_are_no_parameters(method):
    """Weights given from outside as plain tensors, some of which want a gradient, are still no data."""
    model = Network().double().eval()
    state = {name: v.detach().clone() for name, v in model.state_dict().items()}
    weights = {name: v.requires_grad_() if "convs" in name else v for name, v in state.items()}

    def functional(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    given = rectgrad.attribute(functional, pictures(), method, target=2, **OPTIONS.get(method, {}))
    assert torch.equal(given, first_map(method, "act", relu, 2))
    assert all(v.grad is None for v in weights.values())


@pytest.mark.parametrize("layer", [F.linear, F.conv2d])
def test_complex_weights(layer):
    """Their gradient needs a conjugate."""
    torch.manual_seed(0)
    shapes = ((2, 4), (3, 4)) if layer is F.linear else ((2, 3, 5, 5), (2, 3, 3, 3))
    x, weight = torch.randn(shapes[0]).double(), torch.randn(shapes[1], dtype=torch.cdouble)

    def model(x: Tensor) -> Tensor:
        return layer(torch.complex(x, x * x), weight).abs().relu().flatten(1)

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    torch.testing.assert_close(rectgrad.attribute(model, x, "saliency", target=1), expected)


@EVERY_METHOD
def test_tensordot(method):
    """A Python function of torch, which reaches a mode with out=None."""
    expected = first_map(method, "dense", F.linear, 2)
    given = maps(method, pictures(), dense=lambda x, weight: torch.tensordot(x, weight, dims=([1], [1])))
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
