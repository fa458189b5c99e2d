"""Small models, and `refused`: what the tests of errors and warnings share."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import QUICK
from rectgrad import UnsupportedModelError

RECTIFYING = ["rectgrad", "rectgrad_prr", "rectgrad_mod", "guided_backprop", "deconv"]
FEW = QUICK


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def points(n: int = 2, d: int = 6) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two hidden layers: `first` is the part under test, the second a plain ReLU where `also_relu`."""

    def __init__(self, first: Callable, also_relu: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 60), nn.Linear(60, 60), nn.Linear(60, 3)
        self.first, self.also_relu = first, also_relu

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.first(self.a(x)))
        return self.c(F.relu(h) if self.also_relu else h)


def net(first: Callable, also_relu: bool = True) -> nn.Module:
    return seeded(lambda: Net(first, also_relu).eval())


def refused(model: Any, name: str, *words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        rectgrad.attribute(model, points(), name)
    sentence = str(caught.value)
    for word in words:
        assert re.search(word, sentence), f"{word!r} is missing in: {sentence}"


NAN, INF = float("nan"), float("inf")
