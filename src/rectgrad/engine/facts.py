"""Facts about an op's surroundings that rules may read, computed once before a backward pass.

They are found in a `Graph`: the ops of a recorded pass, or the autograd nodes of a bridged one.
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
    """Facts about one op. Only those that a method asks for are computed; see `facts_of`.

    The defaults are class attributes, which makes an instance cheap: a pass creates hundreds.
    """

    gate: bool = False  # a ReLU6 that is only read by a division by six: part of a hard sigmoid
    last: bool = False  # no other rectified activation between this one and the score
    folded: bool = False  # a linear op that forms one step with a bias or batch norm beside it
    constant: tuple[bool, ...] = ()  # for each input of a product: a weight, or the result of a softmax
    weight: Tensor | None = None  # of a layer: a product of data and one weight
    convolves: bool = False  # a layer that is a convolution
    before: tuple[Op, ...] = ()  # of a layer: scales and shifts that only it reads, the nearest first
    after: tuple[Op, ...] = ()  # of a layer: added biases and the batch norm, each the only reader
    part_of: Op | None = None  # the layer of one of those
    first: bool = False  # no other layer between this one and the input
    top: bool = False  # no other layer between this one and the score
    positive: bool = False  # the input of the layer is not negative
    rectified: bool = False  # only a ReLU reads the layer's output
    channels_last: bool = False  # the channels are the last dimension


NO_FACTS = Facts()  # of all other ops


def facts_of(op: Op) -> Facts:
    """An op's own facts, to be set."""
    if op.facts is NO_FACTS:
        op.facts = Facts()
    return op.facts


def walk(start: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """All nodes that can be reached from `start`, in breadth-first order."""
    waiting, met = deque(start), {None}
    while waiting:
        node = waiting.popleft()
        if node not in met:
            met.add(node)
            yield node
            waiting.extend(following(node))


class Graph:
    """The nodes that a score depends on. below: for each node, those that receive its gradient. ops: the op
    of each recorded node. inputs: the nodes of the network's inputs."""

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
        """The family or name of a node's op, or the name of the autograd node."""
        op = self.ops.get(node)
        if op is not None:
            return op.name if op.family in ("", "norm") else op.family
        name = type(node).name(node)  # `node.name` may be what a custom Function keeps as `ctx.name`
        return name.rstrip("0123456789").removesuffix("Backward").lower()

    def only_reader(self, node: Any) -> Op | None:
        """The op that reads a node's result, perhaps in another shape, if it is the only one."""
        while len(self.readers[node]) == 1:
            (node,) = self.readers[node]
            op = self.ops.get(node)
            if (self.kind(node) if op is None else op.name) not in CHANGES_SHAPE:
                return op
        return None


Finder = Callable[[Graph], None]  # sets facts of the ops in a graph


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
    """Whether an op divides its only data tensor by six."""
    if op.family not in ("div", "mul") or op.data_count != 1:
        return False
    values, factor = (*op.args, *op.kwargs.values()), 6 if op.family == "div" else 1 / 6
    # By type, because a slot is also an int, but stands for data.
    numbers = (v for v in values if type(v) in (int, float) or (isinstance(v, Tensor) and v.numel() == 1))
    return any(abs(float(number) - factor) < 1e-3 for number in numbers)


def find_channels(graph: Graph) -> None:
    """Channels are where the nearest layer below has them, unless dimensions were swapped since."""
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
