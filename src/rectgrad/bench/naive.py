"""RectGrad as one would write it plainly: a custom autograd.Function in place of each activation.

tau comes from torch's own selections. torch.quantile takes at most 2**24 units a sample, and where tau's
place lies halfway between two units it may take the other one, so that a layer passes one unit more or less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rectgrad.bench.case import Case

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.GELU)  # of the networks measured here
Q = 98.0


def rank(d: int) -> int:
    """Of tau among d scores, counted from the largest, which is 0."""
    return round((d - 1) * (1 - Q / 100))


TAUS: dict[str, Callable[[Tensor], Tensor]] = {
    "kthvalue": lambda s: s.kthvalue(s.shape[1] - rank(s.shape[1]), dim=1).values,
    "topk": lambda s: s.topk(rank(s.shape[1]) + 1, dim=1).values[:, -1],
    "sort": lambda s: s.sort(dim=1, descending=True).values[:, rank(s.shape[1])],
    "quantile": lambda s: s.quantile(Q / 100, dim=1, interpolation="nearest"),
}


class Rectified(torch.autograd.Function):
    """a = activation(z); on the way back R where a * R > tau, tau for each sample."""

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
    """RectGrad without the padding trick, tau by one of TAUS."""
    module = sharing_copy(case.module)
    for parent in list(module.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, ACTIVATIONS):
                child.inplace = False  # as a Function may not write on its input without saying so
                setattr(parent, child_name, RectifiedActivation(child, TAUS[name]))

    def run() -> Tensor:
        x = case.inputs.detach().requires_grad_()
        scores = module(x).gather(1, case.target.unsqueeze(1))
        (R,) = torch.autograd.grad(scores.sum(), x)
        return (R * case.inputs).clamp(min=0)

    return run


def sharing_copy(module: nn.Module) -> nn.Module:
    """A copy with the same tensors, to be changed."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
