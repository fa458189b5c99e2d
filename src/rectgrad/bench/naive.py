"""Straightforward RectGrad: a custom autograd.Function replaces each activation.

tau comes from torch's selection functions. torch.quantile takes at most 2**24 units per sample, and if the
rank of tau is halfway between two units, it may choose the other one. A layer then passes one unit more or
less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rectgrad.bench.case import Case

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.GELU)  # in the networks measured here
Q = 98.0


def rank(d: int) -> int:
    """The rank of tau among d scores; the largest score has rank 0."""
    return round((d - 1) * (1 - Q / 100))


TAUS: dict[str, Callable[[Tensor], Tensor]] = {
    "kthvalue": lambda s: s.kthvalue(s.shape[1] - rank(s.shape[1]), dim=1).values,
    "topk": lambda s: s.topk(rank(s.shape[1]) + 1, dim=1).values[:, -1],
    "sort": lambda s: s.sort(dim=1, descending=True).values[:, rank(s.shape[1])],
    "quantile": lambda s: s.quantile(Q / 100, dim=1, interpolation="nearest"),
}


class Rectified(torch.autograd.Function):
    """a = activation(z); the backward pass returns R where a * R > tau, with one tau per sample."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: nn.Module, tau: Callable[[Tensor], Tensor]) -> Tensor:
        a = activation(z)
        ctx.save_for_backward(a)
        ctx.tau = tau
        return a

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (a,), (R,) = ctx.saved_tensors, grads
        s = (a * R).flatten(1)
        passes = s > ctx.tau(s).unsqueeze(1)
        return torch.where(passes.view(R.shape), R, 0), None, None


class RectifiedActivation(nn.Module):
    def __init__(self, activation: nn.Module, tau: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation, self.tau = activation, tau

    def forward(self, z: Tensor) -> Tensor:
        return Rectified.apply(z, self.activation, self.tau)


def naive(case: Case, name: str) -> Callable[[], Tensor]:
    """RectGrad without the padding trick; `name` selects one of TAUS."""
    module = sharing_copy(case.module)
    for parent in list(module.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, ACTIVATIONS):
                child.inplace = False  # a Function must declare in-place changes of its input
                setattr(parent, child_name, RectifiedActivation(child, TAUS[name]))

    def run() -> Tensor:
        x = case.inputs.detach().requires_grad_()
        scores = module(x).gather(1, case.target.unsqueeze(1))
        (R,) = torch.autograd.grad(scores.sum(), x)
        return (R * case.inputs).clamp(min=0)

    return run


def sharing_copy(module: nn.Module) -> nn.Module:
    """A copy of the modules that shares parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
