"""A map is right, or the model is refused by a sentence that names the reason: never silently wrong.

Here: derivatives taken inside the forward pass, functions that have a familiar name and another meaning, and
tensors that are stored with the opposite sign. `right_or_refused.py` explains the comparison.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import rectgrad
from right_or_refused import (
    WIDTH,
    Case,
    Net,
    check,
    net,
    outputs_unchanged,
    points,
    uniform,
)

# torch.func.jvp scripts its decompositions at the first call.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

CASES: dict[str, Case] = {}


def case(words: str) -> Callable:
    """List a step under its function's name."""

    def listed(step: Callable) -> Callable:
        CASES[step.__name__] = Case(step, words)
        return step

    return listed


# --- derivatives inside the forward pass -------------------------------------------------------------------

IMAGE = (1, 2, WIDTH // 2)


def norm(h: Tensor, weight: Callable = torch.clone, statistic: Callable = torch.clone) -> Tensor:
    ones = torch.ones_like(h[0])
    values = statistic(ones / 4), statistic(2 * ones), weight(3 * ones), weight(ones)
    return F.batch_norm(h, *values)


def conv(h: Tensor, kernel: Tensor) -> Tensor:
    return F.conv2d(h.unflatten(1, IMAGE), kernel, padding=1).flatten(1)


# What is differentiated, or mapped over samples. Each row of the result depends on the same row alone.
INNER: dict[str, Callable[[Tensor, Net], Tensor]] = {
    "cube": lambda t, m: t**3,
    "linear": lambda t, m: F.linear(t, m.w) ** 3,
    "layer": lambda t, m: m.b(t) ** 3,
    "conv": lambda t, m: conv(t, m.k) ** 3,
    "relu": lambda t, m: F.relu(t @ m.w) ** 3,
    "norm": lambda t, m: norm(t) ** 3,
    "softmax": lambda t, m: (t + t.softmax(1) / 9) ** 3,
}
Function = Callable[[Tensor], Tensor]


def grad(f: Function, h: Tensor) -> Tensor:
    return torch.autograd.grad(f(h).sum(), h, create_graph=True)[0]


def grad_materialized(f: Function, h: Tensor) -> Tensor:
    unused = torch.ones_like(h, requires_grad=True)
    g, zero = torch.autograd.grad(f(h).sum(), (h, unused), create_graph=True, materialize_grads=True)
    return g + zero


def grad_allow_unused(f: Function, h: Tensor) -> Tensor:
    unused = torch.ones_like(h, requires_grad=True)
    g, nothing = torch.autograd.grad(f(h).sum(), (h, unused), create_graph=True, allow_unused=True)
    assert nothing is None
    return g


def grad_of_a_leaf(f: Function, h: Tensor) -> Tensor:
    """The result depends on the input by way of `create_graph` alone."""
    leaf = torch.zeros_like(h, requires_grad=True)
    return torch.autograd.grad((f(h) * f(leaf + 1)).sum(), leaf, create_graph=True)[0]


def grad_constant(f: Function, h: Tensor) -> Tensor:
    return h * torch.autograd.grad(f(h).sum(), h)[0]


def backward_constant(f: Function, h: Tensor) -> Tensor:
    leaf = h.detach().clone().requires_grad_()
    with torch.enable_grad():
        torch.autograd.backward([f(leaf).sum()], inputs=[leaf])
    return h * leaf.grad


def functional_vjp(f: Function, h: Tensor) -> Tensor:
    return torch.autograd.functional.vjp(f, h, torch.ones_like(h), create_graph=True)[1]


def functional_jvp(f: Function, h: Tensor) -> Tensor:
    return torch.autograd.functional.jvp(f, h, torch.ones_like(h), create_graph=True)[1]


def functional_jacobian(f: Function, h: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(lambda t: f(t).sum(), h, create_graph=True)


def functional_hvp(f: Function, h: Tensor) -> Tensor:
    return torch.autograd.functional.hvp(lambda t: f(t).sum(), h, torch.ones_like(h), create_graph=True)[1]


def func_grad(f: Function, h: Tensor) -> Tensor:
    return torch.func.grad(lambda t: f(t).sum())(h)


def func_vjp(f: Function, h: Tensor) -> Tensor:
    value, pull = torch.func.vjp(f, h)
    return value + pull(torch.ones_like(h))[0]


def func_jvp(f: Function, h: Tensor) -> Tensor:
    return torch.func.jvp(f, (h,), (torch.ones_like(h),))[1]


def func_jacrev(f: Function, h: Tensor) -> Tensor:
    return torch.func.jacrev(lambda t: f(t).sum())(h)


def func_functionalize(f: Function, h: Tensor) -> Tensor:
    return torch.func.functionalize(lambda t: f(t.clone().mul_(2)))(h)


def vmap(f: Function, h: Tensor) -> Tensor:
    return torch.vmap(lambda t: f(t[None])[0])(h)


AUTOGRAD = r"autograd\.(grad|backward|functional)"
WORDS = {
    grad: AUTOGRAD,
    grad_materialized: AUTOGRAD,
    grad_allow_unused: AUTOGRAD,
    grad_of_a_leaf: AUTOGRAD,
    grad_constant: AUTOGRAD,
    backward_constant: AUTOGRAD,
    functional_vjp: AUTOGRAD,
    functional_jvp: AUTOGRAD,
    functional_jacobian: AUTOGRAD,
    functional_hvp: AUTOGRAD,
    func_grad: r"torch\.func|functorch|\bgrad\b",
    func_vjp: r"torch\.func|functorch|\bvjp\b",
    func_jvp: r"torch\.func|functorch|\bjvp\b|forward.mode",
    func_jacrev: r"torch\.func|functorch|jacrev|vmap",
    func_functionalize: "functionalize",
    vmap: "vmap",
}


def deriving(how: Callable, f: Callable) -> Callable[[Tensor, Net], Tensor]:
    return lambda h, model: how(lambda t: f(t, model), h)


for how, reason in WORDS.items():
    for label, inner in INNER.items():
        CASES[f"{how.__name__}_{label}"] = Case(deriving(how, inner), reason)


@case(AUTOGRAD)
def backward_of_a_given_gradient(h: Tensor) -> Tensor:
    leaf = h.detach().clone().requires_grad_()
    with torch.enable_grad():
        torch.autograd.backward([leaf**3], [torch.ones_like(leaf)], inputs=[leaf])
    return h * leaf.grad


@case("vmap")
def vmap_lambda(h: Tensor) -> Tensor:
    return torch.vmap(lambda t: t * t + t)(h)


@case("vmap")
def vmap_softmax(h: Tensor) -> Tensor:
    return h + torch.vmap(lambda t: t.softmax(0))(h)


@case("vmap")
def vmap_relu(h: Tensor) -> Tensor:
    return torch.vmap(F.relu)(h * h)


@case("vmap")
def vmap_over_columns(h: Tensor, model: Net) -> Tensor:
    return torch.vmap(lambda t, w: t * w.sum(), in_dims=(1, 0), out_dims=1)(h, model.w)


class Adapting(nn.Module):
    """Takes one step of gradient descent on its own weights for the features that it is given (MAML)."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.inner, self.create_graph = nn.Linear(WIDTH, WIDTH), create_graph
        self.inner.weight.data, self.inner.bias.data = uniform(WIDTH, WIDTH), uniform(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        loss = self.inner(h).square().mean()
        named = dict(self.inner.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()), create_graph=self.create_graph)
        adapted = {name: p - 1e-3 * g for (name, p), g in zip(named.items(), grads, strict=True)}
        return torch.func.functional_call(self.inner, adapted, (h,))


# The loss is a mean over the batch, so that a map is defined for one sample alone.
CASES["maml"] = Case(Adapting(create_graph=True), AUTOGRAD, samples=1)
CASES["maml_first_order"] = Case(Adapting(create_graph=False), AUTOGRAD, samples=1)


# --- functions with familiar names and another meaning -----------------------------------------------------

# Schema, function and derivative: (its arguments, the arriving gradient) -> those of its tensors.
OPS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., tuple]]] = {
    "mul": (
        "(Tensor x, Tensor y) -> Tensor",
        lambda x, y: 3 * x * y,
        lambda x, y, g: (3 * y * g, 3 * x * g),
    ),
    "linear": (
        "(Tensor x, Tensor weight) -> Tensor",
        lambda x, w: 5 * (x @ w.t()) + x,
        lambda x, w, g: (5 * (g @ w) + g, 5 * (g.t() @ x)),
    ),
    "reshape": (
        "(Tensor x, int[] shape) -> Tensor",
        lambda x, shape: x.square().reshape(shape),
        lambda x, shape, g: (2 * x * g.reshape(x.shape), None),
    ),
    "mean": (
        "(Tensor x, int dim) -> Tensor",
        lambda x, dim: 3 * x.square().sum(dim),
        lambda x, dim, g: (6 * x * g.unsqueeze(dim), None),
    ),
    "sigmoid": ("(Tensor x) -> Tensor", lambda x: x**3, lambda x, g: (3 * x**2 * g,)),
    "flatten": (
        "(Tensor x, int start_dim) -> Tensor",
        lambda x, start: x.square().flatten(start),
        lambda x, start, g: (2 * x * g.reshape(x.shape), None),
    ),
    "dropout": (
        "(Tensor x, float p) -> Tensor",
        lambda x, p: p * x.square(),
        lambda x, p, g: (2 * p * x * g, None),
    ),
}
CALLS: dict[str, Callable[..., Tensor]] = {
    "mul": lambda f, h, w: f(h, h + 1),
    "linear": lambda f, h, w: f(h, w),
    "reshape": lambda f, h, w: f(h, [len(h), WIDTH // 2, 2]).flatten(1),
    "mean": lambda f, h, w: h + f(h, 1).unsqueeze(1),
    "sigmoid": lambda f, h, w: f(h),
    "flatten": lambda f, h, w: f(h.unflatten(1, (2, -1)), 1),
    "dropout": lambda f, h, w: f(h, 0.5),
}


def keep_args(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.args = inputs


def custom_op(name: str, differentiable: bool) -> Callable[..., Tensor]:
    schema, function, derivative = OPS[name]
    space = "elsewhere" if differentiable else "elsewhere_plain"
    op = torch.library.custom_op(f"{space}::{name}", function, mutates_args=(), schema=schema)
    if differentiable:
        op.register_autograd(lambda ctx, g: derivative(*ctx.args, g), setup_context=keep_args)
    return op


COMPOSITE = torch.library.Library("elsewhere_composite", "DEF")  # lives as long as its ops


def composite_op(name: str) -> Callable[..., Tensor]:
    schema, function, _ = OPS[name]
    COMPOSITE.define(name + schema)
    COMPOSITE.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.elsewhere_composite, name)


def overridable(name: str) -> Callable[..., Tensor]:
    """A Python function that calls `handle_torch_function`, as those of torch.nn.functional do."""
    body = OPS[name][1]

    def function(*args: Any) -> Tensor:
        tensors = tuple(a for a in args if isinstance(a, Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(function, tensors, *args)
        return body(*args)

    function.__name__ = function.__qualname__ = name
    return function


def calling(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    return lambda h, model: CALLS[name](function, h, model.w)


for each in OPS:
    CASES[f"custom_op_{each}"] = Case(calling(custom_op(each, True), each), each)
    CASES[f"custom_op_without_derivative_{each}"] = Case(calling(custom_op(each, False), each), each)
    CASES[f"composite_op_{each}"] = Case(calling(composite_op(each), each), each)
    CASES[f"overridable_{each}"] = Case(calling(overridable(each), each), each)


# --- negative and conjugate bits ---------------------------------------------------------------------------

BITS = "neg|conj|complex|bit"


def neg_view(t: Tensor) -> Tensor:
    """The same values, stored with the opposite sign."""
    lazy = torch._neg_view(-t)
    assert lazy.is_neg()
    return lazy


def conj_imag(t: Tensor) -> Tensor:
    lazy = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert lazy.is_neg()
    return lazy


LAZY: dict[str, Callable[..., Tensor]] = {
    "linear_weight": lambda lazy, h, m: F.linear(h, lazy(m.w)),
    "conv_weight": lambda lazy, h, m: conv(h, lazy(m.k)),
    "norm_weight": lambda lazy, h, m: norm(h, weight=lazy),
    "norm_statistics": lambda lazy, h, m: norm(h, statistic=lazy),
    "linear_input": lambda lazy, h, m: F.linear(lazy(h), m.w),
    "conv_input": lambda lazy, h, m: conv(lazy(h), m.k),
    "norm_input": lambda lazy, h, m: norm(lazy(h)),
    "relu_input": lambda lazy, h, m: 2 * F.relu(lazy(h)),
    "factor": lambda lazy, h, m: lazy(h) * h,
}


def storing(lazy: Callable, f: Callable) -> Callable[[Tensor, Net], Tensor]:
    return lambda h, model: f(lazy, h, model)


for bit in (neg_view, conj_imag):
    for label, function in LAZY.items():
        CASES[f"{bit.__name__}_{label}"] = Case(storing(bit, function), BITS)


@case(BITS)
def conj_linear_weight(h: Tensor, model: Net) -> Tensor:
    return F.linear(torch.complex(h, h), torch.complex(model.w, 2 * model.w).conj()).real


@case(BITS)
def conj_linear_input(h: Tensor, model: Net) -> Tensor:
    return F.linear(torch.complex(h, 2 * h).conj(), torch.complex(model.w, model.w)).real


@case(BITS)
def conj_conv_weight(h: Tensor, model: Net) -> Tensor:
    image = h.unflatten(1, IMAGE)
    kernel = torch.complex(model.k, model.k).conj()
    return F.conv2d(torch.complex(image, image), kernel, padding=1).real.flatten(1)


class WithNegativeParameters(nn.Module):
    """Layers whose own parameters and buffers have the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def _apply(self, fn: Callable, recurse: bool = True) -> "WithNegativeParameters":
        super()._apply(fn, recurse)
        for p in self.parameters():
            p.data = neg_view(uniform(*p.shape).to(fn(p).dtype))
        self.norm.running_mean = neg_view(self.norm.running_mean)
        return self

    def forward(self, h: Tensor) -> Tensor:
        assert self.linear.weight.is_neg()
        return self.norm(self.linear(self.conv(h.unflatten(1, IMAGE)).flatten(1)))


CASES["neg_parameters"] = Case(WithNegativeParameters(), BITS)


# --- the tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_right_or_refused(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_unchanged(name: str) -> None:
    outputs_unchanged(net(CASES[name].step, torch.float64), points(2, torch.float64), CASES[name].words)


BACKWARD = (
    "rectgrad rectgrad_prr rectgrad_mod saliency gradient_x_input guided_backprop deconv smoothgrad "
    "integrated_gradients epsilon_lrp deeplift"
).split()


class SmallCNN(nn.Module):
    """Weights of both signs, as `store` returns them."""

    def __init__(self, store: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        sizes = [(6, 2, 3, 3), (6,), (6, 6, 3, 3), (6,), (6,), (6,), (3, 216), (3,)]
        values = [uniform(*size, seed=i).float() - 0.7 for i, size in enumerate(sizes)]
        self.store, self.values = store, nn.ParameterList(values)

    def forward(self, x: Tensor) -> Tensor:
        k1, b1, k2, b2, weight, bias, w, b = map(self.store, self.values)
        h = F.relu(F.conv2d(x, k1, b1, padding=1))
        h = F.conv2d(h, k2, b2, padding=1)
        h = F.relu(F.batch_norm(h, self.store(bias / 2), self.store(weight.square() + 0.5), weight, bias))
        return F.linear(h.flatten(1), w, b)


@pytest.mark.parametrize("store", [neg_view, conj_imag])
@pytest.mark.parametrize("method", BACKWARD)
def test_how_weights_are_stored_does_not_matter(method: str, store: Callable) -> None:
    """With a selection too, when few gradients are left and other kernels may be used."""
    x = uniform(2, 2, 6, 6, seed=30).float() - 0.7
    options = {"steps": 3} if method == "integrated_gradients" else {}
    options = {"samples": 2} if method == "smoothgrad" else options
    expected = rectgrad.attribute(SmallCNN(torch.clone).eval(), x, method, target=1, **options)
    maps = rectgrad.attribute(SmallCNN(store).eval(), x, method, target=1, **options)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
