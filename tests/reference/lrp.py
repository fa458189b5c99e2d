"""Layer-wise relevance propagation, AttnLRP and excitation backprop: relevance goes from node to node.

A layer with weights, the biases added to it, the batch norm after it and the scales and shifts before it are
one linear map, whose weights are its Jacobian.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from reference.graph import LINEAR, RECTIFIERS, ROUTES, SQUASHING, Rule, Run, Shares, family, part, plain
from reference.relevance import COMPOSITES, shared

WEIGHTED = ("conv", "conv_transpose", "linear")


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
    """(outputs, inputs)."""
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = f(x).flatten()
    basis = torch.eye(len(out), dtype=x.dtype)
    return torch.autograd.grad(out, x, basis, is_grads_batched=True)[0].flatten(1)


def lrp_rule(
    composite: str = "epsilon",
    epsilon: float = 1e-4,
    gamma: float = 0.25,
    low: float = 0.0,
    high: float = 0.0,
    attention: bool = False,
    contrastive: bool = False,
) -> Rule:
    """R is a relevance here, not a gradient. Pooling is a linear map, max pooling the one that selects.
    attention: a softmax has a rule of its own (Achtibat et al. 2024), else its weights are constants."""
    excites = composite == "excitation"

    def linear(R: Tensor, f: Callable, x: Tensor, rule: str = "epsilon", **bounds) -> Tensor:
        w, b = dense_jacobian(f, x), f(torch.zeros_like(x)).flatten().detach()
        options = {"gamma": gamma, **{name: value.flatten() for name, value in bounds.items()}}
        return shared(rule, x.flatten(), w, b, R.flatten(), epsilon, **options).reshape(x.shape)

    def layer(record: Run, nodes: list[fx.Node], R: Tensor) -> Shares:
        weighted = next(node for node in nodes if family(node) in WEIGHTED)
        (source,) = record.sources(nodes[0])
        start, convolution, dense = COMPOSITES[composite]
        rule = convolution if family(weighted).startswith("conv") else dense
        rule = start if is_first(record, weighted) else rule
        if contrastive and is_last(record, weighted):
            rule = "contrast"
        bounds = {}
        if rule == "box":
            bounds = {name: at_layer(record, source, end) for name, end in (("low", low), ("high", high))}
        f = chained(record, nodes)
        return [(source, linear(R, f, record.values[source], rule, **bounds))]

    def product(record: Run, node: fx.Node, R: Tensor) -> Shares:
        sources = [s for s in record.sources(node) if attention or not softmaxed(record, s)]
        sources = [s for s in sources if not inverse(record, s)] or sources
        if family(node) == "truediv" and len(sources) == 2:
            return [(sources[0], R)]
        if family(node) in ("mul", "truediv"):
            return [(s, (R / len(sources)).sum_to_size(record.values[s].shape)) for s in sources]
        return [(s, linear(R / len(sources), part(record, node, s), record.values[s])) for s in sources]

    def total(record: Run, node: fx.Node, R: Tensor) -> Shares:
        """A sum, an average or a choice: each summand in proportion; a constant is a bias."""
        sources = record.sources(node)
        slopes = [dense_jacobian(part(record, node, s), record.values[s]) for s in sources]
        values = [record.values[s].flatten() for s in sources]
        x, w = torch.cat(values), torch.cat(slopes, dim=1)
        rule = "excitation" if excites and "max_pool" not in family(node) else "epsilon"
        bias = record.values[node].flatten() - w @ x
        parts = shared(rule, x, w, bias, R.flatten(), epsilon).split([len(v) for v in values])
        return [(s, p.reshape(record.values[s].shape)) for s, p in zip(sources, parts, strict=True)]

    def step(record: Run, node: fx.Node, R: Any) -> Shares:
        kind, z = family(node), record.values[node]
        if nodes := layer_ending_at(record, node):
            return layer(record, nodes, R)
        if kind == "softmax" and attention:
            dim, x = node.kwargs["dim"], record.values[node.args[0]]
            return [(node.args[0], x * (R - z * R.sum(dim, keepdim=True)))]
        if kind in RECTIFIERS | SQUASHING | {"pow", "rsqrt", "reciprocal"}:
            return [(node.args[0], R)]
        if kind in ("batch_norm", "add", "sub") and excites and len(record.sources(node)) == 1:
            (source,) = record.sources(node)
            return [(source, R * (record.values[source] != 0))]  # biases excite nothing
        if kind in ("mul", "truediv", "matmul"):
            return product(record, node, R)
        if kind in ("layer_norm", "group_norm"):
            return [(node.args[0], linear(R, frozen_norm(record, node), record.values[node.args[0]]))]
        if kind in LINEAR:
            return total(record, node, R)
        assert kind in ROUTES, f"no relevance rule for {kind}"
        return plain_relevance(record, node, R)

    return step


def plain_relevance(record: Run, node: fx.Node, R: Any) -> Shares:
    """Moved about: each element keeps its relevance."""
    return plain(record, node, R)


def chained(record: Run, nodes: list[fx.Node]) -> Callable[[Tensor], Tensor]:
    """Nodes that follow one another as one function of the first one's source."""

    def f(x: Tensor) -> Tensor:
        (source,) = record.sources(nodes[0])
        for node in nodes:
            x, source = record.call(node, {source: x}), node
        return x

    return f


def layer_ending_at(record: Run, node: fx.Node) -> list[fx.Node]:
    """The nodes of the layer whose last one this is; none if it is not a layer's last one."""
    nodes = [node]
    while family(nodes[0]) not in WEIGHTED:
        sources = record.sources(nodes[0])
        after = (family(nodes[0]) == "batch_norm" and nodes[0] is node) or adds_constant(record, nodes[0])
        if not after or len(sources) != 1 or len(sources[0].users) > 1:
            return []
        nodes.insert(0, sources[0])
    while True:
        (source,) = record.sources(nodes[0])
        if len(source.users) > 1 or not scales_or_shifts(record, source) or layer_ending_at(record, source):
            return nodes
        nodes.insert(0, source)


def adds_constant(record: Run, node: fx.Node) -> bool:
    return family(node) in ("add", "sub") and len(record.sources(node)) == 1


def scales_or_shifts(record: Run, node: fx.Node) -> bool:
    """Zero padding too: with a convolution it is one linear map."""
    kinds = (
        "add",
        "sub",
        "mul",
        "truediv",
        "batch_norm",
        *("pad",) * (node.kwargs.get("mode") == "constant"),
    )
    return len(record.sources(node)) == 1 and family(node) in kinds


def is_first(record: Run, node: fx.Node) -> bool:
    """No other layer with weights between it and the inputs."""
    return not any(
        family(source) in WEIGHTED or not is_first(record, source) for source in record.sources(node)
    )


def is_last(record: Run, node: fx.Node) -> bool:
    """No other layer with weights between it and the output."""
    return not any(family(user) in WEIGHTED or not is_last(record, user) for user in node.users)


def at_layer(record: Run, node: fx.Node, value: float) -> Tensor:
    """What the input's bound is at a node between it and the first layer."""
    if node.op == "placeholder":
        return torch.full_like(record.values[node], value)
    return record.call(node, {source: at_layer(record, source, value) for source in record.sources(node)})


def inverse(record: Run, node: fx.Node) -> bool:
    """A constant divided by data, or a negative power of data: a norm's denominator may be written so."""
    kind = family(node)
    power = kind == "pow" and isinstance(node.args[1], float) and node.args[1] < 0
    return power or kind in ("rsqrt", "reciprocal") or (kind == "truediv" and node.args[0] not in record.data)


def softmaxed(record: Run, node: fx.Node) -> bool:
    """Softmax weights, possibly moved about since."""
    kind = family(node)
    if kind in ROUTES - {"cat"}:
        return softmaxed(record, node.args[0])
    return kind == "softmax"
