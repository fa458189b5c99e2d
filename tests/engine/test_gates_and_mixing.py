"""Gates made of ReLU6, random states, calls at the same time, and samples that share a batch.

Each of these once depended on a detail that nothing tested: the divisor of a gate, numpy's generator, the
order in which threads finish, the size of a dimension.
"""

import random
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad.engine.backward import remember_bridged
from rectgrad.engine.op import Rule

ALL_PASS = {"tau": -1e30, "padding_trick": False, "multiply_by_input": False, "positive_only": False}
RECTIFYING: dict[str, dict[str, Any]] = {"rectgrad": ALL_PASS, "guided_backprop": {}, "deconv": {}}
METHODS: dict[str, dict[str, Any]] = {
    "rectgrad": {"q": 70.0},
    "rectgrad_prr": {"q": 70.0},
    "rectgrad_mod": {"q": 70.0},
    "saliency": {},
    "gradient_x_input": {},
    "guided_backprop": {},
    "deconv": {},
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 3},
    "epsilon_lrp": {},
    "deeplift": {},
}


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- gates of ReLU6 ----------------------------------------------------------------------------------------


class Gated(nn.Module):
    """head(relu(v) combined with what `gate` makes of g). All weights are positive, so that no rule stops
    anything and only the meaning of the ReLU6 decides what passes."""

    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)
        for i, p in enumerate(self.parameters()):
            p.data = uniform(*p.shape, seed=i)
        self.gate = gate
        self.eval()

    def forward(self, v: Tensor, g: Tensor) -> Tensor:
        return self.head(F.relu(self.gate(F.relu(self.a(v)), self.b(g))))


def two_inputs() -> tuple[Tensor, Tensor]:
    """The second makes gates below, on and at their ceiling: pre-activations of 0.1 to 12."""
    return uniform(3, 5, seed=20), torch.cat([uniform(1, 5, seed=21) / 9, uniform(2, 5, seed=22) * 4])


def plain_gradient(model: nn.Module) -> tuple[Tensor, ...]:
    v, g = (x.requires_grad_() for x in two_inputs())
    return torch.autograd.grad(model(v, g)[:, 1].sum(), (v, g))


def straight_through(z: Tensor) -> Tensor:
    """ReLU6 with the gradient of a rectifier that lets everything pass, also at the ceiling."""
    return z + (F.relu6(z) - z).detach()


def assert_same(maps: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for i, (x, y) in enumerate(zip(maps, expected, strict=True)):
        error = float((x - y).abs().max() / y.abs().max())
        assert error < 1e-6, f"the map of input {i} is wrong by {error:.2g} of its maximum"


# All of them are hard sigmoids.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda z: F.relu6(z + 3) / 6,
    "inplace": lambda z: F.relu6(z + 3, inplace=True) / 6.0,
    "module": lambda z: nn.ReLU6()(z + 3).div(6),
    "torch_div": lambda z: torch.div(F.relu6(z + 3), 6.0),
    "times_a_sixth": lambda z: F.relu6(z + 3) * (1 / 6),
    "a_sixth_times": lambda z: 0.16666667 * F.relu6(z + 3),
    "mul": lambda z: F.relu6(z.add(3)).mul(1.0 / 6.0),
    "div_in_place": lambda z: F.relu6(z + 3).div_(6),
}
# None of them is: rectifiers of which something else is read.
RECTIFIERS: dict[str, Callable[[Tensor, Callable], Tensor]] = {
    "four": lambda z, relu6: relu6(z) / 4,
    "five": lambda z, relu6: relu6(z + 3) / 5,
    "nearly_six": lambda z, relu6: relu6(z + 3) / 5.9,
    "more_than_six": lambda z, relu6: relu6(z + 3) / 6.1,
    "seven": lambda z, relu6: relu6(z + 3) / 7,
    "sixty": lambda z, relu6: relu6(z + 3) / 60,
    "times_six": lambda z, relu6: relu6(z + 3) * 6,
    "times_a_fifth": lambda z, relu6: relu6(z + 3) * 0.2,
    "alone": lambda z, relu6: relu6(z),
    "and_added_six": lambda z, relu6: relu6(z + 3) + 6,
    "six_divided_by_it": lambda z, relu6: 12 - 6 / relu6(z + 3),
}


def both(z: Tensor, relu6: Callable) -> Tensor:
    r = relu6(z + 3)
    return r / 6 + r


def both_the_other_way_round(z: Tensor, relu6: Callable) -> Tensor:
    r = relu6(z + 3)
    return r * r.detach() + r / 6


def sixth_and_quarter(z: Tensor, relu6: Callable) -> Tensor:
    r = relu6(z + 3)
    return r / 6 + r / 4


def also_a_view(z: Tensor, relu6: Callable) -> Tensor:
    r = relu6(z + 3)
    return r / 6 + r.flatten(1).unflatten(1, (2, -1)).flatten(1)


for read_twice in (both, both_the_other_way_round, sixth_and_quarter, also_a_view):
    RECTIFIERS[read_twice.__name__] = read_twice


def test_some_units_are_at_the_ceiling_and_some_are_not() -> None:
    z = Gated(lambda v, z: v).b(two_inputs()[1])
    assert bool((z > 6).any())
    assert bool(((z > 3) & (z < 5.9)).any())
    assert bool((z < 3).any())


@pytest.mark.parametrize("method", RECTIFYING)
@pytest.mark.parametrize("name", GATES)
def test_a_gate_keeps_its_derivative(name: str, method: str) -> None:
    """A sixth of a ReLU6 squashes: nothing passes at its ceiling."""
    model = Gated(lambda v, z: v * GATES[name](z))
    maps = rectgrad.attribute(model, two_inputs(), method, target=1, **RECTIFYING[method])
    assert_same(maps, plain_gradient(Gated(lambda v, z: v * F.hardsigmoid(z))))


@pytest.mark.parametrize("method", RECTIFYING)
@pytest.mark.parametrize("name", GATES)
def test_nothing_passes_where_all_gates_are_at_their_ceiling(name: str, method: str) -> None:
    model = Gated(lambda v, z: v * GATES[name](z + 9))
    v, g = rectgrad.attribute(model, two_inputs(), method, target=1, **RECTIFYING[method])
    assert bool((v > 0).all())
    assert bool((g == 0).all())


def test_a_gate_keeps_its_derivative_whatever_a_rule_reads() -> None:
    """Also where the rule for rectifiers asks for no tensors of the ReLU6."""

    class Clamped(rectgrad.GuidedBackprop):
        def rules(self) -> Any:
            return dict.fromkeys(("relu", "relu6"), Rule(lambda op, R: R.clamp(min=0), "own", reads="shapes"))

    maps = rectgrad.attribute(Gated(lambda v, z: v * (F.relu6(z + 3) / 6)), two_inputs(), Clamped(), target=1)
    assert_same(maps, plain_gradient(Gated(lambda v, z: v * F.hardsigmoid(z))))


@pytest.mark.parametrize("method", [method for method in METHODS if method != "epsilon_lrp"])
@pytest.mark.parametrize("name", GATES)
def test_a_gate_by_hand_is_a_hard_sigmoid(name: str, method: str) -> None:
    """With weights and inputs of both signs. Not for epsilon-LRP: the 3 that is added absorbs some."""

    def model(gate: Callable[[Tensor], Tensor]) -> nn.Module:
        made = Gated(lambda v, z: v * gate(z))
        for i, p in enumerate(made.parameters()):
            p.data = 2 * normal(*p.shape, seed=i)
        return made

    x = normal(3, 5, seed=20), 2 * normal(3, 5, seed=21)
    maps = rectgrad.attribute(model(GATES[name]), x, method, target=1, **METHODS[method])
    expected = rectgrad.attribute(model(F.hardsigmoid), x, method, target=1, **METHODS[method])
    for i, (each, other) in enumerate(zip(maps, expected, strict=True)):
        error = float((each - other).abs().max() / other.abs().max())
        assert error < 1e-6, f"the map of input {i} is wrong by {error:.2g} of its maximum"


@pytest.mark.parametrize("method", RECTIFYING)
@pytest.mark.parametrize("combine", [torch.add, torch.mul])
@pytest.mark.parametrize("name", RECTIFIERS)
def test_another_divisor_or_reader_makes_no_gate(name: str, combine: Callable, method: str) -> None:
    """A rectifier passes R itself, at its ceiling too."""

    def model(relu6: Callable) -> nn.Module:
        return Gated(lambda v, z: combine(v, RECTIFIERS[name](z, relu6)))

    maps = rectgrad.attribute(model(F.relu6), two_inputs(), method, target=1, **RECTIFYING[method])
    assert_same(maps, plain_gradient(model(straight_through)))


@pytest.mark.parametrize("name", RECTIFIERS)
def test_the_plain_gradient_of_a_rectifier(name: str) -> None:
    model = Gated(lambda v, z: v + RECTIFIERS[name](z, F.relu6))
    assert_same(rectgrad.attribute(model, two_inputs(), "saliency", target=1), plain_gradient(model))


# --- random states -----------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws from every global generator. Its noise is too small to matter."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(5, 60), nn.Linear(60, 3), fails

    def forward(self, x: Tensor) -> Tensor:
        drawn = np.random.randn(), np.random.rand(3).sum(), random.random(), random.gauss(0, 1)
        x = x + 1e-12 * (sum(drawn) + torch.randn_like(x))
        if self.fails:
            raise RuntimeError("as asked")
        return self.b(F.relu(self.a(x)))


def random_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def states_unchanged() -> Any:
    random.gauss(0, 1)  # keeps a second number for the next call: part of the state
    before = random_states()
    yield
    assert random_states() == before


@pytest.mark.parametrize("method", METHODS)
def test_random_states_are_restored(method: str) -> None:
    model, x = Drawing().double().eval(), normal(2, 5, seed=1)
    with states_unchanged():
        rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    with states_unchanged():
        rectgrad.attribute(model, x, method, target=1, batch_size=1, **METHODS[method])


def test_random_states_are_restored_by_the_other_calls() -> None:
    model, x = Drawing().double().eval(), normal(2, 5, seed=1)
    with states_unchanged():
        kept = rectgrad.record(model, x)
    with states_unchanged():
        kept.attribute("guided_backprop", target=1)
    with states_unchanged():
        rectgrad.layer_attributions(model, x, "saliency", target=1)


def test_random_states_are_restored_after_an_error() -> None:
    model, x = Drawing(fails=True).double().eval(), normal(2, 5, seed=1)
    with states_unchanged(), pytest.raises(RuntimeError, match="as asked"):
        rectgrad.attribute(model, x, "saliency")


def test_random_states_are_restored_after_a_target_that_draws() -> None:
    def target(outputs: Tensor) -> Tensor:
        np.random.rand(), random.random(), torch.rand(1)
        return outputs[:, 1]

    model, x = Drawing().double().eval(), normal(2, 5, seed=1)
    with states_unchanged():
        rectgrad.attribute(model, x, "saliency", target=target)


# --- calls at the same time --------------------------------------------------------------------------------

MEETING: dict[str, Callable[[nn.Module], None]] = {}  # what a thread, by its name, does in the forward pass
PATIENCE = 3.0  # seconds; a thread goes on if calls are serialised and the other cannot come


class Writing(nn.Module):
    """Writes on itself in the forward pass what some models do: attributes, buffers, flags, containers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.part = nn.Linear(5, 40), nn.Linear(40, 3), nn.Identity()
        self.register_buffer("calls", torch.zeros(()))
        self.name, self.log, self.table = "as found", ["as found"], {"key": "as found"}
        for i, p in enumerate(self.parameters()):
            p.data = normal(*p.shape, seed=i)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        MEETING.get(threading.current_thread().name, lambda _: None)(self)
        return self.b(h)

    def write(self) -> None:
        self.name = self.new = "written"
        self.log.append("written")
        self.table["key"] = "written"
        self.part.train()
        with torch.no_grad():
            self.calls += 1

    def state(self) -> tuple[Any, ...]:
        flags = [module.training for module in self.modules()]
        return self.name, hasattr(self, "new"), list(self.log), dict(self.table), flags, self.calls.item()


def run_together(model: Writing, x: Tensor, methods: dict[str, str]) -> dict[str, Any]:
    """One thread for each method, by name; their maps, or errors."""
    found: dict[str, Any] = {}

    def work(name: str, method: str) -> None:
        try:
            found[name] = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
        except Exception as error:
            found[name] = error
        finished[name].set()

    threads = [threading.Thread(target=work, args=each, name=each[0]) for each in methods.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


finished: dict[str, threading.Event] = {}
inside: dict[str, threading.Event] = {}


@pytest.fixture(autouse=True)
def fresh_meeting() -> Any:
    MEETING.clear()
    for name in ("first", "second", "third"):
        finished[name], inside[name] = threading.Event(), threading.Event()
    yield
    MEETING.clear()


PAIRS = pytest.mark.parametrize(
    "methods", [("rectgrad", "rectgrad"), ("saliency", "rectgrad"), ("guided_backprop", "deeplift")]
)


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@PAIRS
def test_a_call_that_ends_restores_nothing_under_another(methods: tuple[str, str]) -> None:
    """The first is inside and has written; the second comes and goes; what the first wrote is still there."""
    model, x = Writing().eval(), normal(2, 5, seed=9)
    before, seen = model.state(), []

    def first(model: Writing) -> None:
        if inside["first"].is_set():
            return  # a method that runs the model again
        model.write()
        written = model.state()
        inside["first"].set()
        finished["second"].wait(PATIENCE)
        seen.append(model.state() == written)

    def second(model: Writing) -> None:
        inside["first"].wait(PATIENCE)

    MEETING.update(first=first, second=second)
    found = run_together(model.double(), x, dict(zip(("first", "second"), methods, strict=True)))
    assert [type(value) for value in found.values()] == [Tensor, Tensor], found
    assert seen == [True]
    assert model.state() == before


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@pytest.mark.parametrize("fails", [None, "first", "second"])
@PAIRS
def test_the_model_is_as_found_when_the_last_call_ends(methods: tuple[str, str], fails: str | None) -> None:
    """The second comes while the first has written, and stays longer."""
    model, x = Writing().eval().double(), normal(2, 5, seed=9)
    before = model.state()

    def first(model: Writing) -> None:
        if not inside["first"].is_set():
            model.write()
            inside["first"].set()
            inside["second"].wait(PATIENCE)
        if fails == "first":
            raise RuntimeError("as asked")

    def second(model: Writing) -> None:
        if not inside["second"].is_set():
            inside["first"].wait(PATIENCE)
            inside["second"].set()
            finished["first"].wait(PATIENCE)
            model.write()
        if fails == "second":
            raise RuntimeError("as asked")

    MEETING.update(first=first, second=second)
    found = run_together(model, x, dict(zip(("first", "second"), methods, strict=True)))
    assert {name for name, value in found.items() if isinstance(value, Exception)} == {fails} - {None}
    assert model.state() == before
    assert isinstance(run_together(model, x, {"third": methods[1]})["third"], Tensor)
    assert model.state() == before


# --- samples that share a batch ----------------------------------------------------------------------------


class Mixing(nn.Module):
    """`between` sees features (N, T, F) and what it makes of them is read by a linear layer."""

    def __init__(self, between: Callable[["Mixing", Tensor], Tensor], tokens: int, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.across, self.kernel = nn.Linear(tokens, tokens), nn.Conv1d(width, width, 1)
        for i, p in enumerate(self.parameters()):
            p.data = normal(*p.shape, seed=i)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.between(self, self.a(x)))


def stacked(m: Mixing, h: Tensor) -> Tensor:
    parts = torch.stack([h[:, i] for i in range(h.shape[1])])  # (T, N, F)
    return F.relu(m.b(parts)).sum(0)


def listed(m: Mixing, h: Tensor) -> Tensor:
    """One call for each token: each activation is (N, F), in an order that is not the samples'."""
    return sum(F.relu(m.b(part)) for part in h.transpose(0, 1))


def one_token_of_each(m: Mixing, h: Tensor) -> Tensor:
    at = torch.arange(h.shape[1] - 1, -1, -1)
    return F.relu(m.b(h.transpose(0, 1)[at])).mean(0)


def folded(m: Mixing, h: Tensor) -> Tensor:
    """Tokens and samples in one dimension, tokens first."""
    rows = F.relu(m.b(h.transpose(0, 1).flatten(0, 1)))
    return rows.unflatten(0, (h.shape[1], -1)).mean(0)


def features_first(m: Mixing, h: Tensor) -> Tensor:
    return F.relu(m.b(h).permute(2, 0, 1)).mean(2).t()


def reversed_samples(m: Mixing, h: Tensor) -> Tensor:
    return F.relu(m.b(h.flip(0))).flip(0).mean(1)


def rolled_samples(m: Mixing, h: Tensor) -> Tensor:
    order = torch.arange(len(h)).roll(1)
    return F.relu(m.b(h[order]))[order.argsort()].mean(1)


def convolved_features(m: Mixing, h: Tensor) -> Tensor:
    """(N, T, F) as (T, F, N): a convolution along the samples that does not mix them."""
    return F.relu(m.kernel(h.permute(1, 2, 0))).mean(0).t()


def across_tokens(m: Mixing, h: Tensor) -> Tensor:
    return F.relu(m.across(h.permute(2, 0, 1))).mean(2).t()


def by_einsum(m: Mixing, h: Tensor) -> Tensor:
    return F.relu(torch.einsum("ntf,gf->tng", h, m.b.weight)).mean(0)


def two_times(m: Mixing, h: Tensor) -> Tensor:
    """The samples come first, then the tokens, then the samples."""
    h = F.relu(m.b(F.relu(h)).transpose(0, 1))
    return F.relu(m.b(h).transpose(0, 1)).mean(1)


def gathered(m: Mixing, h: Tensor) -> Tensor:
    at = torch.zeros(h.shape[1], len(h), h.shape[2], dtype=torch.long) + torch.arange(len(h))[:, None]
    return F.relu(m.b(h.transpose(0, 1).gather(1, at))).mean(0)


def split_features(m: Mixing, h: Tensor) -> Tensor:
    heads = m.b(h).unflatten(2, (h.shape[1], -1)).permute(2, 0, 1, 3)  # as many heads as tokens
    return F.relu(heads).mean(2).permute(1, 0, 2).flatten(1)


BETWEEN = {
    function.__name__: function
    for function in (
        stacked,
        listed,
        one_token_of_each,
        folded,
        features_first,
        reversed_samples,
        rolled_samples,
        convolved_features,
        across_tokens,
        by_einsum,
        two_times,
        gathered,
        split_features,
    )
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BETWEEN)
def test_one_samples_map_does_not_depend_on_the_others(name: str, method: str, size: int) -> None:
    """As many samples as tokens, so that sizes do not tell which dimension is which."""
    model = Mixing(BETWEEN[name], tokens=size, width=8 * size).double().eval()
    x = normal(size, size, 6, seed=5) * torch.tensor([1.0, 5.0, 0.2, 2.0]).double()[:size, None, None]
    together = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    for i in range(size):
        alone = rectgrad.attribute(model, x[i : i + 1], method, target=1, **METHODS[method])
        assert float(alone.abs().max()) > 0
        error = float((together[i : i + 1] - alone).abs().max() / alone.abs().max())
        assert error < 1e-5, f"the map of sample {i} differs by {error:.2g} of its maximum"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("samples", [3, 8])
def test_as_many_samples_as_channels(samples: int, method: str) -> None:
    """An image network that works on (channels, samples, ...) for a while."""

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 8, 3, padding=1), nn.Linear(8, 3)
            for i, p in enumerate(self.parameters()):
                p.data = normal(*p.shape, seed=i)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.conv(x).transpose(0, 1))
            h = F.max_pool2d(h, 2).transpose(0, 1)
            return self.last(F.relu(h - 1).mean((2, 3)))

    model, x = Channels().double().eval(), normal(samples, 2, 8, 8, seed=5)
    x = x * torch.linspace(0.3, 4, samples).double()[:, None, None, None]
    together = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    for i in range(samples):
        alone = rectgrad.attribute(model, x[i : i + 1], method, target=1, **METHODS[method])
        assert float(alone.abs().max()) > 0
        assert float((together[i : i + 1] - alone).abs().max() / alone.abs().max()) < 1e-5


SQUARE = normal(4, 4, seed=3)
BY_CHANCE = {
    "tensordot": lambda h: F.relu(torch.tensordot(SQUARE, h, ([1], [1]))).sum(0),
    "inner": lambda h: F.relu(torch.inner(SQUARE, h)).mean(0),
    "linear": lambda h: F.relu(F.linear(SQUARE, h)).norm(dim=0),
    "distances": lambda h: F.relu(torch.cdist(SQUARE, h) - 1).sum(0),
    "rotated": lambda h: F.relu(torch.rot90(h)).sum(0).flip(0),
    "stacked rows": lambda h: F.relu(torch.vstack([h[:, j] for j in range(4)])).sum(0),
    "broadcast": lambda h: F.relu((SQUARE[:, None] * h).sum(-1)).sum(0),
    "unbound": lambda h: torch.stack([F.relu(row) @ SQUARE[0] for row in h.unbind()]),
    "selected": lambda h: torch.stack([F.relu(h.select(0, i)) @ SQUARE[0] for i in range(len(h))]),
    "outer": lambda h: torch.stack([(F.relu(torch.outer(SQUARE[0], row)) * SQUARE).sum() for row in h]),
}


@pytest.mark.parametrize("name", BY_CHANCE)
@pytest.mark.parametrize("bridged", [False, True])
def test_as_many_samples_as_features(name: str, bridged: bool) -> None:
    """No step turns the samples back into the first dimension of a tensor with more dimensions."""

    def model(x: Tensor) -> Tensor:
        return BY_CHANCE[name](x @ SQUARE)

    if bridged:
        remember_bridged(model)
    x, method = normal(4, 4, seed=5), rectgrad.RectGrad(q=50, multiply_by_input=False)
    alone = torch.cat([rectgrad.attribute(model, x[i : i + 1], method) for i in range(4)])
    assert alone.any()
    assert torch.allclose(rectgrad.attribute(model, x, method), alone, atol=1e-9)
