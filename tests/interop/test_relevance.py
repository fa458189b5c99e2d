"""LRP and AttnLRP against autoLRP and LXT, where they share ground; docs/methods.md says where they do not.

autoLRP starts with a relevance of 1, so its maps are multiplied by the score. It gives a bias its share by
size, so layers have none here; its sums and norms get the formulas of the paper as functions of our own.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad.kernels.relevance_ops import Composite
from rectgrad.methods.lrp import Relevance
from rectgrad.rules import lrp_rules

EPSILON = 1e-12


def assert_agree(maps: Tensor, theirs: Tensor) -> None:
    for given, right in zip(maps, theirs.detach(), strict=True):
        error = float((given - right).abs().max() / right.abs().max())
        assert error < 1e-5, f"differs by {error:.1e} of the largest value"


# --- autoLRP -----------------------------------------------------------------------------------------------


def by_autolrp(call: Callable[[Tensor], Tensor], x: Tensor, target: int, rule: dict) -> Tensor:
    autolrp = pytest.importorskip("autolrp")
    maps = []
    for sample in x.split(1):
        wrapped = autolrp.tensor(sample)
        score = call(wrapped)[0, target]
        value = float(score.detach())
        score.lrp(config=autolrp.LRPConfig(rule=rule, eps=EPSILON))
        maps.append(wrapped.relevance.detach().as_subclass(Tensor) * value)
    return torch.cat(maps)


def vgg() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    widths, layers = [(3, 8), (8, 8), (8, 12), (12, 12)], []
    for i, (width, out) in enumerate(widths):
        layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (i % 2)
    head = nn.Linear(192, 20, bias=False), nn.ReLU(), nn.Linear(20, 7, bias=False)
    return nn.Sequential(*layers, nn.Flatten(), *head).double().eval(), torch.randn(3, 3, 16, 16).double()


class Everywhere(Relevance):
    """One rule in every convolution, another in every dense layer."""

    def __init__(self, convolution: str, dense: str) -> None:
        object.__setattr__(self, "names", (convolution, convolution, dense))

    def rules(self):
        return lrp_rules(Composite(*self.names, EPSILON, gamma=0.25))


AUTOLRP = {
    "epsilon": "epsilon",
    "zplus": "zplus",
    "gamma": ("gamma", {"gamma": 0.25}),
    "alpha2_beta1": ("alpha_beta", {"alpha": 2.0, "beta": 1.0}),
}


@pytest.mark.parametrize("dense", ["epsilon", "zplus", "gamma"])
@pytest.mark.parametrize("convolution", AUTOLRP)
def test_rules_agree_with_autolrp(convolution, dense):
    autolrp = pytest.importorskip("autolrp")
    (model, x), target = vgg(), 2
    rule = {**autolrp.BASE, "ConvolutionBackward": AUTOLRP[convolution]}
    rule |= dict.fromkeys(("AddmmBackward", "MmBackward"), AUTOLRP[dense])
    maps = rectgrad.attribute(model, x, Everywhere(convolution, dense), target=target)
    assert_agree(maps, by_autolrp(model, x, target, rule))


def away_from_zero(z: Tensor) -> Tensor:
    return z + EPSILON * torch.where(z >= 0, 1.0, -1.0)


def epsilon_add(a: Tensor, b: Tensor, R: Tensor, eps: float, *_, attribute: str = "both") -> tuple:
    share = R / away_from_zero(a + b)
    return a * share, b * share


def epsilon_layer_norm(x: Tensor, y: Tensor, R: Tensor, eps: float, *, weight, bias, rstd, **_) -> Tensor:
    """The deviation is a constant; centring is a linear map."""
    with torch.enable_grad():
        leaf = x.detach().as_subclass(Tensor).requires_grad_()
        out = (leaf - leaf.mean(-1, keepdim=True)) * rstd.detach() * weight.detach() + bias.detach()
        (grad,) = torch.autograd.grad(out, leaf, R / away_from_zero(out.detach()))
    return leaf.detach() * grad


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def unsettled(model: nn.Module) -> nn.Module:
    """Weights that carry a signal, norms that are not fresh, and layers without biases."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, 0, 0.3)
            nn.init.zeros_(module.bias)
    return model.double().eval()


def vit() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SIZES, image_size=24, patch_size=8, num_labels=5)
    model = unsettled(transformers.ViTForImageClassification(config))
    return lambda x: model(x).logits, torch.randn(2, 3, 24, 24).double()


def bert() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, vocab_size=30, max_position_embeddings=16, num_labels=5)
    model = unsettled(transformers.BertForSequenceClassification(config))
    return lambda x: model(inputs_embeds=x).logits, torch.randn(2, 7, 16).double()


@pytest.mark.parametrize("make", [vit, bert])
def test_attn_lrp_agrees_with_autolrp(make):
    autolrp = pytest.importorskip("autolrp")
    torch.manual_seed(0)
    call, x = make()
    norms = autolrp.on(autolrp.LAYERNORM_NODES, epsilon_layer_norm)
    rule = {**autolrp.BASE, **autolrp.ATTNLRP, "AddBackward": epsilon_add, **norms}
    maps = rectgrad.attribute(call, x, "attn_lrp", target=1, epsilon=EPSILON)
    assert_agree(maps, by_autolrp(call, x, 1, rule))


# --- LXT ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block; `lxt` runs it with LXT's functions, whose backward pass is AttnLRP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.qkv, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(self.norm1(x)) for layer in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, scale=1.0))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0])

    def lxt(self, x: Tensor) -> Tensor:
        from lxt.explicit import functional as lf
        from lxt.explicit.rules import identity

        def linear(layer: nn.Linear, x: Tensor) -> Tensor:
            return lf.linear_epsilon(x, layer.weight, layer.bias, EPSILON)

        def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
            return lf.layer_norm_grad_fn.apply(x, layer.weight, layer.bias, layer.eps, EPSILON)

        query, key, value = (linear(layer, norm(self.norm1, x)) for layer in self.qkv)
        weights = lf.softmax(lf.matmul(query, key.transpose(1, 2), epsilon=EPSILON), -1)
        mixed = lf.matmul(weights, value, epsilon=EPSILON)
        x = lf.add2(x, linear(self.out, mixed), epsilon=EPSILON)
        hidden = identity(F.gelu, linear(self.up, norm(self.norm2, x)))
        x = lf.add2(x, linear(self.down, hidden), epsilon=EPSILON)
        return linear(self.head, x[:, 0])


@pytest.mark.parametrize("seed", range(3))
def test_attn_lrp_agrees_with_lxt(seed):
    pytest.importorskip("lxt.explicit.rules")
    torch.manual_seed(seed)
    model, x = Block().double().eval(), torch.randn(2, 5, 8).double()
    maps = rectgrad.attribute(model, x, "attn_lrp", target=2, epsilon=EPSILON)
    leaf = x.clone().requires_grad_()
    scores = model.lxt(leaf)[:, 2]
    (theirs,) = torch.autograd.grad(scores, leaf, scores.detach())
    assert_agree(maps, theirs)
