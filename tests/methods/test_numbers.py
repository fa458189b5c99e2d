"""Numbers that others have published or worked out by hand, reproduced in float64."""

import pytest
import torch
from torch import Tensor, nn

import rectgrad


def close(maps: Tensor, expected: list) -> None:
    torch.testing.assert_close(maps, torch.tensor(expected, dtype=maps.dtype)[None], rtol=0, atol=1e-5)


@torch.no_grad()
def counting_network() -> nn.Module:
    """A convolution of ones, then a dense layer of ones and minus ones: every number is a small integer."""
    conv, dense = nn.Conv2d(1, 2, 3), nn.Linear(8, 4, bias=False)
    conv.weight.fill_(1)
    conv.bias.copy_(torch.tensor([-50.0, -75.0]))
    dense.weight.copy_(torch.tensor([1.0] * 5 + [-1.0] * 3).expand(4, 8))
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), dense, nn.ReLU()).double().eval()


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("guided_backprop", {}, [[0, 1, 1, 1], [1, 3, 3, 2], [1, 3, 3, 2], [1, 2, 2, 1]]),
        ("deconv", {}, [[2, 3, 3, 1], [3, 5, 5, 2], [3, 5, 5, 2], [1, 2, 2, 1]]),
        ("epsilon_lrp", {"epsilon": 1e-9}, [[0, 1, 2, 3], [0, 5, 6, 7], [0, 9, 10, 11], [0, 0, 0, 0]]),
    ],
)
def test_counting_network(method, options, expected):
    x = torch.arange(16.0, dtype=torch.float64).reshape(1, 1, 4, 4)
    close(rectgrad.attribute(counting_network(), x, method, target=0, **options), [expected])


def difference(x: Tensor) -> Tensor:
    return torch.relu(torch.relu(x[:, 0] - 1) - torch.relu(x[:, 1]))


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("saliency", {}, [1, -1]),
        ("gradient_x_input", {}, [3, -1]),
        # The gradient is 0 on the first half of the way and (1, -1) on the second; an even number of
        # evaluations has as many on each half, so that the sum is the integral.
        ("integrated_gradients", {"steps": 50}, [1.5, -0.5]),
        ("integrated_gradients", {"steps": 50, "quadrature": "right"}, [1.5, -0.5]),
        ("integrated_gradients", {"steps": 1000}, [1.5, -0.5]),
        # An odd one meets the kink itself, where the gradient counts as 0: less by half a step.
        ("integrated_gradients", {"steps": 11}, [3 * 0.45, -0.45]),
    ],
)
def test_difference_of_rectified(method, options, expected):
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    close(rectgrad.attribute(difference, x, method, **options), expected)


def late_starter(x: Tensor) -> Tensor:
    return 2 * torch.relu(x[:, 0]) + 2 * torch.relu(x[:, 1] - 1.5)


def test_deeplift_contributions():
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    close(rectgrad.attribute(late_starter, x, "deeplift"), [2, 1])


@torch.no_grad()
def four_units(bias: list[float]) -> nn.Module:
    """A unit for each input, shifted by `bias`, and the weights of the paper's appendix B behind it."""
    shift, head = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
    shift.weight.copy_(torch.eye(4))
    shift.bias.copy_(torch.tensor(bias))
    head.weight.copy_(torch.tensor([[1.0, 10.0, -100.0, 1000.0]]))
    return nn.Sequential(shift, nn.ReLU(), head).double().eval()


@pytest.mark.parametrize("shift", [0.0, -1.0])  # unit 4 at the threshold of its ReLU, and below it
@pytest.mark.parametrize(
    ("rule", "expected"),
    [("PR1", [0, 10, 0, 0]), ("PR2", [0, 0, -100, 0]), ("PR3", [1, 0, 0, 0]), ("PR4", [0, 0, 0, 1000])],
)
def test_four_units_of_appendix_b(rule, expected, shift):
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    options = {"q": 74, "rule": rule, "multiply_by_input": False, "positive_only": False}
    close(rectgrad.attribute(four_units([0, 0, 0, shift]), x, "rectgrad", **options), expected)


def test_a_map_that_the_padding_trick_emptied_says_so():
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)).eval()
    x = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(37))
    for explained in (rectgrad.attribute, lambda net, x: rectgrad.record(net, x).attribute()):
        with pytest.warns(UserWarning, match=r"sample 0 is zero: .* padding; padding_trick=False keeps them"):
            assert not explained(net, x).any()
    assert rectgrad.attribute(net, x, padding_trick=False).any()
