"""trace.conservation: relevance at the input and what biases and stabilisers absorbed sum to the score.

The two parts come from the rules' formulas, so that a rule that loses relevance shows.
"""

import gc

import pytest
import torch
from torch import Tensor, nn

import rectgrad
from architectures import CASES, Case, prepared
from networks import NETWORKS

COMPOSITES = {
    "epsilon": {},
    "epsilon_plus_flat": {},
    "epsilon_alpha2_beta1_flat": {},
    "epsilon_gamma_box": {"low": -6.0, "high": 6.0},
    "zplus": {"epsilon": 0.1},
    "gamma": {},
    "deep_taylor": {},
}
VISION = [
    "resnet", "densenet", "densenet, checkpointed", "inception", "mobilenet v2", "mobilenet v3",
    "efficientnet", "shufflenet", "convnext", "nfnet", "u-net",
]  # fmt: skip
TOKENS = [
    "vit", "vit, attention by hand", "vit, nn.MultiheadAttention", "swin", "encoder, relu",
    "encoder, gelu, padded", "encoder, norm first, padded", "encoder, sequence first, padded",
    "encoder, as many tokens as samples",
]  # fmt: skip


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for i, (width, out) in enumerate([(3, 6), (6, 6), (6, 8), (8, 8)]):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2, 2)] * (i % 2)
    head = nn.Linear(128, 20), nn.ReLU(True), nn.Dropout(), nn.Linear(20, 5)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), *head)


ALL = {"vgg": Case(vgg), **CASES}


def conserved(model: nn.Module, inputs: tuple[Tensor, ...], kwargs: dict, target, method: str, **options):
    kept = rectgrad.record(model, inputs, forward_kwargs=kwargs)
    maps = kept.attribute(method, target, **options)
    found = kept.trace.conservation
    at_input = sum(m.flatten(1).sum(1) for m in maps)
    torch.testing.assert_close(found.at_input, at_input, rtol=1e-9, atol=1e-12)
    assert (found.error.abs() <= 1e-10 * found.score.abs().clamp(min=1)).all(), found
    return found


@pytest.mark.filterwarnings("ignore:the relevance of sample")
@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("name", ["vgg", *VISION])
def test_composites_conserve_relevance(name, composite):
    model, inputs, kwargs = prepared(ALL[name])
    options = {"composite": composite, **COMPOSITES[composite]}
    found = conserved(model, inputs, kwargs, ALL[name].target, "lrp", **options)
    absorbed = found.biases.abs() + found.stabilisers.abs()
    assert (absorbed > 1e-6 * found.score.abs()).all()  # there is something to account for


@pytest.mark.parametrize("name", ["vgg", *TOKENS])
@pytest.mark.parametrize("epsilon", [1e-6, 0.01])
def test_attention_conserves_relevance(name, epsilon):
    model, inputs, kwargs = prepared(ALL[name])
    conserved(model, inputs, kwargs, ALL[name].target, "attn_lrp", epsilon=epsilon)


@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("name", ["strided", "activations", "division", "shared", "two_inputs", "conv3d"])
def test_every_kind_of_step_conserves_relevance(name, composite):
    model, inputs = NETWORKS[name](0)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    conserved(model, inputs, {}, None, "lrp", composite=composite, **COMPOSITES[composite])


def test_elementary_functions_pass_relevance_unchanged():
    def model(x: Tensor) -> Tensor:
        y = (x @ weight).exp() + (x @ weight).square() - 1 / (2 + (x @ weight).abs())
        return torch.stack([y.sum(1), y.sqrt().sum(1)], 1)

    weight = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).double()
    for target in (0, 1):
        conserved(model, (torch.rand(3, 5).double(),), {}, target, "lrp", composite="epsilon")


def test_the_account_of_a_linear_layer():
    """score = x w + b: the bias keeps its share, and epsilon 0.1 of 2.1 + 0.1."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.5]]))
        model.bias.fill_(0.1)
    kept = rectgrad.record(model, torch.tensor([[1.0, 2.0]]).double())
    kept.attribute("lrp", composite="epsilon", epsilon=0.1)
    found, share = kept.trace.conservation, 2.1 / 2.2
    assert found.score.tolist() == pytest.approx([2.1])
    assert found.at_input.tolist() == pytest.approx([2 * share])
    assert found.biases.tolist() == pytest.approx([0.1 * share])
    assert found.stabilisers.tolist() == pytest.approx([0.1 * share])


def test_samples_in_other_dimensions_have_accounts_of_their_own():
    model, x = NETWORKS["folded"](0)
    kept = rectgrad.record(model, x)
    kept.attribute("lrp", target=1)
    found = kept.trace.conservation
    assert found.score.tolist() == pytest.approx(model(x)[:, 1].tolist())
    assert found.error.abs().max() < 1e-12


def test_it_belongs_to_lrp_on_a_record():
    model, inputs, _ = prepared(ALL["vgg"])
    kept = rectgrad.record(model, inputs[0])
    kept.attribute("saliency", target=1)
    assert kept.trace.conservation is None
    kept.attribute("lrp", target=1)
    trace = kept.trace
    del kept
    gc.collect()
    with pytest.raises(RuntimeError, match="the record was deleted"):  # not held for this
        _ = trace.conservation.score


def test_it_is_that_of_the_last_method():
    model, inputs, _ = prepared(ALL["vgg"])
    kept = rectgrad.record(model, inputs[0])
    scores = []
    for target in (1, 3):
        kept.attribute("lrp", target=target)
        scores.append(kept.trace.conservation.score)
    assert torch.equal(torch.stack(scores, 1), model(inputs[0]).detach()[:, [1, 3]])
    kept.attribute("excitation_backprop", target=1)
    assert kept.trace.conservation is None
