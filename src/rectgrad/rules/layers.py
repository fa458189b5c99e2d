"""Layers for LRP: a convolution or a product with a weight, together with the biases and batch norms beside
it, is one linear map. Finds these layers and their positions in the network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from rectgrad.engine.facts import Graph, facts_of, walk
from rectgrad.engine.op import Op, UnsupportedModelError
from rectgrad.engine.recorder import linear_op
from rectgrad.engine.torch_private import tensors_in
from rectgrad.kernels.linear_ops import Scale
from rectgrad.kernels.relevance_ops import Composite, Layer
from rectgrad.ops.table import CHANGES_SHAPE

CONVOLUTIONS = ("conv", "conv_transpose")
WEIGHTED = (*CONVOLUTIONS, "linear", "matmul")
_CONSTANT = set("rsqrt reciprocal rdiv div divide true_divide sign sgn floor ceil round trunc fix".split())
# Calls whose result is not negative if their inputs are not.
_SIGN_KEEPING = CHANGES_SHAPE | set("cat concat clone dropout __getitem__ chunk split mean sum pad".split())


def find_layers(graph: Graph, softmax: bool = True) -> None:
    """Set the facts that LRP's rules read. softmax: the results of a softmax are constants."""
    _find_constants(graph, softmax)
    layers = {node: op for node, op in graph.ops.items() if _find_weight(op)}
    behind = set(walk((r for node in layers for r in graph.readers[node]), graph.readers.__getitem__))
    above = set(walk((s for node in layers for s in graph.below[node]), graph.below.__getitem__))
    positive = _not_negative(graph)
    for node, op in layers.items():
        reader = graph.only_reader(_find_parts(graph, node, op, graph.readers))
        op.facts.first, op.facts.top = node not in behind, node not in above
        op.facts.positive = bool(op.sources) and positive.issuperset(op.sources)
        op.facts.rectified = reader is not None and reader.family in ("relu", "relu6")
    for node, op in layers.items():  # an op after one layer does not also belong to the next
        _find_parts(graph, node, op, graph.below)


def _find_constants(graph: Graph, softmax: bool) -> None:
    """Set which inputs are constant, and which two ops are one linear map for the epsilon rule. Inputs are
    constant if they depend on the network's input only through a softmax, a norm's denominator or a step."""
    ends = {node for node, op in graph.ops.items() if _ends_data(op) or (softmax and op.family == "softmax")}
    data = set(walk(graph.inputs, lambda node: [each for each in graph.readers[node] if each not in ends]))
    for node, op in graph.ops.items():
        if op.family in ("mul", "div", *WEIGHTED):
            facts_of(op).constant = tuple(each not in data for each in graph.below[node] if each is not None)
        reads_one = op.data_count == 1 or op.facts.constant.count(False) == 1  # apart from weights
        reader = graph.only_reader(node) if op.family in (*WEIGHTED, "add") and reads_one else None
        if reader is not None:
            adds_bias = reader.family == "add" and reader.data_count == 1
            facts_of(op).folded = adds_bias or reader.family == "batch_norm"


def _ends_data(op: Op) -> bool:
    """Whether an op is a step function, or divides a constant by its data or by a power of it."""
    if op.name in ("pow", "float_power"):
        return any(type(each) in (int, float) and each < 0 for each in (*op.args[1:], *op.kwargs.values()))
    return op.family == "unary" and op.name in _CONSTANT


def _find_weight(op: Op) -> bool:
    """Whether an op is a layer: a product of its only data tensor and one weight."""
    given = (*op.args, *op.kwargs.values()) if op.family in WEIGHTED and op.data_count == 1 else ()
    parts = chain.from_iterable(part if type(part) in (list, tuple) else (part,) for part in given)
    weights = [w for w in parts if isinstance(w, Tensor) and w is not bias_of(op)]
    if len(weights) == 1:
        facts_of(op).weight, op.facts.convolves = weights[0], op.family in CONVOLUTIONS
    return len(weights) == 1


def bias_of(op: Op) -> Tensor | None:
    return op.argument("input" if op.name in ("addmm", "addmv", "addbmm", "baddbmm") else "bias")


def _not_negative(graph: Graph) -> set[Op]:
    """The ops whose result is known never to be negative."""
    found: set[Op] = set()
    for op in sorted(graph.ops.values(), key=lambda op: op.index):
        keeps = op.name in _SIGN_KEEPING or op.family in ("max_pool", "avg_pool")
        keeps = keeps or (op.name == "add" and op.data_count > 1)
        keeps = keeps and bool(op.sources) and found.issuperset(op.sources) and not op.argument("value")
        if op.family in ("relu", "relu6") or (keeps and not list(tensors_in((op.args, op.kwargs)))):
            found.add(op)
    return found


def _find_parts(graph: Graph, node: Any, layer: Op, way: dict[Any, list[Any]]) -> Any:
    """Set the ops that belong to a layer: the biases and the batch norm after it, or the scales and shifts
    before it, if nothing else reads them. Returns the last of these nodes. way: the readers or sources."""
    after, facts, normed = way is graph.readers, layer.facts, False
    while not normed and len(near := [each for each in way[node] if each is not None]) == 1:
        op, alone = graph.ops.get(near[0]), len(graph.readers[node if after else near[0]]) == 1
        if op is None or not alone or op.facts.part_of or not _is_part(op, layer, after):
            break
        (node,), normed, facts_of(op).part_of = near, isinstance(op.linear, Scale), layer
        if after:
            facts.after += (op,)
        else:
            facts.before, facts.positive, op.facts.folded = (*facts.before, op), False, True
    return node


def _is_part(op: Op, layer: Op, after: bool) -> bool:
    """Whether an op scales and shifts each element of its data, or each channel after the layer."""
    if op.input_shapes != (op.shape,):
        return False
    if isinstance(op.linear, Scale):
        rows = len(op.shape) == 2 and layer.name in ("linear", "matmul", "mm", "addmm")
        return rows or layer.facts.convolves or not after
    adds = op.name == "add" and "alpha" not in op.kwargs
    return adds if after else op.family in ("add", "mul", "div")


def layer_of(op: Op, c: Tensor, composite: Composite) -> Layer:
    """A layer in a backward pass. c: relevance / output of the linear map."""
    facts, bias = op.facts, bias_of(op)

    def made(x: Tensor, weight: Tensor) -> Op:
        """The layer with another weight and without bias."""
        none = None if bias is None or op.family != "matmul" else x.new_zeros(())

        def changed(value: Any) -> Any:
            return weight if value is facts.weight else none if value is bias else value

        args = [type(a)(map(changed, a)) if type(a) in (list, tuple) else changed(a) for a in op.args]
        kwargs = {name: changed(each) for name, each in op.kwargs.items()}
        other = Op(op.spec, op.family, tuple(args), kwargs, op.state)
        other.inputs, other.linear = (x,), linear_op(other, x)
        return other

    at = partial(_replayed, op.sources[0])
    own = op.inputs[0], op.output, bias, op.family, op.argument("groups", 1)
    return Layer(*own, made, op, facts, op.state.absorbed, at, c, composite)


def _replayed(op: Op, start: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """An op's output for other inputs of the network."""
    if op.family == "input":
        return start(op.shape)
    if not op.sources:
        raise UnsupportedModelError("LRP cannot follow the input to the first layer: a step was not seen")
    return op.result(*(_replayed(each, start) for each in op.sources))
