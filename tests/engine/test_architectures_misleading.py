"""Networks whose sizes, weights or masks mislead: as many tokens as samples, weights made before the call."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from architectures import CASES, OPTIONS, RULES, Case, Q, call, explicit_maps, maps, prepared, same, unsettled
from token_networks import Experts, tokens
from vision_networks import SqueezeExcitation, mobile

# DeepLIFT has no exact rule for the insides of a recurrent layer, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:DeepLIFT's map")


def alone(model: Any, x: Tensor, method: str, **options: Any) -> Tensor:
    """The maps of the samples, each explained by itself."""
    return torch.cat([rectgrad.attribute(model, x[i : i + 1], method, 0, **options) for i in range(len(x))])


@pytest.mark.parametrize("first", [[-1, -1], [1, -1]], ids=["one expert", "a token for each expert"])
def test_as_many_tokens_for_an_expert_as_samples(first: list[int]) -> None:
    """The first sample alone may look as if an expert's rows were samples: one row, one sample."""
    model = unsettled(Experts)
    model.gate = None
    x = torch.randn(4, 2, 8, dtype=torch.float64)
    signs = [[-1, -1], [1, 1], [1, -1], [-1, 1]]
    x[:, :, 0] = torch.tensor(sorted(signs, key=lambda each: each != first))

    def forward(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = flat[:, 0] > 0
        out = torch.zeros_like(flat)
        out[chosen], out[~chosen] = model.experts[0](flat[chosen]), model.experts[1](flat[~chosen])
        return model.head(out.view_as(x).mean(1))

    same(
        (rectgrad.attribute(forward, x, "rectgrad", 0, q=90),),
        (alone(forward, x, "rectgrad", q=90),),
    )


def test_an_exported_encoder_with_as_many_tokens_as_samples() -> None:
    case = CASES["encoder, as many tokens as samples"]
    model, inputs, kwargs = prepared(case)
    sizes = ({0: torch.export.Dim("n", min=1, max=9)},)
    exported = torch.export.export(model, inputs, dynamic_shapes=sizes).module()
    found = (maps(form, inputs, "rectgrad", case, kwargs, q=90.0) for form in (exported, model))
    same(*found)


class MaskedAttention(nn.Module):
    """Left padding under a causal mask: the first tokens attend to nothing, and torch makes that zeros (NaN
    before 2.5)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask[:, :2] = False
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.relu(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).mean(1))


@pytest.mark.parametrize("method", ["rectgrad", "epsilon_lrp", "deeplift"])
def test_tokens_that_attend_to_nothing(method: str) -> None:
    case = Case(MaskedAttention, tokens)
    model, inputs, _ = prepared(case)
    kept = rectgrad.record(model, inputs)
    outputs = model(*inputs).detach()
    torch.testing.assert_close(kept.outputs, outputs, equal_nan=True)
    finite = bool(outputs.isfinite().all())
    with contextlib.nullcontext() if finite else pytest.raises(ValueError, match="NaN"):
        kept.attribute(method, 0, **OPTIONS.get(method, {}))


@pytest.mark.parametrize("form", ["functional_call", "cached parametrisation"])
def test_weights_computed_before_the_call(form: str) -> None:
    case = CASES["parametrised weights"]
    model, inputs, kwargs = prepared(case)
    expected = maps(model, inputs, "epsilon_lrp", case, kwargs)
    if form == "functional_call":
        weights = {name: 1.0 * value for name, value in model.named_parameters()}
        found = maps(partial(call, model, weights), inputs, "epsilon_lrp", case, kwargs)
    else:
        with torch.nn.utils.parametrize.cached():
            model(*inputs)
            found = maps(model, inputs, "epsilon_lrp", case, kwargs)
    same(found, expected)


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deeplift"])
def test_a_slope_computed_before_the_call(method: str) -> None:
    """A PReLU is rectified, wherever its weight comes from."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 40), nn.PReLU(40), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    ).double()
    x = torch.randn(2, 6, dtype=torch.float64)
    weights = {name: 1.0 * value for name, value in model.named_parameters()}
    options = OPTIONS.get(method, {})
    expected = rectgrad.attribute(model.eval(), x, method, 0, **options)
    found = rectgrad.attribute(partial(call, model, weights), x, method, 0, **options)
    assert bool((expected != 0).any())
    same((found,), (expected,))


class CosineAttention(nn.Module):
    """Scores of normalised vectors, as in Swin V2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return self.head(F.relu(attn.softmax(-1) @ v + F.normalize(v, dim=-1)).mean(1))


def test_epsilon_lrp_of_normalised_vectors() -> None:
    case = Case(CosineAttention, tokens)
    model, inputs, kwargs = prepared(case)
    assert bool((maps(model, inputs, "epsilon_lrp", case, kwargs)[0] != 0).any())


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(6).roll(1, 0).to_sparse())
        self.fc, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc(x)).transpose(0, 1)
        mixed = torch.sparse.mm(self.adjacency, hidden.flatten(1)).view_as(hidden)
        return self.head(mixed.mean(0))


def test_a_graph_convolution_with_a_sparse_buffer() -> None:
    case = Case(GraphConvolution, tokens)
    found = maps(*prepared(case)[:2], "guided_backprop", case, {})
    same(found, explicit_maps(case, RULES["guided"][2]))


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv"])
@pytest.mark.parametrize("sixth", [lambda x: x / 6, lambda x: x * (1 / 6), lambda x: x.div_(6)])
def test_a_hard_sigmoid_written_with_relu6_is_no_rectifier(method: str, sixth: Any) -> None:
    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * sixth(F.relu6(x + 3))

    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * F.hardsigmoid(x)

    found = []
    for activation in (ByHand, Gated):
        case = Case(lambda act=activation: mobile(act, lambda: SqueezeExcitation(12, nn.ReLU, nn.Sigmoid)))
        model, inputs, kwargs = prepared(case)
        found.append(maps(model, inputs, method, case, kwargs)[0])
    # torch's own hard sigmoid is not exact to the last bits of float64
    assert (found[0] - found[1]).abs().max() <= 1e-6 * found[1].abs().max()


def test_layers_of_experts() -> None:
    """Each sample meets other experts: their layers do not pair up."""
    case = CASES["experts"]
    model, inputs, _ = prepared(case)
    with pytest.raises(ValueError, match="different paths"):
        rectgrad.layer_attributions(model, inputs, "rectgrad", 1, q=Q)
    pairs = rectgrad.layer_attributions(model, inputs[0][:1], "rectgrad", 1, q=Q)
    assert {name.split(".")[0] for name, _ in pairs} == {"experts"}
