"""Claims 1 and 2 of the paper, to the last bit: Guided Backprop and Deconv are RectGrad at tau = 0."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rectgrad
from rectgrad import ops
from rectgrad.rules import rectified


@pytest.fixture(autouse=True, scope="module")
def reference_kernels():
    """A fast kernel sums in another order, so that last bits may differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTGRAD_KERNELS", "reference")
        yield


class RandomNet(nn.Module):
    """Convolutions, max pooling, batch norm and residual adds in a random arrangement."""

    def __init__(self, seed: int, depth: int, width: int, classes: int):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.plan = torch.randint(4, (depth,)).tolist()
            self.convs = nn.ModuleList(
                nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(depth)
            )
            self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
            for norm in self.norms:
                nn.init.normal_(norm.running_mean)
                nn.init.uniform_(norm.weight, -1, 1)
                nn.init.normal_(norm.bias)
            self.head = nn.Linear(width, classes)

    def forward(self, x):
        for plan, conv, norm in zip(self.plan, self.convs, self.norms, strict=True):
            y = conv(x)
            if plan in (1, 3):
                y = norm(y)
            y = y.relu()
            if plan in (2, 3) and y.shape == x.shape:
                y = y + x
            if plan == 0 and y.shape[-1] >= 4:
                y = nn.functional.max_pool2d(y, 2)
            x = y
        return self.head(x.relu().mean((2, 3)))


networks = st.builds(
    RandomNet,
    seed=st.integers(0, 2**31),
    depth=st.integers(1, 4),
    width=st.integers(1, 6),
    classes=st.integers(1, 4),
)


def images(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=250, deadline=None)
@given(model=networks, seed=st.integers(0, 2**31))
def test_guided_backprop_is_rectgrad_at_tau_zero(model, seed):
    """Claim 2: with tau = 0 and no padding trick, RectGrad = relu(guided * input)."""
    model.eval()
    x = images(seed)
    guided = rectgrad.attribute(model, x, "guided_backprop", multiply_by_input=True)
    assert torch.equal(no_trick(model, x), guided.clamp(min=0))


def no_trick(model, x):
    return rectgrad.attribute(model, x, "rectgrad", tau=0.0, padding_trick=False)


@settings(max_examples=250, deadline=None)
@given(model=networks, seed=st.integers(0, 2**31))
def test_deconv_is_rectgrad_at_tau_zero_with_eps(model, seed):
    """Claim 1: Deconv is the rule with tau = 0 and the test on (a + eps) * R."""
    model.eval()
    x = images(seed).requires_grad_()
    with rectgrad.propagate(dict.fromkeys(ops.RECTIFIERS, rectified(tau=0.0, eps=1e-6))):
        scores = model(x).amax(1)
    (R,) = torch.autograd.grad(scores.sum(), x)
    deconv = rectgrad.attribute(model, x, "deconv", target=lambda out: out.amax(1))
    assert torch.equal(R, deconv)


def test_the_claims_need_the_threshold():
    """The same comparison fails at another threshold, so equality above says something."""
    model, x = RandomNet(1, 3, 6, 4).eval(), images(1)
    guided = rectgrad.attribute(model, x, "guided_backprop", multiply_by_input=True).clamp(min=0)
    above = rectgrad.attribute(model, x, "rectgrad", tau=1e-6, padding_trick=False)
    assert guided.abs().max() > 0
    assert not torch.equal(above, guided)


@pytest.mark.parametrize("rule", ["PR1", "PR2", "PR3", "PR4"])
def test_a_very_low_threshold_is_the_gradient_with_nothing_rectified(rule):
    """tau = -infinity lets everything through, dead units included: the listing multiplies nothing in."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    x = torch.randn(3, 4, dtype=torch.float64)
    options = {"tau": -float("inf"), "rule": rule, "multiply_by_input": False, "positive_only": False}
    maps = rectgrad.attribute(model, x, "rectgrad", target=1, **options)
    linear = model[2].weight[1] @ model[0].weight
    assert torch.allclose(maps, linear.expand(3, 4))
