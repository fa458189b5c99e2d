"""Ways to force a call over the bridge, and small models, for the tests of recorder and bridge."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad.engine import backward

METHODS = {
    "rectgrad": {"q": 60.0},
    "rectgrad_prr": {"q": 60.0},
    "rectgrad_mod": {"q": 60.0},
    "saliency": {},
    "guided_backprop": {},
    "deconv": {},
    "epsilon_lrp": {},
    "deeplift": {},
}


@contextmanager
def bridging(model: Any) -> Iterator[None]:
    """Calls of this model go to the bridge."""
    known = backward._is_bridged(model)
    backward.remember_bridged(model)
    try:
        yield
    finally:
        if not known:
            del backward._bridged[id(model)]


def by_bridge(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`rectgrad.attribute`, over the bridge."""
    with bridging(model):
        return rectgrad.attribute(model, *args, **kwargs)


def agree(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),)
    return all(torch.allclose(x, y, rtol=0, atol=1e-9 * float(y.abs().max())) for x, y in pairs)


class Net(nn.Module):
    """conv, `step`, linear: the step is what a test is about."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)
        self.register_buffer("seen", torch.zeros(()))
        self.step, self.runs = step, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        x = self.step(self, self.conv(x))
        return self.fc(x.mean((2, 3)))


def made(step: Any) -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    return Net(step).double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)


def relu_then_add(net: Net, x: Tensor) -> Tensor:
    """The record of a ReLU keeps a copy of what is overwritten."""
    y = F.relu(x)
    y += x
    return F.relu(y)


def view_written(net: Net, x: Tensor) -> Tensor:
    """Only the bridge can run this."""
    x[:, :2].relu_()
    return x
