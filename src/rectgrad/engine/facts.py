"""What a rule may ask about an op's surroundings: typed facts, filled in once before a backward pass.

A `Graph` is what the facts are found in: the ops of a recorded pass, or the autograd nodes of a bridged one.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectgrad.ops import RECTIFIERS
from rectgrad.ops.samples import TURNING
from rectgrad.ops.table import CHANGES_SHAPE, CHANNELS_LAST, CHANNELS_SECOND

if TYPE_CHECKING:
    from rectgrad.engine.op import Op


class Facts:
    """About one op. Only the facts that a method asks for are filled in: see `facts_of`.

    The defaults belong to the class, so that one of these costs little: a pass makes hundreds.
    """

    gate: bool = False  # a ReLU6 that is read once, by a division by six: a hard sigmoid, which squashes
    last: bool = False  # a rectified activation without another one between it and the score
    folded: bool = False  # a linear step that is one with the bias or the batch norm beside it
    constant: tuple[bool, ...] = ()  # for each input of a product: it is a weight, or comes from a softmax
    weight: Tensor | None = None  # of a product of data and one weight, which is a layer
    convolves: bool = False  # a layer that is a convolution
    before: tuple[Op, ...] = ()  # a layer's: scales and shifts that it alone reads, the nearest first
    after: tuple[Op, ...] = ()  # a layer's: added biases and the batch norm, each the only reader
    part_of: Op | None = None  # of those: their layer
    first: bool = False  # a layer with no other one between it and the input
    top: bool = False  # a layer with no other one between it and the score
    positive: bool = False  # a layer whose input is not negative
    rectified: bool = False  # a layer that only a ReLU reads
    channels_last: bool = False  # the layer that made the tensor keeps its channels last


NO_FACTS = Facts()  # of an op without known facts


def facts_of(op: Op) -> Facts:
    """An op's own facts, to be filled in."""
    if op.facts is NO_FACTS:
        op.facts = Facts()
    return op.facts


def walk(start: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """The nodes that can be reached from some, nearest first, each of them once."""
    waiting, met = deque(start), {None}
    while waiting:
        node = waiting.popleft()
        if node not in met:
            met.add(node)
            yield node
            waiting.extend(following(node))


class Graph:
    """The nodes below a score: `below` gives the nodes that a gradient goes to from each, `ops` the op of a
    node that is recorded, `inputs` the nodes that stand for the network's inputs."""

    def __init__(self, root: Any, below: dict[Any, list[Any]], ops: dict[Any, Op], inputs: set[Any]) -> None:
        self.root, self.below, self.ops, self.inputs = root, below, ops, inputs

    @classmethod
    def of_ops(cls, root: Op) -> Graph:
        """The ops of a recorded pass."""
        below: dict[Any, list[Any]] = {op: list(op.sources) for op in walk([root], lambda op: op.sources)}
        return cls(root, below, {op: op for op in below}, {op for op in below if op.family == "input"})

    @functools.cached_property
    def readers(self) -> dict[Any, list[Any]]:
        """The nodes that read each node's result."""
        readers: dict[Any, list[Any]] = {node: [] for node in self.below}
        for node, following in self.below.items():
            for each in following:
                readers.setdefault(each, []).append(node)
        return readers

    def kind(self, node: Any) -> str:
        """The kind of a node: an op's family or name, or the name of an autograd node."""
        op = self.ops.get(node)
        if op is not None:
            return op.name if op.family in ("", "norm") else op.family
        name = type(node).name(node)  # `node.name` may be what a custom Function keeps as `ctx.name`
        return name.rstrip("0123456789").removesuffix("Backward").lower()

    def only_reader(self, node: Any) -> Op | None:
        """The recorded op that alone reads a node's result, perhaps in another shape."""
        while len(self.readers[node]) == 1:
            (node,) = self.readers[node]
            op = self.ops.get(node)
            if (self.kind(node) if op is None else op.name) not in CHANGES_SHAPE:
                return op
        return None


Finder = Callable[[Graph], None]  # fills in facts of the ops in a graph


def find_last(graph: Graph) -> None:
    rectified = {node for node, op in graph.ops.items() if op.family in RECTIFIERS}
    for node in walk([graph.root], lambda node: () if node in rectified else graph.below[node]):
        if node in rectified:
            facts_of(graph.ops[node]).last = True


def find_gates(graph: Graph) -> None:
    for node, op in graph.ops.items():
        readers = graph.readers[node]
        if op.family == "relu6" and len(readers) == 1 and readers[0] in graph.ops:
            facts_of(op).gate = _divides_by_six(graph.ops[readers[0]])


def _divides_by_six(op: Op) -> bool:
    """Whether a division or a product divides its one data tensor by six."""
    if op.family not in ("div", "mul") or op.data_count != 1 or op.name == "rdiv":
        return False
    first, *others = *op.args, *op.kwargs.values()
    values, factor = (others, 6) if op.family == "div" else ((first, *others), 1 / 6)
    # Compared by type: a slot is an int too, but stands for data.
    numbers = (v for v in values if type(v) in (int, float) or (isinstance(v, Tensor) and v.numel() == 1))
    return any(abs(float(number) - factor) < 1e-3 for number in numbers)


def find_channels(graph: Graph) -> None:
    """Whether the layer nearest to a tensor keeps its channels last, and they have not moved since."""
    for start, op in graph.ops.items():
        moved = {start: False}
        for node in walk([start], graph.below.__getitem__):
            kind, made = graph.kind(node), graph.ops.get(node)
            if kind in CHANNELS_LAST | CHANNELS_SECOND:
                last = kind in CHANNELS_LAST or (made is not None and len(made.shape) == 2)
                facts_of(op).channels_last = last ^ moved[node]
                break
            for each in graph.below[node]:
                moved.setdefault(each, moved[node] ^ (kind in TURNING and _moves_last(made)))


def _moves_last(op: Op | None) -> bool:
    """Whether a transposition moves the last dimension; True if unknown."""
    return op is None or op.call(torch.empty(op.input_shapes[0], device="meta")).stride(-1) != 1
