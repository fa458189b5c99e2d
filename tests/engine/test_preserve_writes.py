"""What a model, a hook or a target writes is put back: one kind of write at a time."""

import collections
import contextlib
import copy
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import ANY_NETWORK, EVERY
from untouched import FEW, Eventful, FaultError, images, untouched

pytestmark = pytest.mark.filterwarnings("ignore:the model is in training mode")


class Writer(nn.Module):
    """A small network whose forward pass calls `write(self, h)` half-way."""

    def __init__(self, prepare: Callable, write: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(96, 4)
        prepare(self)
        self.eval()
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x))
        self._write(self, h)
        return self.head(h.flatten(1))


def nothing(m: nn.Module) -> None:
    pass


def buffer(*shape: int) -> Callable[[nn.Module], None]:
    return lambda m: m.register_buffer("kept", torch.ones(*shape))


def having(**attributes: Any) -> Callable[[nn.Module], None]:
    def prepare(m: nn.Module) -> None:
        for name, make in attributes.items():
            setattr(m, name, make())

    return prepare


def with_grad(m: nn.Module) -> None:
    m.conv.weight.grad = torch.ones_like(m.conv.weight)


def renormed(m: nn.Module) -> None:
    m.table = nn.Embedding(5, 3, max_norm=0.1)


def look_up_without_grad(m: nn.Module, h: Tensor) -> None:
    with torch.no_grad():
        m.table(torch.tensor([1, 2]))


def moving_average(m: nn.Module, h: Tensor) -> None:
    m.kept.mul_(0.9).add_(h.mean((0, 2, 3)))


def detached_moving_average(m: nn.Module, h: Tensor) -> None:
    with torch.no_grad():
        m.kept.lerp_(h.mean((0, 2, 3)), 0.1)


def inside_inference(m: nn.Module, h: Tensor) -> None:
    with torch.inference_mode():
        m.kept.add_(1)


def assign(path: str, make: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Tensor], None]:
    """m.<path> = make(m)"""
    *owners, last = path.split(".")

    def write(m: nn.Module, h: Tensor) -> None:
        setattr(functools.reduce(getattr, owners, m), last, make(m))

    return write


WRITES: dict[str, tuple[Callable, Callable]] = {
    # in place on tensors of the model
    "buffer.add_": (buffer(2), lambda m, h: m.kept.add_(1)),
    "buffer[0] = value": (buffer(2), lambda m, h: m.kept.__setitem__(0, 5)),
    "a view of a buffer": (buffer(4, 2), lambda m, h: m.kept[1].t().zero_()),
    "out=buffer": (buffer(2), lambda m, h: torch.add(m.kept, 1, out=m.kept)),
    "relu_ of a buffer": (buffer(2), lambda m, h: m.kept.neg_().relu_()),
    "F.relu(buffer, inplace=True)": (buffer(2), lambda m, h: F.relu(m.kept.neg_(), inplace=True)),
    "index_copy_ into a queue": (
        buffer(4),
        lambda m, h: m.kept.index_copy_(0, torch.tensor([0]), torch.zeros(1)),
    ),
    "foreach on buffers": (buffer(2), lambda m, h: torch._foreach_add_([m.kept], 1.0)),
    "buffer.unsqueeze_": (buffer(2), lambda m, h: m.kept.unsqueeze_(0)),
    "buffer.t_": (buffer(2, 3), lambda m, h: m.kept.t_()),
    "moving average without gradient": (buffer(6), detached_moving_average),
    "moving average with gradient": (buffer(6), moving_average),
    "write in inference mode": (buffer(2), inside_inference),
    "weight.data.clamp_": (nothing, lambda m, h: m.conv.weight.data.clamp_(min=0)),
    "weight.data = tensor": (nothing, assign("conv.weight.data", lambda m: m.conv.weight.data.clamp(min=0))),
    "buffer.data = tensor": (buffer(2), assign("kept.data", lambda m: m.kept + 1)),
    "embedding with max_norm": (renormed, lambda m, h: m.table(torch.tensor([1, 2]))),
    "embedding with max_norm under no_grad": (renormed, look_up_without_grad),
    "tensor in a list": (having(past=lambda: [torch.zeros(2)]), lambda m, h: m.past[0].add_(1)),
    "tensor in a dict": (having(past=lambda: {"h": torch.zeros(2)}), lambda m, h: m.past["h"].add_(1)),
    "numpy array": (having(past=lambda: np.zeros(2)), lambda m, h: m.past.__iadd__(1)),
    # gradients and flags
    "weight.requires_grad = False": (nothing, assign("conv.weight.requires_grad", lambda m: False)),
    "zero_grad()": (with_grad, lambda m, h: m.zero_grad()),
    "weight.grad.zero_": (with_grad, lambda m, h: m.conv.weight.grad.zero_()),
    "train()": (nothing, lambda m, h: m.conv.train()),
    # attributes, containers, structure
    "counter": (having(calls=lambda: 0), assign("calls", lambda m: m.calls + 1)),
    "new attribute": (nothing, assign("made_on_the_way", lambda m: 1)),
    "deleted attribute": (having(calls=lambda: 0), lambda m, h: delattr(m, "calls")),
    "list": (having(past=list), lambda m, h: m.past.append(h)),
    "set": (having(past=set), lambda m, h: m.past.add(1)),
    "list replaced inside a dict": (having(past=lambda: {"a": 1}), lambda m, h: m.past.update(a=2)),
    "list in a dict": (having(past=lambda: {"a": [1]}), lambda m, h: m.past["a"].append(2)),
    "deque": (having(past=collections.deque), lambda m, h: m.past.append(1)),
    "Counter": (having(past=collections.Counter), lambda m, h: m.past.update("a")),
    "namespace": (having(past=lambda: types.SimpleNamespace(n=0)), assign("past.n", lambda m: 1)),
    "register_buffer": (nothing, lambda m, h: m.register_buffer("mask", torch.ones(2), persistent=False)),
    "replaced submodule": (nothing, assign("head", lambda m: nn.Linear(96, 4))),
    "new submodule": (nothing, lambda m, h: m.add_module("extra", nn.ReLU())),
    "hook": (nothing, lambda m, h: m.conv.register_forward_hook(print)),
    "backward hook": (nothing, lambda m, h: m.conv.register_full_backward_hook(print)),
    "norm kept in a plain list": (
        having(past=lambda: [nn.BatchNorm2d(6)]),
        lambda m, h: m.past[0](h),
    ),
    "random numbers": (nothing, lambda m, h: torch.rand(3)),
    "manual_seed": (nothing, lambda m, h: torch.manual_seed(9)),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_forward_pass_writes_is_put_back(write: str) -> None:
    model, x = Writer(*WRITES[write]), images()
    with untouched(model, x):
        rectgrad.attribute(model, x, "rectgrad", 1)


@pytest.mark.parametrize("write", WRITES)
def test_what_a_forward_pass_writes_is_put_back_after_an_error(write: str) -> None:
    prepare, act = WRITES[write]

    def fail(m: nn.Module, h: Tensor) -> None:
        act(m, h)
        raise FaultError

    model, x = Writer(prepare, fail), images()
    with untouched(model, x), pytest.raises(FaultError):
        rectgrad.attribute(model, x, "rectgrad", 1)


READ_ONLY = np.array([1.0, np.nan])
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "value",
    [torch.eye(3).to_sparse(), np.array(1.0), READ_ONLY],
    ids=["sparse tensor", "array without dimensions", "read-only NaN"],
)
def test_a_written_buffer_beside_an_unusual_attribute(value: Any) -> None:
    model, x = Writer(buffer(2), lambda m, h: m.kept.add_(1)), images()
    model.unusual = value
    rectgrad.attribute(model, x, "rectgrad", 1)
    assert model.kept.tolist() == [1.0, 1.0]
    assert model.unusual is value


def test_a_moving_average_stays_usable() -> None:
    """A buffer that was added to in place must not end up holding on to the graph of the explanation."""
    model, x = Writer(buffer(6), moving_average), images()
    expected = rectgrad.attribute(model, x, "rectgrad", 1)
    assert not model.kept.requires_grad
    torch.testing.assert_close(rectgrad.attribute(model, x, "rectgrad", 1), expected, rtol=0, atol=0)


# --- hooks that run on the way back ------------------------------------------------------------------------


def keep_gradient(m: nn.Module, h: Tensor) -> None:
    """What Grad-CAM code does."""
    if h.requires_grad:
        h.register_hook(lambda grad: setattr(m, "gradient", grad))


def counting_backward_hook(m: nn.Module) -> None:
    m.arrived, m.total = [], torch.zeros(1)
    m.conv.register_full_backward_hook(lambda module, given, out: m.arrived.append(out[0]))
    m.head.register_full_backward_hook(lambda module, given, out: m.total.add_(1) and None)


@pytest.mark.parametrize(
    ("prepare", "write"),
    [(having(gradient=lambda: None), keep_gradient), (counting_backward_hook, lambda m, h: None)],
    ids=["tensor hook", "module hook"],
)
@pytest.mark.parametrize("name", ["rectgrad", "saliency", "deeplift"])
def test_what_a_backward_hook_writes_is_put_back(prepare: Callable, write: Callable, name: str) -> None:
    model, x = Writer(prepare, write), images()
    with untouched(model, x):
        rectgrad.attribute(model, x, name, 1)


# --- the caller's arguments --------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Writes on whatever state it is given, as recurrent code and key-value caches do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(96, 4)

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        if isinstance(state, list):
            state[0].add_(1)
            state.append(1)
        elif isinstance(state, dict):
            state["h"].add_(1)
            state["new"] = 1
        else:
            state.add_(1)
        return self.head(F.relu(self.conv(x)).flatten(1))


STATES = {
    "tensor": lambda: torch.zeros(2, 1),
    "tensor that requires grad": lambda: torch.zeros(2, 1).requires_grad_(),
    "integers": lambda: torch.zeros(2, dtype=torch.long),
    "view": lambda: torch.zeros(4, 2).t()[:, 1:3],
    "list": lambda: [torch.zeros(2, 1)],
    "dict": lambda: {"h": torch.zeros(2, 1)},
}


@pytest.mark.parametrize("how", ["forward_args", "forward_kwargs"])
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_model_may_write_on_its_arguments(kind: str, how: str, batch_size: int | None) -> None:
    model, x, state = Stateful().eval(), images(), STATES[kind]()
    given = {"forward_args": (state,)} if how == "forward_args" else {"forward_kwargs": {"state": state}}
    with untouched(model, x, given):
        rectgrad.attribute(model, x, target=1, batch_size=batch_size, **given)


def test_each_pass_sees_the_arguments_as_given() -> None:
    """Integrated Gradients runs the model several times: the state of one pass must not reach the next."""
    seen: list[float] = []

    def model(x: Tensor, state: dict) -> Tensor:
        seen.append(float(state["h"]))
        state["h"] += 1
        return F.relu(x.flatten(1))[:, :3]

    forward_kwargs = {"state": {"h": torch.tensor(0.0)}}
    rectgrad.attribute(model, images(), "integrated_gradients", 1, steps=3, forward_kwargs=forward_kwargs)
    assert set(seen) == {0.0}


def test_two_views_of_one_tensor_are_both_put_back() -> None:
    whole = torch.zeros(4, 2)
    model, x = Stateful().eval(), images()
    with untouched(whole):
        rectgrad.attribute(model, x, target=1, forward_args=(whole[:2],))


def test_an_input_given_twice_is_not_written() -> None:
    """The input as an argument too, with a model that writes on the argument."""
    x = images()
    model = Stateful().eval()
    with untouched(x):
        rectgrad.attribute(model, x, target=1, forward_args=(x,))


# --- the target --------------------------------------------------------------------------------------------


def noisy_target(outputs: Tensor) -> Tensor:
    return (outputs * torch.rand(4)).sum(1)


def noisy_and_failing_target(outputs: Tensor) -> Tensor:
    torch.rand(4)
    raise FaultError


@pytest.mark.parametrize("target", [noisy_target, noisy_and_failing_target])
def test_a_callable_target_may_draw_random_numbers(target: Callable) -> None:
    model, x = Writer(nothing, lambda m, h: None), images()
    with untouched(model, x), contextlib.suppress(FaultError):
        rectgrad.attribute(model, x, target=target)


def test_a_target_that_is_a_module_is_left_as_it_was() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, out: Tensor) -> Tensor:
            self.count += 1
            return out.mean(1)

    target, model, x = Mean(), Writer(nothing, lambda m, h: None), images()
    with untouched(target, model, x):
        rectgrad.attribute(model, x, target=target)


def test_a_callable_target_that_writes_on_a_records_outputs() -> None:
    """A record is kept: what one target writes must not change the next answer."""
    model, x = Writer(nothing, lambda m, h: None), images()
    kept = rectgrad.record(model, x)
    first, outputs = kept.attribute("saliency", 1), kept.outputs.clone()
    kept.attribute("saliency", lambda out: out.mul_(3)[:, 0])
    assert torch.equal(kept.outputs, outputs)
    assert torch.equal(kept.attribute("saliency", 1), first)


def test_a_caller_may_write_on_a_records_outputs() -> None:
    model, x = Writer(nothing, lambda m, h: None), images()
    kept = rectgrad.record(model, x)
    first = kept.attribute("rectgrad")
    kept.outputs.neg_()
    assert torch.equal(kept.attribute("rectgrad"), first)


# --- models that are not modules ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda net: lambda x: net(x), id="lambda"),
        pytest.param(lambda net: net.forward, id="bound method"),
        pytest.param(functools.partial, id="partial"),
        pytest.param(nn.DataParallel, id="DataParallel"),
    ],
)
def test_a_wrapped_module_is_left_as_it_was(wrap: Callable) -> None:
    net = Eventful()
    model, x = wrap(net), images()
    with untouched(net, x):
        rectgrad.attribute(model, x, "rectgrad", 1)


def test_a_lazy_model_still_works_afterwards() -> None:
    """Explained before its first use, a lazy model is either initialised, refused, or as fresh as before."""
    model, x = nn.Sequential(nn.LazyLinear(30), nn.ReLU(), nn.LazyLinear(3)).eval(), torch.randn(2, 7)
    with contextlib.suppress(ValueError, rectgrad.UnsupportedModelError):
        rectgrad.attribute(model, x)
    assert model(x).shape == (2, 3)


# --- weights that require gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ANY_NETWORK)
def test_the_map_does_not_depend_on_which_weights_require_gradients(name: str) -> None:
    """Weights that are plain tensors, as in models written as functions, are weights all the same."""
    generator = torch.Generator().manual_seed(4)
    scale, first, second = (torch.randn(*s, generator=generator) for s in ((6,), (6, 40), (40, 3)))

    def model(x: Tensor) -> Tensor:
        return F.relu((x * scale) @ first) @ second

    x = torch.randn(2, 6, generator=generator)
    expected = rectgrad.attribute(model, x, name, 1, **FEW.get(name, {}))
    for weight in (scale, first, second):
        weight.requires_grad_()
    with untouched(scale, first, second):
        maps = rectgrad.attribute(model, x, name, 1, **FEW.get(name, {}))
    torch.testing.assert_close(maps, expected)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_frozen_parameters_give_the_same_map_and_stay_frozen(name: str, frozen: bool) -> None:
    model, x = Writer(nothing, lambda m, h: None), images()
    expected = rectgrad.attribute(model, x, name, 1, **FEW.get(name, {}))
    model.requires_grad_(not frozen)
    with untouched(model, x):
        maps = rectgrad.attribute(model, x, name, 1, **FEW.get(name, {}))
    assert torch.equal(maps, expected)


def written_and_used(how: str) -> nn.Module:
    """A network that writes a buffer of its own and then uses it."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((3,), 0.5))
            self.register_buffer("state", torch.zeros(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if how == "in place":
                self.scale.mul_(4)
                return F.relu(self.linear(x * self.scale)) * self.scale
            if how == "a view":
                part = self.scale[1:]
                part.mul_(4)
                self.scale[:1] += 2
                return F.relu(self.linear(x * self.scale)) * self.scale
            if how == "by data":
                self.state.copy_(x[0])
                return F.relu(x * self.state) * self.scale
            if how == "without gradients":
                with torch.no_grad():
                    self.scale.add_(1)
                    self.linear.weight.mul_(2)
                return F.relu(self.linear(x * self.scale)) * self.scale
            self.scale += 1
            return F.relu(F.linear(x, self.linear.weight * self.scale, self.scale))

    torch.manual_seed(0)
    return Network()


@pytest.mark.parametrize("how", ["in place", "a view", "by data", "without gradients", "a weight"])
def test_a_buffer_that_is_written_and_then_used(how: str) -> None:
    """The gradient is the one of the values in use, though the buffer is put back."""
    x = torch.tensor([[1.0, 2.0, -0.5]])
    model, twin = written_and_used(how), written_and_used(how)
    leaf = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(twin(leaf)[:, 1].sum(), leaf)
    before = copy.deepcopy(model.state_dict())
    kept = rectgrad.record(model, x)
    assert torch.allclose(rectgrad.attribute(model, x, "saliency", 1), plain)
    assert torch.allclose(kept.attribute("saliency", 1), plain)
    # With a tau that all exceed, the rule passes everything: as if there were no activation.
    options = {"tau": -1e9, "multiply_by_input": False, "positive_only": False}
    with mock.patch.object(F, "relu", lambda x: x):
        (linear,) = torch.autograd.grad(written_and_used(how)(leaf)[:, 1].sum(), leaf)
    assert torch.allclose(rectgrad.attribute(model, x, "rectgrad", 1, **options), linear)
    assert torch.allclose(kept.attribute("rectgrad", 1, **options), linear)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
