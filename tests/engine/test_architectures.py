"""Real architectures in miniature: maps against explicit layers.

The expected maps come from the same network run on its own, sample by sample, with every activation of
`torch.nn.functional` replaced by an autograd.Function whose backward step is the rule, and a plain gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from architectures import BARE, CASES, OPTIONS, RULES, Case, call, explicit_maps, maps, prepared, same, scores
from every_method import EVERY, POSITIONS
from rectgrad import UnsupportedModelError
from token_networks import Recurrent, tokens
from vision_networks import SqueezeExcitation, mobile

# DeepLIFT has no exact rule for the insides of a recurrent layer, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:DeepLIFT's map")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_an_explicit_activation(name: str, rule: str) -> None:
    method, options, step = RULES[rule]
    case = CASES[name]
    options = {**options, **BARE} if method == "rectgrad" else options
    found = maps(*prepared(case)[:2], method, case, case.kwargs(), **options)
    same(found, explicit_maps(case, step))


@pytest.mark.parametrize("name", CASES)
def test_saliency_is_the_gradient(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    expected = torch.autograd.grad(scores(model(*leaves, **kwargs), case.target).sum(), leaves)
    same(maps(model, inputs, "saliency", case, kwargs), expected, 1e-12)


@pytest.mark.filterwarnings(
    "ignore:.*is zero. it ends at layer", "ignore:.*nothing in the input speaks for the class"
)
@pytest.mark.parametrize("name", CASES)
def test_every_method_alone_in_a_batch_and_on_a_record(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    kept = rectgrad.record(model, inputs, forward_kwargs=kwargs)
    for method in EVERY:
        if method == "deeplift" and name == "experts":
            continue  # the baseline is sent to other experts: see below
        try:
            together = maps(model, inputs, method, case, kwargs)
        except UnsupportedModelError:
            assert method in POSITIONS  # which not every network has
            continue
        assert all(bool(m.isfinite().all()) for m in together)
        # Where nothing is evidence for the class, a positive part and positive connections leave a zero map.
        may_be_zero = (*POSITIONS, "excitation_backprop")
        assert method in may_be_zero or any(bool((m != 0).any()) for m in together)
        same(kept.attribute(method, case.target, **OPTIONS.get(method, {})), together)
        last = tuple(x[-1:] for x in inputs)
        alone = maps(model, last, method, case, {k: v[-1:] for k, v in kwargs.items()})
        same(alone, tuple(m[-1:] for m in together))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exact])
def test_deeplift_adds_up_to_the_difference(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    baseline = tuple(0.3 * torch.randn_like(x) for x in inputs)
    found = maps(model, inputs, "deeplift", case, kwargs, baseline=baseline)
    total = sum(m.flatten(1).sum(1) for m in found)
    difference = [scores(model(*x, **kwargs), case.target).detach() for x in (inputs, baseline)]
    torch.testing.assert_close(total, difference[0] - difference[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.relu])
def test_epsilon_lrp_of_a_relu_network_tends_to_gradient_times_input(name: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    found = maps(model, inputs, "epsilon_lrp", case, kwargs, epsilon=1e-13)
    same(found, maps(model, inputs, "gradient_x_input", case, kwargs), 1e-6)


# --- other forms of a model --------------------------------------------------------------------------------

FORMS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Any]] = {
    "fx": lambda model, inputs: torch.fx.symbolic_trace(model).eval(),
    "export": lambda model, inputs: torch.export.export(model, inputs).module(),
    "compile": lambda model, inputs: torch.compile(model, backend="aot_eager"),
    "functional_call": lambda model, inputs: partial(call, model, dict(model.named_parameters())),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["resnet", "mobilenet v2", "mobilenet v3", "shufflenet", "mixer"])
def test_another_form_of_a_model_has_the_same_maps(name: str, form: str) -> None:
    case = CASES[name]
    model, inputs, kwargs = prepared(case)
    other = FORMS[form](model, inputs)
    for method in ("rectgrad", "rectgrad_prr", "guided_backprop", "deconv", "epsilon_lrp", "deeplift"):
        same(maps(other, inputs, method, case, kwargs), maps(model, inputs, method, case, kwargs))


# --- what cannot be explained ------------------------------------------------------------------------------


class SwishImplementation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        i = ctx.saved_tensors[0]
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishImplementation.apply(x)


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv", "deeplift", "epsilon_lrp"])
def test_a_memory_efficient_swish_is_refused(method: str) -> None:
    case = Case(lambda: mobile(MemoryEfficientSwish, lambda: SqueezeExcitation(12, nn.ReLU, nn.Sigmoid)))
    model, inputs, kwargs = prepared(case)
    with pytest.raises(UnsupportedModelError, match="SwishImplementation, which hides a sigmoid"):
        maps(model, inputs, method, case, kwargs)


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv", "deeplift", "epsilon_lrp"])
def test_a_recurrent_network_with_relu_is_refused(method: str) -> None:
    case = Case(partial(Recurrent, nn.RNN, nonlinearity="relu"), tokens)
    model, inputs, kwargs = prepared(case)
    with pytest.raises(UnsupportedModelError, match=r"an nn\.RNN with ReLU"):
        maps(model, inputs, method, case, kwargs)


def test_deeplift_refuses_experts_that_the_baseline_does_not_reach() -> None:
    case = CASES["experts"]
    model, inputs, kwargs = prepared(case)
    with pytest.raises(ValueError, match="ran other operations on the baseline"):
        maps(model, inputs, "deeplift", case, kwargs)


OTHER_PATHS: dict[str, Callable[[nn.Module, Tensor, bool], Tensor]] = {
    "another activation": lambda layer, x, positive: F.relu(layer(x)) if positive else F.elu(layer(x)),
    "fewer tokens": lambda layer, x, positive: F.relu(layer(x[:, :3] if positive else x[:, :1])),
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_deeplift_refuses_another_path_on_the_baseline(path: str) -> None:
    """Also where both passes are of the same length, and one's shapes could be stretched to the other's."""
    layer, x = nn.Linear(8, 5), torch.rand(2, 3, 8)
    with pytest.raises(ValueError, match="ran other operations on the baseline"):
        rectgrad.attribute(lambda x: OTHER_PATHS[path](layer, x, bool(x.sum() > 0)).mean(1), x, "deeplift", 1)
