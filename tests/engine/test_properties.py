"""What holds for any network, any input and any options, on networks that are drawn at random.

A `Plan` is data that a failing example prints whole: `Drawn(plan)` is its network. float32 and float64 here;
half types, which many CPU kernels of torch lack, have test_api_types.py. Claims 1 and 2 to the last bit are
in rules/test_claims.py, the fixed networks against the reference in methods/test_networks.py.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rectgrad
from every_method import ANY_NETWORK, POSITIONS, QUICK
from networks import unsettle
from reference import reference_attribute, tau_of
from untouched import untouched

pytestmark = [
    pytest.mark.filterwarnings("ignore:the map of sample"),  # a small layer at a high q
    pytest.mark.filterwarnings("ignore:the relevance of sample"),  # a score near zero
]

properties = settings(max_examples=100, deadline=None)

# --- networks ----------------------------------------------------------------------------------------------

CONVS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLS = {
    "max": (None, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    "average": (None, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
}


def in_place_unused(x: Tensor) -> Tensor:
    x.relu_()
    return x


SPELLINGS = {
    "functional": F.relu,
    "functional in place": lambda x: F.relu(x, inplace=True),
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
    "in place, result unused": in_place_unused,
    "clamp": lambda x: x.clamp(min=0),
    "functional relu6": F.relu6,
}
MODULES = {"module": nn.ReLU, "module in place": lambda: nn.ReLU(inplace=True), "module relu6": nn.ReLU6}


@dataclass(frozen=True)
class Layer:
    activation: str = "module"
    kernel: int = 1
    stride: int = 1
    padded: bool = False
    norm: bool = False
    dropout: bool = False
    residual: str | None = None  # the sum comes before or after the activation
    pool: str | None = None


@dataclass(frozen=True)
class Plan:
    """dims: 0 for linear layers, else the convolutions'. classes: 1 gives outputs (N, 1)."""

    dims: int
    width: int
    side: int
    classes: int
    layers: tuple[Layer, ...]
    averaged: bool  # over positions before the last layer, which is flattened otherwise
    seed: int

    def shape(self) -> tuple[int, ...]:
        """Of one sample; no two axes are equal, lest they be mistaken for each other."""
        return (self.width, *(self.side + axis for axis in range(self.dims)))


class Block(nn.Module):
    """A linear map, perhaps normalised, an activation, perhaps a sum, dropout and pooling around it."""

    def __init__(self, plan: Plan, layer: Layer, sides: list[int], shared: nn.Module):
        super().__init__()
        self.spelling, self.residual, self.straight = layer.activation, layer.residual, False
        self.activation = shared if layer.activation == "reused" else MODULES.get(layer.activation, nn.ReLU)()
        if plan.dims == 0:
            self.linear: nn.Module = nn.Linear(plan.width, plan.width)
        else:
            kernel = min(layer.kernel, *sides)
            pad = kernel // 2 if layer.padded else 0
            self.linear = CONVS[plan.dims](plan.width, plan.width, kernel, layer.stride, pad)
        self.norm = NORMS[plan.dims](plan.width) if layer.norm else nn.Identity()
        self.dropout = nn.Dropout() if layer.dropout else nn.Identity()
        after = [self._after(side) for side in sides]
        if after != sides:
            self.residual = None
        pooled = layer.pool is not None and plan.dims > 0 and min(after) >= 2
        self.pool = POOLS[layer.pool][plan.dims](2) if pooled else nn.Identity()
        self.sides = [side // 2 for side in after] if pooled else after

    def _after(self, side: int) -> int:
        kernel, stride, pad = (getattr(self.linear, n)[0] for n in ("kernel_size", "stride", "padding"))
        return (side + 2 * pad - kernel) // stride + 1

    def rectified(self, x: Tensor) -> Tensor:
        if self.straight:  # the values of a rectifier, the gradient of none
            return x + (self.activation(x.clone()) - x).detach()
        return SPELLINGS.get(self.spelling, self.activation)(x)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x))
        if self.residual == "before":
            out += x
        out = self.rectified(out)
        if self.residual == "after":
            out = out + x
        return self.pool(self.dropout(out))


class Drawn(nn.Module):
    def __init__(self, plan: Plan):
        super().__init__()
        self.averaged = plan.averaged and plan.dims > 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            self.shared, sides, blocks = nn.ReLU(), list(plan.shape()[1:]), []
            for layer in plan.layers:
                blocks.append(Block(plan, layer, sides, self.shared))
                sides = blocks[-1].sides
            self.blocks = nn.Sequential(*blocks)
            positions = 1 if self.averaged else torch.Size(sides).numel()
            self.head = nn.Linear(plan.width * positions, plan.classes)
            self.apply(unsettle)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x).flatten(2) if self.averaged else self.blocks(x).flatten(1)
        return self.head(x.mean(2) if self.averaged else x)


layers = st.builds(
    Layer,
    activation=st.sampled_from([*MODULES, *SPELLINGS, "reused"]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padded=st.booleans(),
    norm=st.booleans(),
    dropout=st.booleans(),
    residual=st.sampled_from([None, "before", "after"]),
    pool=st.sampled_from([None, *POOLS]),
)
SIDES = {0: 1, 1: 12, 2: 7, 3: 4}  # the longest of a sample: the reference goes unit by unit


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dims = draw(st.integers(0, 3))
    return Plan(
        dims,
        width=draw(st.integers(1, 20 if dims == 0 else 4)),
        side=draw(st.integers(1, SIDES[dims])),
        classes=draw(st.integers(1, 4)),
        layers=tuple(draw(st.lists(layers, min_size=1, max_size=3))),
        averaged=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def batch(plan: Plan, n: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Drawn, Tensor]:
    generator = torch.Generator().manual_seed(plan.seed + 1)
    return Drawn(plan).to(dtype), torch.randn(n, *plan.shape(), generator=generator, dtype=dtype)


dtypes = st.sampled_from([torch.float32, torch.float64])

# --- methods and options -----------------------------------------------------------------------------------

Ask = tuple[str, dict[str, Any]]
RECTGRAD = {
    "q": st.floats(1, 100) | st.sampled_from([0.0, 50.0, 98.0, 100.0]),
    "tau": st.none() | st.floats(-1, 1) | st.sampled_from([-float("inf"), 0.0]),
    "rule": st.sampled_from(["PR1", "PR2", "PR3", "PR4", "mod"]),
    "interpolation": st.sampled_from(["nearest", "linear"]),
}
FLAGS = ("padding_trick", "prr", "multiply_by_input", "positive_only")
rectgrads = st.tuples(
    st.just("rectgrad"), st.fixed_dictionaries({}, optional=RECTGRAD | dict.fromkeys(FLAGS, st.booleans()))
)
FEW: dict[str, dict[str, Any]] = QUICK | {"integrated_gradients": {"steps": 3}}
others = st.sampled_from([(name, FEW.get(name, {})) for name in ANY_NETWORK if "rectgrad" not in name])
RANDOM = ("smoothgrad", "random", "expected_gradients", "rise")
asks = rectgrads | others


def assert_near(maps: Tensor, expected: Tensor) -> None:
    """To rounding in float64, of the largest value."""
    assert maps.shape == expected.shape
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-8 * max(float(expected.abs().max()), 1e-6))


def decided(model: nn.Module, x: Tensor, ask: Ask) -> bool:
    """No score lies within rounding of tau, where a unit may fall on either side."""
    name, options = ask
    if name != "rectgrad":
        return True
    margins: list[float] = []
    reference_attribute(model, x, name, 0, margins=margins, **options)
    return min(margins, default=1.0) > 1e-9


# --- the properties ----------------------------------------------------------------------------------------


@properties
@given(plan=plans(), n=st.integers(0, 3), dtype=dtypes, ask=asks)
def test_a_map_has_the_inputs_shape_and_type_and_is_finite(
    plan: Plan, n: int, dtype: torch.dtype, ask: Ask
) -> None:
    model, x = batch(plan, n, dtype)
    maps = rectgrad.attribute(model, x, ask[0], **ask[1])
    assert (maps.shape, maps.dtype) == (x.shape, x.dtype)
    assert not maps.requires_grad
    assert maps.isfinite().all()
    if ask[0] == "rectgrad" and ask[1].get("positive_only", True):
        assert (maps >= 0).all()


@properties
@given(plan=plans(), dtype=dtypes, ask=asks)
def test_the_same_call_gives_the_same_bits(plan: Plan, dtype: torch.dtype, ask: Ask) -> None:
    """Also from a second network with the same weights, and whatever was drawn from torch in between."""
    model, x = batch(plan, 2, dtype)
    maps = rectgrad.attribute(model, x, ask[0], **ask[1])
    assert torch.equal(rectgrad.attribute(model, x, ask[0], **ask[1]), maps)
    torch.rand(1)
    assert torch.equal(rectgrad.attribute(Drawn(plan).to(dtype), x.clone(), ask[0], **ask[1]), maps)


@properties
@given(plan=plans(), n=st.integers(2, 3), ask=asks)
def test_a_batch_is_its_samples(plan: Plan, n: int, ask: Ask) -> None:
    model, x = batch(plan, n)
    assume(decided(model, x, ask))
    alone = [rectgrad.attribute(model, x[i : i + 1], ask[0], 0, **ask[1]) for i in range(n)]
    assert_near(rectgrad.attribute(model, x, ask[0], 0, **ask[1]), torch.cat(alone))
    assert_near(rectgrad.attribute(model, x, ask[0], 0, batch_size=2, **ask[1]), torch.cat(alone))


@properties
@given(plan=plans(), n=st.integers(1, 3), method=st.sampled_from(POSITIONS))
def test_class_maps_of_a_batch_are_those_of_its_samples(plan: Plan, n: int, method: str) -> None:
    """Also from a record; or the network has no positions for any of them."""
    model, x = batch(plan, n)
    try:
        maps = rectgrad.attribute(model, x, method, 0)
    except rectgrad.UnsupportedModelError:
        with pytest.raises(rectgrad.UnsupportedModelError):
            rectgrad.record(model, x).attribute(method, 0)
        return
    assert_near(maps, torch.cat([rectgrad.attribute(model, x[i : i + 1], method, 0) for i in range(n)]))
    assert_near(rectgrad.record(model, x).attribute(method, 0), maps)


@properties
@given(plan=plans(), ask=asks)
def test_a_record_gives_what_a_call_gives(plan: Plan, ask: Ask) -> None:
    model, x = batch(plan)
    assume(decided(model, x, ask))
    kept = rectgrad.record(model, x)
    assert torch.allclose(kept.outputs, model(x))
    kept.attribute("deconv", 0)  # one map must not change the next
    assert_near(kept.attribute(ask[0], 0, **ask[1]), rectgrad.attribute(model, x, ask[0], 0, **ask[1]))


@properties
@given(plan=plans(), dtype=dtypes)
def test_saliency_is_the_plain_gradient(plan: Plan, dtype: torch.dtype) -> None:
    model, x = batch(plan, 2, dtype)
    leaf = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(model(leaf)[:, 0].sum(), leaf)
    torch.testing.assert_close(rectgrad.attribute(model, x, "saliency", 0), plain)
    torch.testing.assert_close(rectgrad.attribute(model, x, "gradient_x_input", 0), plain * x)


@properties
@given(plan=plans(), rule=RECTGRAD["rule"], multiplied=st.booleans())
def test_a_tau_below_everything_passes_everything(plan: Plan, rule: str, multiplied: bool) -> None:
    """tau = -infinity: the gradient of the network whose rectifiers keep their values and pass all of R."""
    model, x = batch(plan)
    options = {"tau": -float("inf"), "padding_trick": False, "positive_only": False}
    maps = rectgrad.attribute(model, x, "rectgrad", 0, rule=rule, multiply_by_input=multiplied, **options)
    for block in model.blocks:
        block.straight = True
    leaf = x.clone().requires_grad_()
    (straight,) = torch.autograd.grad(model(leaf)[:, 0].sum(), leaf)
    assert_near(maps, straight * x if multiplied else straight)


@properties
@given(plan=plans())
def test_tau_zero_is_guided_backprop(plan: Plan) -> None:
    """Claim 2, for every spelling of ReLU and for ReLU6."""
    model, x = batch(plan)
    guided = rectgrad.attribute(model, x, "guided_backprop", 0, multiply_by_input=True)
    maps = rectgrad.attribute(model, x, "rectgrad", 0, tau=0.0, padding_trick=False)
    assert_near(maps, guided.clamp(min=0))


@properties
@given(plan=plans(), ask=asks, frozen=st.booleans(), fails=st.booleans())
def test_nothing_is_left_behind(plan: Plan, ask: Ask, frozen: bool, fails: bool) -> None:
    model, x = batch(plan)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.blocks.requires_grad_(not frozen)
    model.seen = []
    model.head.register_forward_hook(lambda module, given, out: model.seen.append(out))
    with untouched(model, x):
        try:
            rectgrad.attribute(model, x, ask[0], plan.classes if fails else 0, **ask[1])
        except (ValueError, IndexError):
            assert fails


@properties
@given(plan=plans(), ask=rectgrads | others.filter(lambda ask: ask[0] not in RANDOM))
def test_maps_are_those_of_the_reference(plan: Plan, ask: Ask) -> None:
    model, x = batch(plan)
    assume(decided(model, x, ask))
    expected = reference_attribute(model, x, ask[0], 0, **ask[1])
    assert_near(rectgrad.attribute(model, x, ask[0], 0, **ask[1]), expected)


@properties
@given(
    d=st.integers(1, 60),
    qs=st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted),
    rule=st.sampled_from(["PR1", "PR2", "PR3", "PR4"]),
    interpolation=RECTGRAD["interpolation"],
    seed=st.integers(0, 2**31),
)
def test_a_higher_q_passes_no_other_units(
    d: int, qs: list[float], rule: str, interpolation: str, seed: int
) -> None:
    """At one layer whose scores do not depend on q. Below it a layer may pass more: other R arrives there."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(1, d, generator=generator, dtype=torch.float64) for _ in range(2))
    a = x.clamp(min=0)
    scores = {"PR1": a * weight, "PR2": (a * weight).abs(), "PR3": a, "PR4": weight}[rule].flatten().tolist()

    def passed(q: float) -> Tensor:
        options = {"rule": rule, "interpolation": interpolation, "multiply_by_input": False}
        method = rectgrad.RectGrad(q=q, positive_only=False, **options)  # a q below 1 needs an instance
        maps = rectgrad.attribute(lambda x: F.relu(x) @ weight.T, x, method)
        return maps != 0

    low, high = map(passed, qs)
    assert (low | ~high).all()
    if interpolation == "nearest":
        assert int(high.sum()) == sum(s > tau_of(scores, qs[1]) for s in scores)


def test_the_networks_are_what_they_say() -> None:
    """The strategy's own: blocks keep their parts, and a straight block has a rectifier's values."""
    layer = Layer("reused", 3, 1, True, True, True, "before", "max")
    plan = Plan(2, 3, 6, 4, (layer, replace(layer, residual="after", pool="average")), False, 0)
    model, x = batch(plan)
    assert [block.residual for block in model.blocks] == ["before", "after"]
    assert [type(block.pool) for block in model.blocks] == [nn.MaxPool2d, nn.AvgPool2d]
    assert all(block.activation is model.shared for block in model.blocks)
    before = model(x)
    for block in model.blocks:
        block.straight = True
    assert torch.allclose(model(x), before)


def test_a_layer_of_one_weight_is_no_division_by_six() -> None:
    """A ReLU6 of which a sixth is read is a gate; one that a linear layer reads is none, with any weight."""
    model, x = nn.Sequential(nn.Linear(1, 1), nn.ReLU6(), nn.Linear(1, 1)).eval(), torch.ones(1, 1)
    nn.init.ones_(model[0].weight)
    nn.init.constant_(model[2].weight, 1 / 6)
    expected = rectgrad.attribute(model, x, "deconv")
    assert torch.equal(rectgrad.record(model, x).attribute("deconv"), expected)
