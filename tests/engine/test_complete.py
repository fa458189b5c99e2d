"""What a map claims about itself: DeepLIFT's sums, epsilon-LRP's, and the sentences about a model.

DeepLIFT's map sums to the difference of the outputs also through norms and cosine attention, and where a
module caches tensors. Where epsilon-LRP's relevance explodes, a warning gives both sums. Recurrent networks
and `vmap` are refused by name, and a model is said to be in training mode only where that changes its output.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad import UnsupportedModelError

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().to(dtype).eval()
        last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
        last.weight.data *= 4  # scores of several units, as a classifier's
        return model


def noise(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def incompleteness(model: nn.Module, x: Tensor, baseline: Any) -> float:
    """The difference of the sums, relative to the difference of the outputs or 1."""
    maps = rectgrad.attribute(model, x, "deeplift", target=1, baseline=baseline)
    with torch.no_grad():
        other = torch.zeros_like(x) + baseline
        difference = (model(x)[:, 1] - model(other)[:, 1]).double()
    assert float(difference.abs().max()) > 1e-4
    error = (maps.double().flatten(1).sum(1) - difference).abs()
    return float((error / difference.abs().clamp(min=1)).max())


# --- DeepLIFT through norms --------------------------------------------------------------------------------


def vectors(function: Callable[[Tensor], Tensor], bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8, bias=bias), Apply(function), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3)
    )


def images(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        Apply(function),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


ORDERS = {"1": 1, "2": 2, "3": 3, "inf": math.inf}
# A small eps is met by zero vectors alone, a middle one by some of the vectors, a large one by all.
EPS = {"small": 1e-12, "middle": 2.0, "large": 100.0}
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x * x.norm(dim=1, keepdim=True),
    "method_order_1": lambda x: x / (x.norm(1, dim=1, keepdim=True) + 0.5),
    "method_order_3": lambda x: x / (x.norm(p=3, dim=1, keepdim=True) + 0.5),
    "method_max": lambda x: x / (x.norm(p=math.inf, dim=1, keepdim=True) + 0.5),
    "method_frobenius": lambda x: x / (x.norm(p="fro", dim=-1, keepdim=True) + 0.5),
    "divided": lambda x: x / x.norm(dim=-1, keepdim=True),
    "clamped": lambda x: x / x.norm(dim=1, keepdim=True).clamp(min=2.0),
    "function": lambda x: x / (torch.norm(x, dim=1, keepdim=True) + 0.5),
    "function_order_1": lambda x: x * torch.norm(x, 1, 1, True),
    "linalg": lambda x: x * torch.linalg.norm(x, dim=1, keepdim=True),
    "vector": lambda x: x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 0.5),
    "vector_order_1": lambda x: x * torch.linalg.vector_norm(x, 1, dim=1, keepdim=True),
    "vector_order_half": lambda x: x / (torch.linalg.vector_norm(x, 0.5, dim=1, keepdim=True) + 1),
    "vector_max": lambda x: x / (torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True) + 0.5),
    "not_kept": lambda x: x + torch.linalg.vector_norm(x, dim=1).unsqueeze(1),
    "all_but_the_samples": lambda x: x / x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1)),
}
BASELINES: dict[str, Callable[[Tensor], Any]] = {
    "zero": lambda x: 0.0,
    "number": lambda x: 0.4,
    "tensor": lambda x: noise(*x.shape, dtype=x.dtype, seed=2),
    "opposite": lambda x: -x,
    "near": lambda x: x * 0.9,
}


@DTYPES
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("order", ORDERS)
def test_normalize(order: str, eps: str, baseline: str, dtype: torch.dtype) -> None:
    def function(h: Tensor) -> Tensor:
        return F.normalize(h, p=ORDERS[order], dim=1, eps=EPS[eps])

    x = 2 * noise(3, 6, dtype=dtype)
    model = seeded(lambda: vectors(lambda h: 50 * function(h) if eps == "large" else 3 * function(h)), dtype)
    assert incompleteness(model, x, BASELINES[baseline](x)) < 1e-4


@DTYPES
@pytest.mark.parametrize("order", ORDERS)
def test_normalize_images(order: str, dtype: torch.dtype) -> None:
    model = seeded(lambda: images(lambda h: 3 * F.normalize(h, p=ORDERS[order])), dtype)
    x = noise(2, 2, 6, 6, dtype=dtype)
    assert incompleteness(model, x, noise(2, 2, 6, 6, dtype=dtype, seed=2)) < 1e-4


@DTYPES
@pytest.mark.parametrize("order", ORDERS)
def test_normalize_from_a_zero_vector(order: str, dtype: torch.dtype) -> None:
    """Without biases the baseline's features are all zero, where a norm has no derivative."""
    model = seeded(lambda: vectors(lambda h: 3 * F.normalize(h, p=ORDERS[order]), bias=False), dtype)
    assert incompleteness(model, 2 * noise(3, 6, dtype=dtype), 0.0) < 1e-4


@DTYPES
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, baseline: str, dtype: torch.dtype) -> None:
    model, x = seeded(lambda: vectors(NORMS[name]), dtype), 2 * noise(3, 6, dtype=dtype)
    assert incompleteness(model, x, BASELINES[baseline](x)) < 1e-4


@DTYPES
@pytest.mark.parametrize("function", [torch.norm, torch.linalg.norm, torch.linalg.vector_norm, Tensor.norm])
def test_a_norm_of_everything(function: Callable, dtype: torch.dtype) -> None:
    """One sample at a time, since it mixes the samples of a batch."""
    model = seeded(lambda: vectors(lambda h: 3 * h / function(h)), dtype)
    for seed in range(3):
        assert incompleteness(model, 2 * noise(1, 6, dtype=dtype, seed=seed), 0.4) < 1e-4


# --- DeepLIFT through attention ----------------------------------------------------------------------------


class CosineAttention(nn.Module):
    """As in Swin Transformer V2: attention by the cosine of queries and keys, with a learned temperature."""

    def __init__(self, heads: int = 2, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads
        self.logit_scale = nn.Parameter(torch.tensor([1.0, 9.0]).view(heads, 1, 1))  # the second is clamped

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attention = attention * torch.clamp(self.logit_scale, max=math.log(10.0)).exp()
        return (attention.softmax(-1) @ v).transpose(1, 2).flatten(2)


class LinearNorm(nn.Sequential):
    """A linear layer and a batch norm, for which the tokens are folded into the batch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs))
        self[1].running_mean.normal_()
        self[1].running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        return self[1](x.flatten(0, 1)).reshape_as(x)


class CachedBiasAttention(nn.Module):
    """As in LeViT: in eval mode the first forward pass caches the gathered biases in a dict of the module."""

    def __init__(self, tokens: int = 5, heads: int = 2, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.heads = LinearNorm(width, 3 * width), heads
        self.proj = nn.Sequential(nn.Hardswish(), LinearNorm(width, width))
        self.attention_biases = nn.Parameter(torch.randn(heads, tokens))
        at = torch.arange(tokens)
        self.register_buffer("indices", (at[:, None] - at).abs(), persistent=False)
        self.cache: dict[str, Tensor] = {}

    def biases(self, device: torch.device) -> Tensor:
        if self.training:
            return self.attention_biases[:, self.indices]
        if str(device) not in self.cache:
            self.cache[str(device)] = self.attention_biases[:, self.indices]
        return self.cache[str(device)]

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).view(n, tokens, self.heads, -1).split(width // self.heads, dim=3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        attention = (q @ k / 2 + self.biases(x.device)).softmax(-1)
        return x + self.proj((attention @ v).transpose(1, 2).reshape(n, tokens, width))


def transformer(attention: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    def make() -> nn.Module:
        layers = nn.Linear(6, 8), attention(), nn.Linear(8, 8), nn.ReLU(), attention()
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(40, 3))

    return seeded(make, dtype)


@DTYPES
@pytest.mark.parametrize("attention", [CosineAttention, CachedBiasAttention])
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("n", [1, 3])
def test_attention(n: int, baseline: str, attention: type[nn.Module], dtype: torch.dtype) -> None:
    model, x = transformer(attention, dtype), noise(n, 5, 6, dtype=dtype)
    assert incompleteness(model, x, BASELINES[baseline](x)) < 1e-4


METHODS: dict[str, dict[str, Any]] = {
    "rectgrad": {"q": 60.0},
    "rectgrad_mod": {"q": 60.0},
    "saliency": {},
    "gradient_x_input": {},
    "guided_backprop": {},
    "deconv": {},
    "epsilon_lrp": {},
    "deeplift": {},
    "integrated_gradients": {"steps": 3},
    "smoothgrad": {"samples": 2},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_does_not_change_the_map(method: str) -> None:
    """An empty one, one that is full, and one filled by another method give the same map, and stay so."""
    model, x = transformer(CachedBiasAttention, torch.float64), noise(2, 5, 6, dtype=torch.float64)
    empty = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    assert [m.cache for m in model if isinstance(m, CachedBiasAttention)] == [{}, {}]
    with torch.no_grad():
        model(x)
    kept = [m.cache["cpu"] for m in model if isinstance(m, CachedBiasAttention)]
    full = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    now = [m.cache["cpu"] for m in model if isinstance(m, CachedBiasAttention)]
    assert all(a is b for a, b in zip(kept, now, strict=True))
    torch.testing.assert_close(full, empty, rtol=0, atol=1e-12)
    with torch.enable_grad():
        fresh = transformer(CachedBiasAttention, torch.float64)
        fresh(x)  # the cached biases have a graph that leads to the parameter
    torch.testing.assert_close(
        rectgrad.attribute(fresh, x, method, target=1, **METHODS[method]), empty, rtol=0, atol=1e-12
    )
    assert all(p.grad is None for p in fresh.parameters())


# --- epsilon-LRP where relevance explodes ------------------------------------------------------------------


class SqueezeExcitation(nn.Module):
    """A gate for each channel. Its last bias nearly cancels the rest, so that relevance is divided by almost
    nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(pooled))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(6, 3)
        self.blocks = nn.Sequential(*[SqueezeExcitation(6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def exploding() -> tuple[nn.Module, Tensor]:
    model, x = seeded(Gated, torch.float64), noise(1, 2, 6, 6, dtype=torch.float64)
    for block in model.blocks:
        block.fc1.weight.data.abs_()  # so that its units are active
        block.fc2.weight.data.abs_().mul_(9)
        found: list[Tensor] = []
        handle = block.fc2.register_forward_hook(lambda _, __, output, found=found: found.append(output))
        with torch.no_grad():
            model(x)
            block.fc2.bias -= found[0].flatten() - 1e-5
        handle.remove()
    return model, x


def numbers_in(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?", text)]


def test_exploding_relevance_is_said() -> None:
    model, x = exploding()
    score = model(x)[0, 1].item()
    with pytest.warns(UserWarning, match="relevance|sum") as caught:
        maps = rectgrad.attribute(model, x, "epsilon_lrp", target=1)
    total = float(maps.sum())
    assert abs(total) > 1e4 * abs(score)
    (sentence,) = [str(each.message) for each in caught]
    found = numbers_in(sentence)
    assert any(n == pytest.approx(total, rel=0.05) for n in found), sentence
    assert any(n == pytest.approx(score, rel=0.05) for n in found), sentence
    layers = [name for name, module in model.named_modules() if name and not list(module.children())]
    assert any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", sentence) for name in layers), sentence


def test_ordinary_relevance_is_not_warned_about() -> None:
    model, x = seeded(Gated, torch.float64), noise(2, 2, 6, 6, dtype=torch.float64)
    for block in model.blocks:
        block.fc2.bias.data += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps = rectgrad.attribute(model, x, "epsilon_lrp", target=1)
    assert float(maps.abs().max()) > 0


# --- refusals ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(6, 8, num_layers=layers, nonlinearity="relu", batch_first=True)
        self.hidden, self.last = nn.Linear(8, 30), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.hidden(self.rnn(x)[0][:, -1])))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv"])
def test_a_recurrent_relu_is_refused(method: str, layers: int) -> None:
    model = seeded(lambda: Recurrent(layers), torch.float64)
    with pytest.raises(UnsupportedModelError, match=r"\bRNN\b"):
        rectgrad.attribute(model, noise(2, 4, 6, dtype=torch.float64), method, target=1)


@pytest.mark.parametrize("function", [torch.relu, F.relu, lambda t: t.clamp(min=0), F.silu])
@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv"])
def test_vmap_of_an_activation_is_refused(method: str, function: Callable) -> None:
    model = seeded(lambda: vectors(lambda h: torch.vmap(function)(h)), torch.float64)
    with pytest.raises(UnsupportedModelError, match="vmap"):
        rectgrad.attribute(model, noise(2, 6, dtype=torch.float64), method, target=1)


# --- training mode -----------------------------------------------------------------------------------------


def evaluated() -> nn.Module:
    layers = (
        nn.Conv2d(2, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(128, 3),
    )
    return seeded(lambda: nn.Sequential(*layers), torch.float64)


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "wrapped": lambda: nn.Sequential(evaluated()),
    "wrapped_twice": lambda: nn.Sequential(nn.Sequential(evaluated())),
    "new_gelu": lambda: nn.Sequential(evaluated(), nn.GELU()),
    "new_layers": lambda: nn.Sequential(nn.Identity(), evaluated(), nn.Flatten(), nn.Sigmoid()),
    "new_relu_inside": lambda: nn.Sequential(
        *[nn.ReLU() if i == 2 else m for i, m in enumerate(evaluated())]
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_flag_that_changes_nothing_is_not_warned_about(name: str, method: str) -> None:
    model, x = HARMLESS[name](), noise(2, 2, 6, 6, dtype=torch.float64)
    assert model.training
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    flags = [module.training for module in model.modules()]
    assert True in flags
    assert False in flags
    torch.testing.assert_close(
        maps, rectgrad.attribute(model.eval(), x, method, target=1, **METHODS[method]), rtol=0, atol=1e-12
    )


HARMFUL: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.3),
    "dropout_of_channels": lambda: nn.Dropout2d(0.3),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3),
    "batch_norm": lambda: nn.BatchNorm2d(8),
    "random_relu": lambda: nn.RReLU(),
}


@pytest.mark.parametrize("method", ["rectgrad", "saliency", "deeplift", "smoothgrad"])
@pytest.mark.parametrize("name", HARMFUL)
def test_a_layer_in_training_mode_is_warned_about(name: str, method: str) -> None:
    """Also where the model itself says that it is not in training mode."""
    layers = list(evaluated())
    model = nn.Sequential(*layers[:3], HARMFUL[name]().double(), *layers[3:])
    x = noise(2, 2, 6, 6, dtype=torch.float64)
    for flag in (True, False):
        model.training = flag
        with pytest.warns(UserWarning, match="training mode") as caught:
            rectgrad.attribute(model, x, method, target=1, **METHODS[method])
        assert sum("training mode" in str(each.message) for each in caught) == 1
