"""DeepLIFT's maps sum to the difference of the scores, a sum that does not come from the engine."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from complete_networks import DEEPLIFT, Apply, between, noise_like, prepare


def deeplift_error(model: nn.Module, x: Tensor, baseline: float | Tensor, target: int) -> float:
    """The largest |sum of a map - difference of scores|, in parts of that map's absolute sum."""
    maps = rectgrad.attribute(model, x, "deeplift", target=target, baseline=baseline).double()
    with torch.no_grad():
        difference = (model(x) - model(torch.zeros_like(x) + baseline))[:, target].double()
    assert difference.abs().min() > 0
    return ((maps.flatten(1).sum(1) - difference).abs() / maps.abs().flatten(1).sum(1)).max().item()


@pytest.mark.filterwarnings("ignore:the model ends in a softmax")
@pytest.mark.parametrize("name", DEEPLIFT)
def test_deeplift_sums_to_the_difference(name):
    model, x = prepare(DEEPLIFT[name])
    for baseline in (0.0, 0.4, noise_like(x[:1]), noise_like(x)):
        assert deeplift_error(model, x, baseline, target=1) < 1e-9


@pytest.mark.filterwarnings("ignore:the model ends in a softmax")
@pytest.mark.parametrize("name", DEEPLIFT)
def test_deeplift_sums_to_the_difference_in_float32(name):
    model, x = prepare(DEEPLIFT[name], torch.float32)
    for baseline in (0.0, noise_like(x)):
        assert deeplift_error(model, x, baseline, target=2) < 1e-4


BROADCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: torch.maximum(x[:, :1], x.new_tensor([-0.5, 0.1, 0.7])),
    "minimum": lambda x: torch.minimum(x.new_tensor([-0.5, 0.1, 0.7]), x[:, 1:2]),
    "clamp": lambda x: x[:, :1].clamp(max=x.new_tensor([-0.5, 0.1, 0.7])),
    "power": lambda x: (x[:, :1].abs() + 0.5) ** x.new_tensor([2.0, 0.5, -1.0]),
    "exponent": lambda x: torch.pow(x.new_tensor([2.0, 0.5, 3.0]), x[:, :1]),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_deeplift_of_numbers_that_are_broadcast(name):
    model, x = prepare(lambda: (Apply(lambda self, x: BROADCAST[name](x) + x[:, 3:]), torch.randn(3, 4)))
    for baseline in (0.2, noise_like(x)):
        assert deeplift_error(model, x, baseline, target=1) < 1e-9


FIXED = torch.linspace(-2, 1, 9)
OF_A_CONSTANT = {  # calls whose first argument is a constant, or not the first that is passed
    "prelu": lambda x: F.prelu(FIXED.to(x).expand_as(x), x.mean((0, 2, 3))) + x,
    "layer_norm": lambda x: F.layer_norm(FIXED.to(x), (9,), x[0, 0, 0]) + x,
    "layer_norm_by_name": lambda x: torch.layer_norm(
        weight=x[0, 0, 0], normalized_shape=x.shape[-1:], input=2 * x
    ),
}


@pytest.mark.parametrize("name", OF_A_CONSTANT)
def test_deeplift_of_parameters_that_are_data(name):
    model, x = prepare(lambda: between(OF_A_CONSTANT[name]))
    assert deeplift_error(model, x[:1], 0.2, target=1) < 1e-9


INEXACT: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "power_of_data": ("pow", lambda x: (x.abs() + 0.5) ** (0.3 * x)),
    "variance": ("var", lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 0.1).sqrt()),
    "cumprod": ("cumprod", lambda x: x.cumprod(1)),
    "logsumexp": ("logsumexp", lambda x: x - x.logsumexp(1, keepdim=True)),
    "rounded_quotient": ("div", lambda x: x + torch.div(x, 0.3, rounding_mode="floor")),
    "rounded_reciprocal": ("div", lambda x: x + torch.div(2, x.abs() + 0.2, rounding_mode="trunc")),
    "rounded_quotient_of_data": ("div", lambda x: x + torch.div(4 * x, x.abs() + 1, rounding_mode="trunc")),
    "bound": ("clamp", lambda x: torch.clamp(torch.zeros_like(x), min=x) + x),
    "atan2": ("atan2", lambda x: torch.atan2(x[:, :3], x[:, 3:])),
}


@pytest.mark.filterwarnings("ignore:DeepLIFT's map")
@pytest.mark.parametrize("around", [contextlib.nullcontext(), torch.device("cpu")], ids=["linked", "bridged"])
@pytest.mark.parametrize("name", INEXACT)
def test_an_op_without_an_exact_rule_is_listed(name, around):
    """The trace names the op to blame for a wrong sum, and it alone."""
    op, function = INEXACT[name]
    model, x = prepare(lambda: between(function))
    with around:  # a device is a mode, for which a pass needs the bridge
        kept = rectgrad.record(model, x)
    kept.attribute("deeplift", target=1)
    plain, rows = kept.trace.plain(), zip(kept.trace.rows, kept.trace.layers(), strict=True)
    exact = deeplift_error(model, x, 0.0, target=1) < 1e-9
    assert {row.name for row, layer in rows if layer in plain} == (set() if exact else {op})


# --- several baselines --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the model ends in a softmax")
@pytest.mark.parametrize("name", DEEPLIFT)
def test_the_mean_over_baselines_sums_to_the_mean_difference(name):
    model, x = prepare(DEEPLIFT[name])
    baselines = torch.cat([noise_like(x[:2]), 0.4 + torch.zeros_like(x[:1])])
    maps = rectgrad.attribute(model, x, "deeplift_shap", target=1, baselines=baselines)
    each = [rectgrad.attribute(model, x, "deeplift", target=1, baseline=b) for b in baselines]
    torch.testing.assert_close(maps, torch.stack(each).mean(0), rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        difference = torch.stack([model(x) - model(b.expand_as(x)) for b in baselines]).mean(0)[:, 1]
    assert ((maps.flatten(1).sum(1) - difference).abs() <= 1e-9 * maps.abs().flatten(1).sum(1)).all()


def test_the_class_is_that_of_the_input_for_all_baselines():
    model, x = prepare(DEEPLIFT[next(iter(DEEPLIFT))])
    best = model(x).argmax(1)
    found, expected = (
        rectgrad.attribute(model, x, "deeplift_shap", target, baselines=noise_like(x))
        for target in (None, best)
    )
    assert torch.equal(found, expected)
    kept = rectgrad.record(model, x)
    assert torch.equal(kept.attribute("deeplift_shap", baselines=noise_like(x)), expected)


def test_baselines_must_be_given():
    model, x = prepare(DEEPLIFT[next(iter(DEEPLIFT))])
    with pytest.raises(ValueError, match=r"DeepLiftShap needs baselines, a tensor \(B, ...\)"):
        rectgrad.attribute(model, x, "deeplift_shap")
