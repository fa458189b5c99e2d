"""Relevance does not depend on how a step is written: denominators, constants, types and sums; and what
happens to complex numbers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from complete_networks import Apply
from rectgrad.engine.backward import remember_bridged
from reference import reference_attribute

ONE, C = torch.ones((), dtype=torch.float64), torch.linspace(0.5, 2, 6, dtype=torch.float64)
W = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).double()
METHODS = {
    "epsilon_lrp": {"epsilon": 1e-3},
    "attn_lrp": {},
    "lrp": {"composite": "zplus"},
    "excitation_backprop": {},
}
EVERY = pytest.mark.parametrize("method", METHODS)


def between(step) -> tuple[nn.Module, Tensor]:
    """`step` on six units between two layers."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(5, 6), "last": nn.Linear(6, 4)}
    net = Apply(lambda self, x: self.last(step(self.first(x))), **layers).double().eval()
    return net, torch.randn(3, 5).double()


def map_of(step, method: str) -> Tensor:
    model, x = between(step)
    return rectgrad.attribute(model, x, method, target=1, **METHODS[method])


def assert_alike(step, other, method: str) -> None:
    expected = map_of(other, method)
    torch.testing.assert_close(
        map_of(step, method), expected, rtol=0, atol=1e-7 * float(expected.abs().max())
    )


def square(h: Tensor) -> Tensor:
    return (h * h).mean(1, keepdim=True) + 0.1


DENOMINATORS = {
    "rsqrt": lambda h: h * square(h).rsqrt(),
    "reciprocal": lambda h: h * square(h).sqrt().reciprocal(),
    "number / data": lambda h: h * (1 / square(h).sqrt()),
    "constant / data": lambda h: h * (ONE / square(h).sqrt()),
    "torch.div": lambda h: h * torch.div(torch.ones(6).double(), square(h).sqrt()),
    "pow": lambda h: h * square(h).pow(-0.5),
    "**": lambda h: h * square(h) ** -0.5,
    "torch.pow": lambda h: torch.pow(square(h), exponent=-0.5) * h,
}


@pytest.mark.filterwarnings("ignore:the map of sample")
@EVERY
@pytest.mark.parametrize("name", DENOMINATORS)
def test_the_denominator_of_a_norm_is_a_constant(name, method):
    assert_alike(DENOMINATORS[name], lambda h: h / square(h).sqrt(), method)


@pytest.mark.parametrize("method", ["epsilon_lrp", "lrp"])
@pytest.mark.parametrize("name", ["number / data", "constant / data", "**"])
def test_denominators_agree_with_the_formulas(name, method):
    model, x = between(DENOMINATORS[name])
    expected = reference_attribute(model, x, method, 1, **METHODS[method])
    torch.testing.assert_close(map_of(DENOMINATORS[name], method), expected)


@EVERY
def test_a_constant_divided_by_data_passes_relevance_unchanged(method):
    """Before a layer as well, where a scale would be a part of it."""
    assert_alike(lambda h: C / (1 + torch.exp(-h)), lambda h: (1 / (1 + torch.exp(-h))) * C, method)
    assert_alike(lambda h: ONE / (1 + torch.exp(-h)), lambda h: (1 + torch.exp(-h)).reciprocal(), method)


@EVERY
def test_a_step_function_is_a_constant_in_a_product(method):
    """Its gradient is 0, so that its share of the relevance was lost."""
    assert_alike(lambda h: h * h.sign(), torch.abs, method)
    for step, shift in (torch.floor, 2), (torch.trunc, 2), (torch.ceil, 1), (torch.round, 1.5):
        assert_alike(
            lambda h, f=step, c=shift: h.sigmoid() * f(h.sigmoid() + c), lambda h: h.sigmoid() * 2, method
        )


@pytest.mark.parametrize("bridge", [False, True])
def test_relevance_is_conserved_in_lp_pooling(bridge):
    model, x = between(lambda h: F.lp_pool1d(h[:, None], 2, 1)[:, 0])
    if bridge:
        remember_bridged(model)
    kept = rectgrad.record(model, x)
    kept.attribute("epsilon_lrp", 1)
    assert kept.trace.conservation.error.abs().max() < 1e-6


def mixed(convert) -> Callable[[Tensor], Tensor]:
    """Attention among the units, whose weights are computed in float32 and converted back."""

    def step(h: Tensor) -> Tensor:
        scores = h[:, :, None] * h[:, None] / 3
        return (convert(F.softmax(scores.float(), -1), scores) @ h[:, :, None])[..., 0]

    return step


LIKE = {
    "type_as": lambda w, scores: w.type_as(scores),
    "to": lambda w, scores: w.to(scores),
    "expand_as": lambda w, scores: w.double().expand_as(scores),
}


@EVERY
@pytest.mark.parametrize("name", LIKE)
def test_a_type_or_a_shape_is_no_data(name, method):
    """The weights of a softmax remain constants."""
    assert_alike(mixed(LIKE[name]), mixed(lambda w, _: w.double()), method)


@EVERY
def test_a_norm_that_returns_the_type_it_was_given_is_merged(method):
    norm = nn.BatchNorm1d(6).eval()
    nn.init.uniform_(norm.weight, -1, 2)
    assert_alike(lambda h: norm(h.float()).type_as(h), lambda h: norm(h.float()).double(), method)


SUMS = {
    "addmm": (lambda h: torch.addmm(h.tanh(), h, W), lambda h: h.tanh() + h @ W),
    "baddbmm": (
        lambda h: torch.baddbmm(h[:, :, None], h[:, :, None], h[:, None])[..., 0],
        lambda h: h + (h[:, :, None] @ h[:, None])[..., 0],
    ),
    "linear": (lambda h: F.linear(h, W, h[0].tanh()), lambda h: h @ W.T + h[0].tanh()),
}


@pytest.mark.parametrize("method", ["epsilon_lrp", "attn_lrp"])
@pytest.mark.parametrize("name", SUMS)
def test_what_is_added_to_a_product_is_no_factor(name, method):
    """With epsilon 0: a sum of products has one denominator, and apart they have two."""
    together, apart = (
        rectgrad.attribute(model, x[:1], method, target=1, epsilon=0.0)
        for model, x in map(between, SUMS[name])
    )
    torch.testing.assert_close(together, apart)


@pytest.mark.filterwarnings("ignore:the map of sample")
@EVERY
def test_constants_of_more_dimensions(method):
    grid = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    apart = lambda h: (h[:, None].repeat(1, 4, 1) - grid).square().sum(1)  # noqa: E731
    assert_alike(lambda h: (h[:, None] - grid).square().sum(1), apart, method)


def test_the_exponential_of_a_masked_score_is_accounted_for():
    hidden = torch.tensor([False, True, False, False, True, False])
    model, x = between(lambda h: h.masked_fill(hidden, -torch.inf).exp())
    kept = rectgrad.record(model, x)
    kept.attribute("epsilon_lrp", 1)
    assert kept.trace.conservation.error.abs().max() < 1e-12


# --- complex numbers ---------------------------------------------------------------------------------------


def spectral(use) -> tuple[nn.Module, Tensor]:
    """A layer in frequency space, as in a Fourier neural operator: `use` gets its complex output."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, 3, 3, dtype=torch.complex128)

    def forward(self: Apply, x: Tensor) -> Tensor:
        x = torch.fft.rfft2(self.first(x))[:, :, :3, :3]
        y = use(torch.einsum("nihw,iohw->nohw", x, weight) + weight[0])
        return self.last(y.flatten(1).relu())

    net = Apply(forward, first=nn.Conv2d(3, 4, 3, padding=1), last=nn.LazyLinear(3)).double().eval()
    x = torch.randn(2, 3, 6, 6).double()
    net(x)
    return net, x


def back(z: Tensor) -> Tensor:
    return torch.fft.irfft2(z, s=(6, 6))


@pytest.mark.parametrize("method", ["epsilon_lrp", "attn_lrp"])
def test_relevance_of_a_linear_step_on_complex_numbers(method):
    model, x = spectral(back)
    maps = rectgrad.attribute(model, x, method, target=1, epsilon=0.0)
    expected = rectgrad.attribute(model, x, "gradient_x_input", target=1)
    torch.testing.assert_close(maps, expected)


@EVERY
@pytest.mark.parametrize("bridge", [False, True])
def test_maps_of_a_spectral_network_are_finite(method, bridge):
    model, x = spectral(torch.abs)
    if bridge:
        remember_bridged(model)
    assert rectgrad.attribute(model, x, method, target=1, **METHODS[method]).isfinite().all()


@pytest.mark.parametrize("use", [back, torch.abs])
def test_deeplift_of_a_spectral_network_is_complete(use):
    model, x = spectral(use)
    found = rectgrad.attribute(model, x, "deeplift", target=1).sum((1, 2, 3))
    with torch.no_grad():
        expected = (model(x) - model(torch.zeros_like(x)))[:, 1]
    torch.testing.assert_close(found, expected)
