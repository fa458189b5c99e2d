"""Epsilon-LRP: R_i = sum_j x_i w_ij R_j / (z_j + epsilon * sign(z_j)), z with bias.

What travels is c = relevance / value, so that the relevance of a tensor is value * c and each step is a
plain gradient with factors. R is the relevance in the formula above; in the code, as in every rule, R is what
arrives at an op, which is c here:

    linear maps     c_x = J^T (c * |z| / (|z| + epsilon))
    activations     c_z = c * a / z                     relevance passes unchanged
    x * y, x @ y    half of the gradient to each; all of it to x where y is a softmax's weights
    norms, x / y    the denominator is a constant

On ReLU networks this tends to gradient * input as epsilon goes to 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule, wide
from rectgrad.ops.composite import norm as norm_by_steps

_LINEAR = "conv conv_transpose linear batch_norm max_pool avg_pool sum add matmul".split()


def lrp_rules(epsilon: float) -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(_LINEAR, lrp_linear(epsilon))
    activation = Rule(_activation, "lrp_activation")
    rules |= dict.fromkeys((*ops.RECTIFIERS, "squash", "softmax", "log_softmax"), activation)
    rules |= {"mul": Rule(_product, "lrp_product"), "div": Rule(_division, "lrp_division")}
    return rules | {"norm": lrp_norm(epsilon)}


def lrp_linear(epsilon: float) -> Rule:
    def apply(op: Op, R: Tensor) -> Any:
        if not op.facts.folded:
            R = R * _stabilised(op.output, epsilon)
        return op.vjp(R) if op.data_count == 1 or op.family == "add" else _product(op, R)

    return Rule(apply, "lrp_linear")


def _activation(op: Op, R: Tensor) -> Tensor:
    a, z = wide(op.output), wide(op.inputs[0])
    smallest = torch.finfo(z.dtype).tiny ** 0.5
    safe = torch.where(z.abs() < smallest, torch.full_like(z, smallest).copysign(z), z)
    return (R * (a / safe)).to(R.dtype)


def _product(op: Op, R: Tensor) -> Any:
    constant = op.facts.constant or (False,) * op.data_count
    sharing = constant.count(False) or 1
    grads = op.vjp(R / sharing)
    if all(constant):
        return grads
    return tuple(None if weight else grad for weight, grad in zip(constant, grads, strict=True))


def _division(op: Op, R: Tensor) -> Any:
    grads = op.vjp(R)
    if op.data_count == 1:
        return grads
    return (None, grads[1]) if op.name == "rdiv" else (grads[0], None)


def lrp_norm(epsilon: float) -> Rule:
    def apply(op: Op, R: Tensor) -> Any:
        with torch.enable_grad():
            leaf = op.inputs[0].detach().requires_grad_()
            output = norm_by_steps(op, leaf, constant=True)
        return torch.autograd.grad(output, leaf, R * _stabilised(op.output, epsilon))

    return Rule(apply, "lrp_norm")


def _stabilised(z: Tensor, epsilon: float) -> Tensor:
    """z / (z + epsilon * sign(z)); 0 where z is 0, whose relevance is 0 too."""
    size = wide(z).abs()
    return torch.where(size > 0, size / (size + epsilon), 0).to(z.dtype)
