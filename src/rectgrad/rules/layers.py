"""Layers with weights as LRP sees them: a convolution or a product with a weight, the biases and the batch
norms beside it, all one linear map; and where in the network it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rectgrad.engine.facts import Graph, facts_of, walk
from rectgrad.engine.op import Op, first, wide
from rectgrad.engine.recorder import linear_op
from rectgrad.engine.torch_private import map_tensors, tensors_in
from rectgrad.kernels.linear_ops import Scale
from rectgrad.ops.arguments import Slot
from rectgrad.ops.table import CHANGES_SHAPE

CONVOLUTIONS = ("conv", "conv_transpose")
WEIGHTED = (*CONVOLUTIONS, "linear", "matmul")
_DENOMINATORS = ("rsqrt", "reciprocal")  # what a norm that is written out multiplies by
_SIGN_KEEPING = CHANGES_SHAPE | set("cat concat clone dropout __getitem__ chunk split add mean sum pad".split())


def find_layers(graph: Graph, softmax: bool = True) -> None:
    """The facts of LRP's rules. softmax: the weights that a softmax makes are constants."""
    _find_constants(graph, softmax)
    layers = {node: op for node, op in graph.ops.items() if has_weight(op)}
    behind = set(walk((r for node in layers for r in graph.readers[node]), graph.readers.__getitem__))
    above = set(walk((s for node in layers for s in graph.below[node]), graph.below.__getitem__))
    positive = _not_negative(graph)
    for node, op in layers.items():
        facts, last = facts_of(op), _find_after(graph, node)
        facts.first, facts.top = node not in behind, node not in above
        facts.positive = bool(op.sources) and positive.issuperset(op.sources)
        reader = graph.only_reader(last)
        facts.rectified = reader is not None and reader.family in ("relu", "relu6")
    for node in layers:  # what is after one layer is not before another
        _find_before(graph, node)


def has_weight(op: Op) -> bool:
    """Whether an op is a product of its one data tensor and one weight."""
    if op.family not in WEIGHTED or op.data_count > 1:
        return False
    return sum(1 for _ in tensors_in((op.args, op.kwargs))) == 1 + (op.argument(_bias_name(op)) is not None)


def _bias_name(op: Op) -> str:
    return "input" if op.name in ("addmm", "addmv", "addbmm", "baddbmm") else "bias"


def _find_constants(graph: Graph, softmax: bool) -> None:
    """Which inputs are constant, and which two steps are one linear map for the epsilon rule. Data is what
    the input reaches without passing through a softmax or the denominator of a norm."""
    blocked = {
        node
        for node, op in graph.ops.items()
        if (softmax and op.family == "softmax") or op.name in _DENOMINATORS
    }
    data = set(walk(graph.inputs, lambda node: [each for each in graph.readers[node] if each not in blocked]))
    for node, op in graph.ops.items():
        if op.family in ("mul", "div", *WEIGHTED):
            facts_of(op).constant = tuple(each not in data for each in graph.below[node] if each is not None)
        reads_one = op.data_count == 1 or op.facts.constant.count(False) == 1  # weights aside
        reader = graph.only_reader(node) if op.family in (*WEIGHTED, "add") and reads_one else None
        if reader is not None:
            adds_bias = reader.family == "add" and reader.data_count == 1
            facts_of(op).folded = adds_bias or reader.family == "batch_norm"


def _not_negative(graph: Graph) -> set[Op]:
    """Ops whose result is never negative, as far as their names tell."""
    found: set[Op] = set()
    for op in sorted(graph.ops.values(), key=lambda op: op.index):
        keeps = op.family in ("max_pool", "avg_pool") or op.name in _SIGN_KEEPING
        keeps = keeps and not op.argument("value") and (op.name != "add" or op.data_count > 1)
        keeps = keeps and bool(op.sources) and found.issuperset(op.sources)
        if op.family in ("relu", "relu6") or (keeps and not list(tensors_in((op.args, op.kwargs)))):
            found.add(op)
    return found


def _find_after(graph: Graph, node: Any) -> Any:
    """The biases and the batch norm that follow a layer and belong to it; the last node of them."""
    layer = graph.ops[node]
    while len(graph.readers[node]) == 1:
        reader = graph.ops.get(graph.readers[node][0])
        if reader is None or reader.shape != layer.shape or not (_adds(reader) or _scales(reader, layer)):
            break
        (node,) = graph.readers[node]
        facts_of(layer).after += (reader,)
        facts_of(reader).part_of = layer
        if reader.family == "batch_norm":
            break
    return node


def _find_before(graph: Graph, node: Any) -> None:
    """The scales and shifts that a layer alone reads: a batch norm, or (x - mean) / std."""
    layer = graph.ops[node]
    while len(below := [each for each in graph.below[node] if each is not None]) == 1:
        (node,) = below
        op = graph.ops.get(node)
        if op is None or len(graph.readers[node]) > 1 or op.facts.part_of or not _is_affine(op):
            break
        facts_of(layer).before += (op,)
        facts_of(layer).positive = False
        facts_of(op).part_of, facts_of(op).folded = layer, True


def _is_affine(op: Op) -> bool:
    """Whether a step scales and shifts each element of its one data tensor."""
    one = op.input_shapes == (op.shape,)
    return one and (op.family in ("add", "mul") or (op.family == "div" and op.name != "rdiv") or _norms(op))


def _norms(op: Op) -> bool:
    return op.family == "batch_norm" and isinstance(op.linear, Scale)


def _adds(op: Op) -> bool:
    """Whether a step adds a constant to its data."""
    plain = op.name == "add" or (op.name in ("sub", "subtract") and type(op.args[0]) is Slot)
    return op.family == "add" and op.data_count == 1 and plain and "alpha" not in op.kwargs


def _scales(op: Op, layer: Op) -> bool:
    """Whether a batch norm scales the output channels of a layer."""
    if layer.family == "matmul" and (layer.name not in ("matmul", "mm", "addmm") or type(layer.args[-2]) is not Slot):
        return False
    return _norms(op) and (layer.family in CONVOLUTIONS or len(layer.shape) == 2)


class Layer:
    """A layer with weights in a backward pass: z = x w + bias, in float32 at least. z is the output of the
    whole, x the input without the shifts before, which count as bias; a batch norm after scales w and bias.
    """

    def __init__(self, op: Op) -> None:
        self.op, self.before, self.after = op, op.facts.before, op.facts.after
        self.y = op.inputs[0]
        self.shift = self._shift() if self.before else None
        self.x = wide(self.y) if self.shift is None else wide(self.y) - wide(self.shift)

    @cached_property
    def z(self) -> Tensor:
        return wide(self._followed(self.op.output))

    def _followed(self, value: Tensor) -> Tensor:
        """What the steps after make of a value; what they kept of theirs may be gone."""
        for step in self.after:
            value = first(step.call(value))
        return value

    def _shift(self) -> Tensor:
        """What the steps before make of 0."""
        shift = torch.zeros_like(self.before[-1].inputs[0])
        for step in reversed(self.before):
            shift = first(step.call(shift))
        return shift

    @cached_property
    def bias(self) -> Tensor:
        """What the layer makes of 0, in a shape that broadcasts."""
        op, own = self.op, self.op.argument("bias")
        if self.shift is not None or op.family == "matmul":
            bias = first(op.call(torch.zeros_like(self.y) if self.shift is None else self.shift))
        else:
            bias = self._by_channel(0 if own is None else own.detach().to(self.y.dtype))
        return wide(self._followed(bias))

    def _by_channel(self, value: Any) -> Tensor:
        """A number, or one for each output channel, in a shape that broadcasts to the output."""
        at, dims = (1, len(self.op.shape) - 2) if self.op.family in CONVOLUTIONS else (-1, 0)
        channels = torch.as_tensor(value, dtype=self.y.dtype, device=self.y.device).expand(self.op.shape[at])
        return channels.reshape(1, -1, *(1,) * dims)

    @cached_property
    def scale(self) -> Tensor | None:
        """Of each output channel, by the batch norm after."""
        if not self.after or self.after[-1].linear is None:
            return None
        return wide(self.after[-1].vjp(self._by_channel(1).clone())[0].flatten())

    @cached_property
    def plus(self) -> Weights:
        return Weights(self, lambda w: w.clamp(min=0))

    @cached_property
    def minus(self) -> Weights:
        return Weights(self, lambda w: w.clamp(max=0))

    def parts(self, plus: Weights, minus: Weights) -> Tensor:
        """Of the summands x w those with x and w of one sign, if these are the positive and the negative
        weights; with the two exchanged, the others."""
        if self.op.facts.positive:
            return plus.of(self.x)
        return plus.of(self.x.clamp(min=0)) + minus.of(self.x.clamp(max=0))

    def shared(self, plus: Weights, minus: Weights, p: Tensor, n: Tensor | None = None) -> Tensor:
        """The gradient of the parts times p, and of the parts with the weights exchanged times n."""
        above = _sum(plus.back(p), None if n is None else minus.back(n))
        if self.op.facts.positive:
            return above
        return torch.where(self.x > 0, above, _sum(minus.back(p), None if n is None else plus.back(n)))

    def at(self, start: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """The layer's input if the network's were start(its shape)."""
        sources = self.op.sources
        return wide(_replayed(sources[0], start) if sources else start(tuple(self.y.shape)))


def _replayed(op: Op, start: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    if not op.sources:
        return first(op.call(*map(start, op.input_shapes))) if op.input_shapes else start(op.shape)
    return first(op.call(*[_replayed(source, start) for source in op.sources]))


def _sum(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a + b


class Weights:
    """A layer's linear map with other weights and without bias."""

    def __init__(self, layer: Layer, change: Callable[[Tensor], Tensor]) -> None:
        self.like, op = layer.x, layer.op
        self.op, bias = copy.copy(op), op.argument(_bias_name(op))

        def changed(w: Tensor) -> Tensor | None:
            if w is bias:
                return None if op.family != "matmul" else w.new_zeros((), dtype=self.like.dtype)
            w = w.detach().to(self.like.dtype)
            return change(w if layer.scale is None else _scaled(op, w, layer.scale))

        self.op.args, self.op.kwargs = map_tensors(changed, (op.args, op.kwargs))
        self.op.linear = linear_op(self.op, self.like)

    def of(self, x: Tensor) -> Tensor:
        return first(self.op.call(x))

    def back(self, R: Tensor) -> Tensor:
        """Its gradient."""
        if self.op.linear is not None:
            return self.op.linear.gradient(R)[0]
        return self.op.vjp_at((self.like,), R)[0]


def _scaled(op: Op, w: Tensor, scale: Tensor) -> Tensor:
    """The weights that make each output channel so many times larger."""
    if op.family == "matmul":
        return w * scale
    if op.family != "conv_transpose":
        return w * scale.reshape(-1, *(1,) * (w.dim() - 1))
    groups = op.argument("groups", 1)
    by_group = w.unflatten(0, (groups, -1)) * scale.reshape(groups, 1, -1, *(1,) * (w.dim() - 2))
    return by_group.flatten(0, 1)
