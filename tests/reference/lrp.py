"""Epsilon-LRP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from reference.graph import LINEAR, RECTIFIERS, ROUTES, SQUASHING, Rule, Run, Shares, family, part, plain


def lrp_linear(x: Tensor, jacobian: Tensor, z: Tensor, R: Tensor, epsilon: float) -> Tensor:
    """R_i = sum_j x_i w_ij R_j / (z_j + epsilon * sign(z_j)), sign(0) = 1; jacobian is (outputs, inputs)."""
    z, R = z.flatten(), R.flatten()
    sign = torch.where(z >= 0, torch.ones_like(z), -torch.ones_like(z))
    messages = R / (z + epsilon * sign)
    return (x.flatten() * (jacobian.T @ messages)).reshape(x.shape)


def frozen_norm(record: Run, node: fx.Node) -> Callable[[Tensor], Tensor]:
    """Layer or group normalisation with its denominator held at the recorded value: a linear map."""
    x = record.values[node.args[0]]
    grouped, weight, bias, eps = norm_settings(record, node)
    deviation = (grouped(x).var(-1, unbiased=False, keepdim=True) + eps).sqrt()

    def f(x: Tensor) -> Tensor:
        rows = grouped(x)
        return ((rows - rows.mean(-1, keepdim=True)) / deviation).reshape(x.shape) * weight + bias

    return f


def norm_settings(record: Run, node: fx.Node) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor, float]:
    """How to lay out what is normalised together as rows; weight and bias shaped for the input."""
    settings = record.value(node.kwargs)
    if family(node) == "layer_norm":
        n = len(node.args[1])
        return (lambda x: x.flatten(-n)), settings["weight"], settings["bias"], settings["eps"]
    groups, channels = node.args[1], (-1,) + (1,) * (record.values[node].ndim - 2)
    weight, bias = settings["weight"].reshape(channels), settings["bias"].reshape(channels)
    return (lambda x: x.reshape(x.shape[0], groups, -1)), weight, bias, settings["eps"]


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(outputs, inputs), one basis vector after the other."""
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = f(x).flatten()
    basis = torch.eye(len(out), dtype=x.dtype)
    return torch.stack([torch.autograd.grad(out, x, e, retain_graph=True)[0].flatten() for e in basis])


def lrp_rule(epsilon: float = 1e-4) -> Rule:
    """R is a relevance here, not a gradient. Pooling is a linear map, max pooling the one that selects."""

    def linear(record: Run, node: fx.Node, R: Tensor, f: Callable, source: fx.Node, z: Tensor) -> Shares:
        x = record.values[source]
        return [(source, lrp_linear(x, dense_jacobian(f, x), z, R, epsilon))]

    def product(record: Run, node: fx.Node, R: Tensor) -> Shares:
        sources = [s for s in record.sources(node) if not softmaxed(record, s)]
        if family(node) in ("mul", "truediv"):
            return [(s, (R / len(sources)).sum_to_size(record.values[s].shape)) for s in sources]
        z, shares = record.values[node], []
        for source in sources:
            shares += linear(record, node, R / len(sources), part(record, node, source), source, z)
        return shares

    def step(record: Run, node: fx.Node, R: Any) -> Shares:
        kind, z = family(node), record.values[node]
        if kind in RECTIFIERS | SQUASHING:
            return [(node.args[0], R)]
        if kind in ("mul", "truediv", "matmul"):
            return product(record, node, R)
        if kind in ("layer_norm", "group_norm"):
            return linear(record, node, R, frozen_norm(record, node), node.args[0], z)
        if kind == "batch_norm" and folds(record, node):
            before = node.args[0]
            f = part(record, before, before.args[0])
            return linear(record, node, R, lambda x: record.call(node, {before: f(x)}), before.args[0], z)
        if kind in LINEAR:
            shares = [linear(record, node, R, part(record, node, s), s, z) for s in record.sources(node)]
            return [share for group in shares for share in group]
        assert kind in ROUTES, f"no relevance rule for {kind}"
        return plain(record, node, R)

    return step


def folds(record: Run, node: fx.Node) -> bool:
    """Is this batch normalisation the only reader of a convolution or a linear layer?"""
    before = node.args[0]
    return family(before) in ("conv", "linear") and len(before.users) == 1


def softmaxed(record: Run, node: fx.Node) -> bool:
    """Softmax weights, possibly moved about since."""
    kind = family(node)
    if kind in ROUTES - {"cat"}:
        return softmaxed(record, node.args[0])
    return kind == "softmax"
