"""Nothing is left behind on the model, the caller's tensors or the random state, also after an error.

A snapshot describes everything that hangs on a model: every attribute of every module down to the numbers, by
identity and by value. Each test takes one, makes a call that ends well or badly, and compares.
"""

import collections
import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rectgrad

pytestmark = pytest.mark.filterwarnings("ignore:the model is in training mode")

FEW = {"smoothgrad": {"samples": 2}, "integrated_gradients": {"steps": 2}}
ONE_BACKWARD = [name for name, method in rectgrad.METHODS.items() if method.one_backward]


# --- the snapshot ------------------------------------------------------------------------------------------


class Snapshot:
    """A description of some objects, comparable with a later one. It holds what it saw: no id is reused."""

    def __init__(self, *values: Any) -> None:
        self.held: list[Any] = []
        self.facts: dict[str, Any] = {}
        for i, value in enumerate(values):
            self.see(f"[{i}]", value)

    def see(self, path: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            self.facts[path] = value
            return
        met = any(value is other for other in self.held)
        self.held.append(value)
        self.facts[path] = (type(value).__name__, id(value))
        if met:
            return
        if isinstance(value, Tensor):
            self.see_tensor(path, value)
        elif isinstance(value, np.ndarray):
            self.facts[path + ".values"] = value.tobytes()
        elif isinstance(value, dict):
            self.facts[path + ".keys"] = list(value)
            for key, item in value.items():
                self.see(f"{path}[{key!r}]", item)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            self.facts[path + ".len"] = len(value)
            for i, item in enumerate(value):
                self.see(f"{path}[{i}]", item)
        elif isinstance(value, (nn.Module, types.SimpleNamespace)):
            # The order of attributes means nothing, that of a module's containers does.
            for key in sorted(vars(value)):
                self.see(f"{path}.{key}", vars(value)[key])

    def see_tensor(self, path: str, x: Tensor) -> None:
        values = x.detach().cpu().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.facts[path + ".values"] = (tuple(x.shape), x.stride(), x.dtype, values)
        self.facts[path + ".autograd"] = (x.requires_grad, x.is_leaf, x.grad_fn is None)
        if x.is_leaf:
            self.see(path + ".grad", x.grad)

    def differences(self, later: "Snapshot") -> list[str]:
        paths = dict.fromkeys([*self.facts, *later.facts])
        missing = object()
        return [p for p in paths if self.facts.get(p, missing) != later.facts.get(p, missing)]


def surroundings() -> tuple:
    return (
        torch.get_rng_state().numpy().tobytes(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


@contextlib.contextmanager
def untouched(*values: Any) -> Iterator[None]:
    """Everything that hangs on `values`, the random state and torch's modes are the same afterwards."""
    before, around = Snapshot(*values), surroundings()
    yield
    changed = before.differences(Snapshot(*values))
    assert not changed, f"changed: {changed[:6]}"
    assert surroundings() == around, "the random state or a mode of torch changed"


def test_the_snapshot_notices_what_it_must() -> None:
    """The instrument itself: each of these changes is one that the tests below would miss without it."""
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: m.seen.append(1),
        lambda m: m.cache["nested"].append(1),
        lambda m: m.past[0].add_(1),
        lambda m: m.norm.num_batches_tracked.add_(1),
        lambda m: m.weighted.parametrizations.weight.original1.grad.zero_(),
        lambda m: setattr(m, "new", 1),
        lambda m: m.norm.eval(),
        lambda m: m.conv.register_forward_hook(print),
        lambda m: setattr(m, "norm", nn.BatchNorm2d(6)),
        lambda m: m.conv.weight.requires_grad_(True),
        lambda m: setattr(m.conv.weight, "data", m.conv.weight.data + 1),
    ]
    for change in changes:
        model = Eventful()
        before = Snapshot(model)
        with torch.no_grad():
            change(model)
        assert before.differences(Snapshot(model))


# --- a model that does everything at once ------------------------------------------------------------------


class Eventful(nn.Module):
    """In training mode, with every kind of state that a forward pass may touch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.weighted = parametrizations.weight_norm(nn.Conv2d(6, 6, 3))
        self.spectral = parametrizations.spectral_norm(nn.Linear(24, 30))
        self.head = nn.Linear(30, 4)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))
        self.calls = 0
        self.seen: list = []
        self.cache: dict = {"nested": []}
        self.past = [torch.zeros(2)]
        self.plain = torch.ones(3)
        self.conv.weight.requires_grad_(False)
        self.head.weight.grad = torch.ones_like(self.head.weight)
        self.weighted.parametrizations.weight.original1.grad = torch.ones(6, 6, 3, 3)
        self.hooked: list = []
        self.norm.register_forward_hook(lambda module, inputs, output: self.hooked.append(output.sum()))
        self.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
        self.train()

    def forward(self, x: Tensor, state: Tensor | None = None, trap: Callable = lambda where: None) -> Tensor:
        trap("start")
        self.calls += 1
        x.mul_(0.5)
        x = F.relu(self.conv(x), inplace=True)
        self.last = x.detach()
        self.seen.append(x)
        trap("middle")
        x = self.drop(self.norm(x))
        self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        self.steps += 1
        self.plain.add_(1)
        self.cache["last"] = x
        if state is not None:
            state.add_(1)
        x = F.max_pool2d(self.weighted(x).relu_(), 2)
        self.average = self.average.clone()
        trap("late")
        return self.head(F.relu(self.spectral(x.flatten(1))))


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", rectgrad.METHODS)
def test_attribute_leaves_everything_as_it_was(name: str) -> None:
    model, x, state = Eventful(), images().requires_grad_(), torch.zeros(2, 1)
    x.grad = torch.ones_like(x)
    target = torch.tensor([1, 3])
    with untouched(model, x, state, target):
        rectgrad.attribute(model, x, name, target, forward_kwargs={"state": state}, **FEW.get(name, {}))
    assert x._version == 0
    assert target._version == 0


@pytest.mark.parametrize("name", rectgrad.METHODS)
def test_attribute_in_chunks_leaves_everything_as_it_was(name: str) -> None:
    model, x, state = Eventful(), torch.cat([images(), images().flip(0)]), torch.zeros(4, 1)
    with untouched(model, x, state):
        rectgrad.attribute(
            model, x, name, [0, 1, 2, 3], batch_size=2, forward_args=(state,), **FEW.get(name, {})
        )


@pytest.mark.parametrize("name", rectgrad.METHODS)
def test_a_record_leaves_everything_as_it_was(name: str) -> None:
    model, x, state = Eventful(), images(), torch.zeros(2, 1)
    with untouched(model, x, state):
        kept = rectgrad.record(model, x, forward_kwargs={"state": state})
    with untouched(model, x, state, kept.outputs):
        kept.attribute(name, 2, **FEW.get(name, {}))


@pytest.mark.parametrize("name", ONE_BACKWARD)
def test_layer_attributions_leave_everything_as_they_were(name: str) -> None:
    model, x = Eventful(), images()
    with untouched(model, x):
        rectgrad.layer_attributions(model, x, name, 2)


@pytest.mark.parametrize("name", ["deeplift", "integrated_gradients"])
@pytest.mark.parametrize("inner", ["a tensor", "a tuple"])
def test_baselines_are_not_written(name: str, inner: str) -> None:
    baseline = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model, x = Eventful(), images()
    with untouched(model, x, baseline):
        given = (baseline,) if inner == "a tuple" else baseline
        rectgrad.attribute(model, x, name, 1, baseline=given, **FEW.get(name, {}))
    assert baseline._version == 0


# --- after an exception ------------------------------------------------------------------------------------


class FaultError(Exception):
    pass


def trap(where: str, error: type[BaseException], on_call: int = 1) -> Callable[[str], None]:
    """Raises at a place in the forward pass, the n-th time it is reached."""
    met = collections.Counter()

    def spring(place: str) -> None:
        met[place] += 1
        if place == where and met[place] == on_call:
            raise error(where)

    return spring


CALLS: dict[str, Callable] = {
    **{
        name: functools.partial(
            lambda name, *a, **k: rectgrad.attribute(*a, name, **k, **FEW.get(name, {})), name
        )
        for name in rectgrad.METHODS
        if name != "random"
    },
    "record": rectgrad.record,
    "layer_attributions": rectgrad.layer_attributions,
}


@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["start", "middle", "late"])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_inside_the_forward_pass(call: str, where: str, error: type[BaseException]) -> None:
    model, x, state = Eventful(), images(), torch.zeros(2, 1)
    with untouched(model, x, state), pytest.raises(error, match=where):
        CALLS[call](model, x, forward_kwargs={"state": state, "trap": trap(where, error)})


@pytest.mark.parametrize("name", ["smoothgrad", "integrated_gradients", "deeplift"])
def test_an_error_in_the_second_forward_pass(name: str) -> None:
    """Methods that run the model more than once are as careful the second time."""
    model, x = Eventful(), images()
    with untouched(model, x), pytest.raises(FaultError):
        CALLS[name](model, x, forward_kwargs={"trap": trap("late", FaultError, on_call=2)})


@pytest.mark.parametrize("name", [n for n in CALLS if n != "record"])
def test_a_bad_target(name: str) -> None:
    model, x = Eventful(), images()
    with untouched(model, x), pytest.raises(ValueError, match="out of range"):
        CALLS[name](model, x, target=77)


@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [n for n in CALLS if n != "record"])
def test_an_error_inside_a_callable_target(name: str, error: type[BaseException]) -> None:
    def target(outputs: Tensor) -> Tensor:
        outputs.mul_(2)
        raise error("target")

    model, x = Eventful(), images()
    with untouched(model, x), pytest.raises(error, match="target"):
        CALLS[name](model, x, target=target)


@pytest.mark.parametrize("name", [n for n in CALLS if n != "record"])
def test_a_nan_in_the_input(name: str) -> None:
    model, x = Eventful(), images()
    x[0, 0, 0, 0] = torch.nan
    with untouched(model, x), pytest.raises(ValueError, match="contains NaN"):
        CALLS[name](model, x, target=0)


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("record", "layer_attributions")])
def test_a_nan_in_a_weight(name: str) -> None:
    model, x = Eventful(), images()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with untouched(model, x), pytest.raises(ValueError, match="contains NaN"):
        CALLS[name](model, x, target=0)


def test_a_refused_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)).train()
    x = images()
    with untouched(model, x), pytest.raises(rectgrad.UnsupportedModelError):
        rectgrad.attribute(model, x)


def test_an_error_while_a_record_is_used_does_not_spoil_it() -> None:
    model, x = Eventful().eval(), images()
    kept = rectgrad.record(model, x)
    first = kept.attribute("rectgrad", 1)

    def target(outputs: Tensor) -> Tensor:
        raise FaultError

    with untouched(model, x, kept.outputs):
        with pytest.raises(FaultError):
            kept.attribute("guided_backprop", target)
        with pytest.raises(ValueError):
            kept.attribute("guided_backprop", 77)
    assert torch.equal(kept.attribute("rectgrad", 1), first)


# --- propagate ---------------------------------------------------------------------------------------------


def failing_rule(op: Any, R: Tensor) -> Tensor:
    torch.rand(1)
    raise FaultError(op.name)


@pytest.mark.parametrize("error", [None, "rule", "body", "interrupt"])
def test_propagate_leaves_no_mode_and_no_gradient(error: str | None) -> None:
    model, x = Eventful().eval(), images().requires_grad_()
    before = Snapshot(*model.parameters())
    modes = torch._C._len_torch_function_stack()

    def run() -> None:
        rule = failing_rule if error == "rule" else lambda op, R: R
        with rectgrad.propagate({"relu": rule}):
            score = model(x.clone()).sum()
            if error == "body":
                raise FaultError("body")
            if error == "interrupt":
                raise KeyboardInterrupt("interrupt")
            score.backward()

    raised = {None: (), "interrupt": (KeyboardInterrupt,)}.get(error, (FaultError,))
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        run()
    assert torch._C._len_torch_function_stack() == modes
    assert torch.is_grad_enabled()
    assert not before.differences(Snapshot(*model.parameters()))


def test_propagate_treats_all_statistics_of_a_norm_alike() -> None:
    """Running mean and count belong together: both move or neither does."""
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU()).train()
    with rectgrad.propagate({"relu": lambda op, R: R}):
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert bool(norm.num_batches_tracked != 0) == bool((norm.running_mean != 0).any())


def test_a_rule_that_fails_in_one_backward_pass_leaves_the_next_one_alone() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    layer = nn.Linear(5, 5)
    with pytest.raises(FaultError), rectgrad.propagate({"relu": failing_rule}):
        layer(x).relu().sum().backward()
    (plain,) = torch.autograd.grad(layer(x).relu().sum(), x)
    expected = (layer(x) > 0).float() @ layer.weight
    torch.testing.assert_close(plain, expected)


# --- one kind of write at a time ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", rectgrad.METHODS)
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
@pytest.mark.parametrize("name", rectgrad.METHODS)
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
