"""The contenders: the plain gradient, our methods, straightforward RectGrad implementations, and Captum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rectgrad.api import attribute
from rectgrad.bench.case import Case
from rectgrad.bench.naive import TAUS, naive
from rectgrad.bench.peers import PEERS, peer
from rectgrad.bench.plan import Plan
from rectgrad.methods.catalog import as_method

PLAIN = "plain"
OURS = "ours"  # RectGrad without the padding trick, like the naive implementations


class Contender(NamedTuple):
    name: str
    group: str  # plain, rectgrad, naive or captum
    run: Callable[[], Tensor]


def plain(case: Case) -> Tensor:
    """The plain gradient of the scores with respect to the images."""
    x = case.inputs.detach().requires_grad_()
    scores = case.module(x).gather(1, case.target.unsqueeze(1))
    return torch.autograd.grad(scores.sum(), x)[0]


def ours(case: Case, name: str, **options: object) -> Tensor:
    return attribute(case.module, case.inputs, as_method(name, options), case.target)


def contenders(case: Case, plan: Plan) -> list[Contender]:
    """The plain gradient first, then the chosen methods and their counterparts."""
    chosen = plan.chosen
    found = [Contender(PLAIN, "plain", partial(plain, case))]
    found += [Contender(name, "rectgrad", partial(ours, case, name)) for name in chosen]
    if plan.naive and "rectgrad" in chosen:
        found.append(Contender(OURS, "naive", partial(ours, case, "rectgrad", padding_trick=False)))
        found += [Contender(f"torch.{name}", "naive", naive(case, name)) for name in TAUS]
    if plan.with_captum:
        found += [Contender(PEERS[name], "captum", peer(case, name)) for name in chosen if name in PEERS]
    return found
