"""Weights that are plain tensors, given from outside, are no data."""

import torch
from test_spellings import EVERY_METHOD, OPTIONS, Network, first_map, pictures, relu
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
