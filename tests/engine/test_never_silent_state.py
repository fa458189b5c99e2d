"""A map is right, or the model is refused by a sentence that names the reason: never silently wrong.

Here: tensors that are written without a torch function call, modes of the caller, nested calls, custom
autograd functions, scripted parts and checkpoints. `right_or_refused.py` explains the comparison.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rectgrad
from rectgrad import UnsupportedModelError
from right_or_refused import (
    METHODS,
    RECTIFYING,
    TOLERANCE,
    WIDTH,
    Case,
    Net,
    check,
    close,
    gradient,
    names_the_reason,
    net,
    outputs_unchanged,
    points,
    right_or_refused,
    uniform,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
BOTH_DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
CASES: dict[str, Case] = {}


# --- tensors written without a torch function call ---------------------------------------------------------

UNSEEN = r"script|overw|modif|in.place|thread|DisableTorchFunction|numpy|\.data|outside|not (seen|recorded)"


def double_in_place(x: Tensor) -> None:
    x.mul_(2.0)


def cube(x: Tensor) -> Tensor:
    return x**3


@functools.cache
def scripted(function: Callable) -> Callable:
    """Compiled at the first call, since it warns."""
    return torch.jit.script(function)


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def by_script(x: Tensor) -> None:
    scripted(double_in_place)(x)


def without_torch_function(x: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        x.mul_(2.0)


def from_a_thread(x: Tensor) -> None:
    in_a_thread(lambda: x.mul_(2.0))


def through_data(x: Tensor) -> None:
    x.data.mul_(2.0)


def through_numpy(x: Tensor) -> None:
    x.detach().numpy()[...] *= 2.0


def through_dlpack(x: Tensor) -> None:
    torch.from_dlpack(x.detach()).mul_(2.0)


def through_an_alias(x: Tensor) -> None:
    x.detach().mul_(2.0)


def by_assigning_data(x: Tensor) -> None:
    x.data = 2.0 * x.data


def without_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2.0)


def without_grad_by_script(x: Tensor) -> None:
    with torch.no_grad():
        scripted(double_in_place)(x)


def without_grad_from_a_thread(x: Tensor) -> None:
    in_a_thread(lambda: without_grad(x))


def without_grad_and_torch_function(x: Tensor) -> None:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        x.mul_(2.0)


WRITERS = [
    by_script,
    without_torch_function,
    from_a_thread,
    through_data,
    through_numpy,
    through_dlpack,
    through_an_alias,
    by_assigning_data,
    without_grad,
    without_grad_by_script,
    without_grad_from_a_thread,
    without_grad_and_torch_function,
]


def activation_before_its_use(write: Callable) -> Callable:
    def step(h: Tensor) -> Tensor:
        h = h.clone()
        write(h)
        return h * h

    return step


def view_before_its_use(write: Callable) -> Callable:
    def step(h: Tensor) -> Tensor:
        h = h.clone()
        write(h[:, 2:5])
        return h**3

    return step


def activation_after_its_use(write: Callable) -> Callable:
    def step(h: Tensor) -> Tensor:
        h = h.clone()
        used = h * h
        write(h)
        return used

    return step


def weight_after_its_use(write: Callable) -> Callable:
    def step(h: Tensor, model: Net) -> Tensor:
        w = model.w.clone()
        used = F.linear(h, w)
        write(w)
        return used

    return step


def kernel_after_its_use(write: Callable) -> Callable:
    def step(h: Tensor, model: Net) -> Tensor:
        k = model.k.clone()
        used = F.conv2d(h.unflatten(1, (1, 2, -1)), k, padding=1)
        write(k)
        return used.flatten(1)

    return step


def own_weight_after_its_use(write: Callable) -> Callable:
    """As a model does that keeps its weights packed: it unpacks them, and overwrites them later."""

    def step(h: Tensor, model: Net) -> Tensor:
        with torch.no_grad():
            model.w.copy_(uniform(WIDTH, WIDTH, seed=9))
        used = F.linear(h, model.w)
        write(model.w)
        return used

    return step


# Autograd notices some of these and raises an error, misses others and uses the overwritten values. The true
# gradient is that of the values which the forward pass used.
for writer in WRITERS:
    for how, truth in {
        activation_before_its_use: None,
        view_before_its_use: None,
        activation_after_its_use: lambda h: h * h,
        kernel_after_its_use: lambda h, model: F.conv2d(
            h.unflatten(1, (1, 2, -1)), model.k, padding=1
        ).flatten(1),
        weight_after_its_use: lambda h, model: F.linear(h, model.w),
        own_weight_after_its_use: lambda h, model: F.linear(h, uniform(WIDTH, WIDTH, seed=9).to(h.dtype)),
    }.items():
        CASES[f"{how.__name__}_{writer.__name__}"] = Case(how(writer), UNSEEN, truth)

CASES["made_by_script"] = Case(lambda h: scripted(cube)(h), UNSEEN)
CASES["made_in_a_thread"] = Case(lambda h: in_a_thread(lambda: h**3), UNSEEN)


def made_without_torch_function(h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h**3


CASES["made_without_torch_function"] = Case(made_without_torch_function, UNSEEN)


def cut_in_a_thread(h: Tensor) -> Tensor:
    """What is detached is a constant, also where nobody saw that it was."""
    constant = h.clone()
    in_a_thread(constant.detach_)
    return h * constant


CASES["cut_in_a_thread"] = Case(cut_in_a_thread, UNSEEN)


# --- custom autograd functions and checkpoints -------------------------------------------------------------


class Tripled(torch.autograd.Function):
    """The identity, with another gradient: gradient reversal with a positive factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        return 3 * R


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * R


def around_checkpoint(h: Tensor, model: Net, reentrant: bool) -> Tensor:
    return checkpoint(lambda t: F.relu(F.linear(t, model.w)) ** 2, h, use_reentrant=reentrant)


FUNCTION = r"autograd\.Function|Tripled|Squared"
CASES["linear_custom_function"] = Case(lambda h: Tripled.apply(h), FUNCTION)
CASES["custom_function"] = Case(lambda h: Squared.apply(h), FUNCTION)
CASES["checkpoint"] = Case(lambda h, model: around_checkpoint(h, model, False), "checkpoint")


@pytest.mark.parametrize("name", CASES)
def test_right_or_refused(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_unchanged(name: str) -> None:
    outputs_unchanged(net(CASES[name].step, torch.float64), points(2, torch.float64), CASES[name].words)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        return -R


class ReversedAtTheInput(Net):
    """Gradients are positive at the ReLUs and negative at the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Reversed.apply(x))


@BOTH_DTYPES
@EVERY_METHOD
def test_gradient_reversal(method: str, dtype: torch.dtype) -> None:
    model, x = ReversedAtTheInput(cube).to(dtype).eval(), points(2, dtype)
    assert bool((gradient(model, x) < 0).all())
    right_or_refused(model, x, method, r"Reversed|autograd\.Function")


class HidingReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, R: Tensor) -> Tensor:
        return R * (ctx.saved_tensors[0] > 0)


def script_relu(x: Tensor) -> Tensor:
    return torch.relu(x)


HIDDEN = {
    "custom_function": (lambda h: HidingReLU.apply(h), "HidingReLU"),
    "scripted": (lambda h: scripted(script_relu)(h), "script"),
    "reentrant_checkpoint": (lambda h, model: around_checkpoint(h, model, True), "checkpoint"),
    "vmap": (lambda h: torch.vmap(torch.relu)(h), "vmap"),
}


@BOTH_DTYPES
@pytest.mark.parametrize("method", RECTIFYING)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_relu_is_refused_by_name(name: str, method: str, dtype: torch.dtype) -> None:
    step, words = HIDDEN[name]
    with pytest.raises(UnsupportedModelError, match=words):
        rectgrad.attribute(net(step, dtype), points(2, dtype), method, target=1)


@BOTH_DTYPES
@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_relu_has_a_plain_gradient(name: str, dtype: torch.dtype) -> None:
    step, words = HIDDEN[name]
    right_or_refused(net(step, dtype), points(2, dtype), "saliency", words)


# --- modes -------------------------------------------------------------------------------------------------


class FunctionDoubling(TorchFunctionMode):
    """Doubles the results of some functions, for autograd too."""

    def __init__(self, functions: set) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in self.functions else result


class DispatchDoubling(TorchDispatchMode):
    """Doubles the results of some operators, below autograd: their derivatives stay as they are."""

    def __init__(self, functions: set) -> None:
        super().__init__()
        self.functions = functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in self.functions else result


MODES: dict[str, Callable[[], Any]] = {
    "function_relu": lambda: FunctionDoubling({F.relu, torch.relu, Tensor.relu}),
    "function_conv": lambda: FunctionDoubling({F.conv2d}),
    "function_linear": lambda: FunctionDoubling({F.linear}),
    "dispatch_relu": lambda: DispatchDoubling({torch.ops.aten.relu.default}),
    "dispatch_conv": lambda: DispatchDoubling({torch.ops.aten.convolution.default}),
    "dispatch_linear": lambda: DispatchDoubling({torch.ops.aten.addmm.default, torch.ops.aten.mm.default}),
}
IN_A_MODE = r"[Mm]ode|FunctionDoubling|DispatchDoubling"


def work(h: Tensor, model: Net) -> Tensor:
    """Everything that a mode changes, and a square, whose derivative depends on the changed values."""
    h = F.conv2d(h.unflatten(1, (1, 2, -1)), model.k, padding=1).flatten(1)
    return F.relu(F.linear(h, model.w, model.w[0])) ** 2


@BOTH_DTYPES
@EVERY_METHOD
@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_the_call(name: str, method: str, dtype: torch.dtype) -> None:
    model, x = net(work, dtype), points(2, dtype)
    with MODES[name]():
        changed = gradient(model, x)
    assert not close(changed, gradient(model, x))
    right_or_refused(model, x, method, IN_A_MODE, around=MODES[name])


@BOTH_DTYPES
@EVERY_METHOD
@pytest.mark.parametrize("name", MODES)
def test_a_mode_inside_the_forward_pass(name: str, method: str, dtype: torch.dtype) -> None:
    def step(h: Tensor, model: Net) -> Tensor:
        with MODES[name]():
            return work(h, model)

    model, x = net(step, dtype), points(2, dtype)
    assert not close(gradient(model, x), gradient(net(work, dtype), x))
    right_or_refused(model, x, method, IN_A_MODE)


@contextlib.contextmanager
def anomaly_detection() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True):
        yield


@BOTH_DTYPES
@EVERY_METHOD
def test_anomaly_detection(method: str, dtype: torch.dtype) -> None:
    model, x = net(work, dtype), points(2, dtype)
    assert right_or_refused(model, x, method, "anomaly", around=anomaly_detection)
    assert not torch.is_anomaly_enabled()


# --- calls inside calls ------------------------------------------------------------------------------------


def inner_net(dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 2)).to(dtype).eval()
    for i, p in enumerate(model.parameters()):
        p.data = uniform(*p.shape, seed=40 + i).to(dtype)
    return model


def inner_gradient(model: nn.Module, h: Tensor) -> Tensor:
    leaf = h.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(model(leaf)[:, 0].sum(), leaf)[0]


def same_or_refused(model: nn.Module, x: Tensor, method: str, target: Any, expected: Tensor) -> None:
    try:
        maps = rectgrad.attribute(model, x, method, target=target, **METHODS[method])
    except UnsupportedModelError as refusal:
        names_the_reason(refusal, "attribute|rectgrad|nested")
        return
    assert close(maps, expected)


@BOTH_DTYPES
@EVERY_METHOD
@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("inner", METHODS)
def test_a_call_inside_the_forward_pass(inner: str, detached: bool, method: str, dtype: torch.dtype) -> None:
    """A map is detached: the inner one is a constant factor, as if it had been computed beforehand."""
    part, x = inner_net(dtype), points(2, dtype)

    def step(h: Tensor) -> Tensor:
        given = h.detach() if detached else h
        return h * rectgrad.attribute(part, given, inner, target=0, **METHODS[inner])

    known = net(lambda h: h, dtype)
    factor = inner_gradient(part, known.relu_a(known.a(x)))
    expected = gradient(net(lambda h: h * factor, dtype), x)
    same_or_refused(net(step, dtype), x, method, 1, expected)


@BOTH_DTYPES
@EVERY_METHOD
@pytest.mark.parametrize("inner", METHODS)
def test_a_call_inside_a_target(inner: str, method: str, dtype: torch.dtype) -> None:
    model, x = net(cube, dtype), points(2, dtype)
    part = nn.Sequential(nn.Linear(3, WIDTH), inner_net(dtype)).to(dtype).eval()
    part[0].weight.data = uniform(WIDTH, 3, seed=50).to(dtype)
    part[0].bias.data = uniform(WIDTH, seed=51).to(dtype)

    def target(outputs: Tensor) -> Tensor:
        found = rectgrad.attribute(part, outputs.detach(), inner, target=0, **METHODS[inner])
        return (outputs * found).sum(1)

    leaf = x.clone().requires_grad_()
    outputs = model(leaf)
    (expected,) = torch.autograd.grad((outputs * inner_gradient(part, outputs)).sum(), leaf)
    same_or_refused(model, x, method, target, expected)
