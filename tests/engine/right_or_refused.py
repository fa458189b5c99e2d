"""The comparison of `test_never_silent*.py`: a map is autograd's gradient, or the model is refused by name.

Every network here has positive inputs, weights and gradients, so that all of its units are active and no rule
stops anything: the map of every method below then equals the plain gradient of autograd.
"""

import contextlib
import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rectgrad
from rectgrad import UnsupportedModelError

ALL_PASS = {"tau": -1e30, "padding_trick": False, "multiply_by_input": False, "positive_only": False}
RECTIFYING = {"rectgrad": ALL_PASS, "guided_backprop": {}, "deconv": {}}
METHODS = {"saliency": {}, **RECTIFYING}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WIDTH = 8


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """Positive numbers in float64; `Net` converts its own to the type it is tested with."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2


class Net(nn.Module):
    """`step` between two linear layers with ReLUs, all weights positive. Its buffers `w` and `k` are for the
    step, a square matrix and the kernel of a convolution."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.relu_a, self.relu_b, self.step = nn.ReLU(), nn.ReLU(), step
        self.register_buffer("w", uniform(WIDTH, WIDTH, seed=1))
        self.register_buffer("k", uniform(1, 1, 3, 3, seed=2))
        for i, p in enumerate(self.parameters()):
            p.data = uniform(*p.shape, seed=3 + i) / 4

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu_a(self.a(x))
        h = self.step(h, self) if wants_model(self.step) else self.step(h)
        return self.c(self.relu_b(self.b(h)))


def wants_model(step: Any) -> bool:
    code = getattr(step, "__code__", None)
    return code is not None and code.co_argcount == 2


def net(step: Callable[..., Tensor], dtype: torch.dtype) -> Net:
    return Net(copy.deepcopy(step) if isinstance(step, nn.Module) else step).to(dtype).eval()


def points(n: int, dtype: torch.dtype) -> Tensor:
    return uniform(n, 6, seed=20).to(dtype)


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Autograd's gradient of the score. Asserts what makes it comparable: every ReLU is active and receives
    positive gradients."""
    x, signs = x.clone().requires_grad_(), []

    def look(_: nn.Module, __: Any, output: Tensor) -> None:
        assert bool((output > 0).all())
        output.register_hook(lambda R: signs.append(bool((R > 0).all())))

    handles = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.ReLU)]
    try:
        found = torch.autograd.grad(model(x)[:, 1].sum(), x)[0]
    finally:
        for handle in handles:
            handle.remove()
    assert len(signs) >= 2
    assert all(signs)
    return found


def error_of(maps: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((maps - expected).abs().max() / expected.abs().max())


def close(maps: Tensor, expected: Tensor) -> bool:
    return error_of(maps, expected) <= TOLERANCE[maps.dtype]


def names_the_reason(refusal: Exception, words: str) -> None:
    assert re.search(words, str(refusal)), f"{words!r} does not match: {refusal}"


def right_or_refused(
    model: nn.Module,
    x: Tensor,
    method: str,
    words: str,
    *,
    truth: nn.Module | None = None,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> bool:
    """Whether there is a map. It must be the gradient of `model`, or that of `truth` where autograd itself is
    deceived; a refusal must match `words`. Where autograd raises an error, the same is fine here. All of it
    happens in the context `around`."""
    expected, refusals = [], [UnsupportedModelError]
    with around():
        for each in (model, truth):
            try:
                expected += [] if each is None else [gradient(each, x)]
            except RuntimeError as error:
                refusals.append(type(error))
    try:
        with around():
            maps = rectgrad.attribute(model, x, method, target=1, **METHODS[method])
    except tuple(refusals) as refusal:
        names_the_reason(refusal, words)
        return False
    assert expected, f"{method}: autograd cannot differentiate this model, and yet there is a map"
    error = min(error_of(maps, y) for y in expected)
    assert error <= TOLERANCE[maps.dtype], f"{method}: the map is wrong by {error:.2g} of its maximum"
    return True


def outputs_unchanged(model: nn.Module, x: Tensor, words: str) -> None:
    """The outputs of a record, and those of the model after it, are those of the model before it."""
    expected = model(x).detach()
    try:
        assert close(rectgrad.record(model, x).outputs.detach(), expected)
    except UnsupportedModelError as refusal:
        names_the_reason(refusal, words)
    assert torch.equal(model(x).detach(), expected)


@dataclass
class Case:
    """A step with a positive Jacobian, what a refusal must mention, and the same without the difficulty."""

    step: Callable[..., Tensor]
    words: str
    truth: Callable[..., Tensor] | None = None
    samples: int = 2


def check(case: Case) -> None:
    """Every method, in both types."""
    for dtype, method in itertools.product(TOLERANCE, METHODS):
        truth = None if case.truth is None else net(case.truth, dtype)
        x = points(case.samples, dtype)
        right_or_refused(net(case.step, dtype), x, method, case.words, truth=truth)
