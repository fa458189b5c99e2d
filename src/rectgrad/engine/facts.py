"""What a rule may ask about an op's surroundings: typed facts, filled in once before a backward pass.

A `Graph` is what the facts are found in: the ops of a recorded pass, or the autograd nodes of a bridged one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rectgrad import kernels
from rectgrad.kernels.linear_ops import Conv, Scale
from rectgrad.ops import RECTIFIERS

if TYPE_CHECKING:
    from rectgrad.engine.op import Op


class Facts:
    """About one op. Only the facts that a method asks for are filled in: see `facts_of`.

    The defaults belong to the class, so that one of these costs little: a pass makes hundreds.
    """

    gate: bool = False  # a ReLU6 that is read once, by a division by six: a hard sigmoid, which squashes
    last: bool = False  # a rectified activation without another one between it and the score
    folded: bool = False  # a linear layer whose only reader adds a bias or is a batch norm
    constant: tuple[bool, ...] = ()  # for each input of a product: it is a weight, or comes from a softmax
    channels_last: bool = False  # the layer that made the activation keeps its channels last
    norm: Scale | None = None  # a convolution: the batch norm whose scale goes into its weights
    merged: bool = False  # that batch norm: the convolution before it applies its scale
    conv: Op | None = None  # an activation: the convolution whose padding mask its kernel applies
    masked: bool = False  # that convolution: its mask is applied


NO_FACTS = Facts()  # of every op until something is known about it


def facts_of(op: Op) -> Facts:
    """An op's own facts, to be filled in."""
    if op.facts is NO_FACTS:
        op.facts = Facts()
    return op.facts


class Graph:
    """The nodes below a score: `below` gives the nodes that a gradient goes to from each, `ops` the op of a
    node that is recorded, `inputs` the nodes that stand for the network's inputs."""

    def __init__(self, root: Any, below: dict[Any, list[Any]], ops: dict[Any, Op], inputs: set[Any]) -> None:
        self.root, self.below, self.ops, self.inputs = root, below, ops, inputs

    @classmethod
    def of_ops(cls, root: Op) -> Graph:
        """The ops of a recorded pass."""
        below: dict[Any, list[Any]] = {}
        waiting = [root]
        while waiting:
            op = waiting.pop()
            if op not in below:
                below[op] = list(op.sources)
                waiting.extend(op.sources)
        return cls(root, below, {op: op for op in below}, {op for op in below if op.family == "input"})

    @functools.cached_property
    def readers(self) -> dict[Any, list[Any]]:
        """The nodes that read each node's result."""
        readers: dict[Any, list[Any]] = {}
        for node, following in self.below.items():
            for each in following:
                readers.setdefault(each, []).append(node)
        return readers

    def kind(self, node: Any) -> str:
        """What a node does, in one word: an op's family or name, or the name of an autograd node."""
        op = self.ops.get(node)
        if op is not None:
            return op.name if op.family in ("", "norm") else op.family
        return node.name().rstrip("0123456789").removesuffix("Backward").lower()

    def only_reader(self, node: Any) -> Op | None:
        """The recorded op that alone reads a node's result, perhaps in another shape."""
        while len(self.readers.get(node, ())) == 1:
            node = self.readers[node][0]
            op = self.ops.get(node)
            if op is not None and op.name not in _SHAPES:
                return op
            if op is None and self.kind(node) not in _SHAPES:
                return None
        return None


_SHAPES = frozenset(
    "view unsafeview reshapealias transpose permute unsqueeze squeeze t alias reshape flatten unflatten "
    "swapaxes swapdims movedim moveaxis contiguous".split()
)


def find_facts(graph: Graph, wanted: Sequence[str]) -> None:
    """The facts that a method asks for, of the ops in a graph."""
    if "gate" in wanted:
        find_gates(graph)
    if "last" in wanted:
        find_last(graph)
    if "folded" in wanted:
        find_constant(graph)
        find_folded(graph)
    if "channels" in wanted:
        for node, op in graph.ops.items():
            if op.family in RECTIFIERS:
                facts_of(op).channels_last = _made_channels_last(graph, node)


def find_last(graph: Graph) -> None:
    met: set[Any] = set()
    waiting = [graph.root]
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        op = graph.ops.get(node)
        if op is not None and op.family in RECTIFIERS:
            facts_of(op).last = True
        else:
            waiting.extend(graph.below[node])


def find_gates(graph: Graph) -> None:
    for node, op in graph.ops.items():
        if op.family == "relu6":
            readers = graph.readers.get(node, [])
            reader = graph.ops.get(readers[0]) if len(readers) == 1 else None
            if reader is not None and divides_by_six(reader):
                facts_of(op).gate = True


def divides_by_six(op: Op) -> bool:
    """Whether a division or a product divides its one data tensor by six."""
    if op.family not in ("div", "mul") or op.data_count != 1:
        return False
    factor = next((a for a in (*op.args, *op.kwargs.values()) if _is_number(a)), None)
    if factor is None or (op.family == "div" and (not op.args or _is_number(op.args[0]))):
        return False
    return abs(float(factor) - (6 if op.family == "div" else 1 / 6)) < 1e-3


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return type(value) in (int, float)  # a slot is an int too, and is data


_FOLDABLE = ("conv", "conv_transpose", "linear", "matmul", "add")


def find_folded(graph: Graph) -> None:
    """The two are one linear map, as if the bias were the layer's own or the norm folded into its weights."""
    for node in graph.readers:
        op = graph.ops.get(node)
        if op is not None and op.family in _FOLDABLE and _linear_in_one(op):
            reader = graph.only_reader(node)
            if reader is not None:
                adds_bias = reader.family == "add" and reader.data_count == 1
                facts_of(op).folded = adds_bias or reader.family == "batch_norm"


def _linear_in_one(op: Op) -> bool:
    """Whether one data tensor is all that an op reads, weights aside."""
    return op.data_count == 1 or op.facts.constant.count(False) == 1


_PRODUCTS = ("mul", "matmul", "div", "linear", "conv", "conv_transpose")


def find_constant(graph: Graph) -> None:
    known: dict[Any, bool] = {None: True}
    for node, following in graph.below.items():
        if not following:
            known[node] = node not in graph.inputs
    for node, op in graph.ops.items():
        if op.family in _PRODUCTS:
            facts_of(op).constant = tuple(_is_weight(graph, f, known) for f in graph.below[node])


def _is_weight(graph: Graph, node: Any, known: dict[Any, bool]) -> bool:
    """Whether all paths from `node` to the network's input lead through a softmax, or none leads there."""
    waiting = [node]
    while waiting:
        here = waiting[-1]
        op = graph.ops.get(here)
        following = [] if here is None else graph.below[here]
        unknown = [f for f in following if f not in known]
        if here in known:
            waiting.pop()
        elif op is not None and op.family == "softmax":
            known[here] = True
        elif unknown:
            waiting.extend(unknown)
        else:
            known[here] = bool(following) and all(known[f] for f in following)
    return known[node]


# Where channels are, by what made them.
_LAST = frozenset("addmm mm bmm nativelayernorm unsafeview linear matmul layer_norm rms_norm".split())
_SECOND = frozenset("convolution nativebatchnorm nativegroupnorm conv conv_transpose batch_norm".split())


def _made_channels_last(graph: Graph, node: Any) -> bool:
    """Searches from the activation towards the input, nearest first."""
    waiting, met = list(graph.below[node]), set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in met:
            continue
        met.add(node)
        kind = graph.kind(node)
        if kind in _SECOND or kind in _LAST:
            return kind in _LAST
        waiting.extend(graph.below[node])
    return False


def find_merges(ops: Sequence[Op], root: Op, rules: Iterable[str], backend: kernels.Backend) -> None:
    """On a GPU: a batch norm's scale goes into the weights of the convolution before it, if these are fewer
    numbers than its gradient; and the kernel of an activation applies the padding mask of the convolution
    before it. Both only if nobody else reads the result in between."""
    readers = _readers(ops, root)
    masks = "conv" in rules
    for op in ops[: root.index + 1]:
        if not readers[op.index]:
            continue
        if op.family == "batch_norm" and type(op.linear) is Scale:
            conv = op.sources[0]
            if readers[conv.index] == 1 and type(conv.linear) is Conv and conv.linear.merges(op.linear):
                facts_of(conv).norm = op.linear
                facts_of(op).merged = True
        elif masks and op.family in RECTIFIERS and not op.facts.gate and len(op.shape) == 4:
            conv = op.sources[0]
            if type(conv.linear) is Scale and readers[conv.index] == 1:
                conv = conv.sources[0]
            if type(conv.linear) is Conv and readers[conv.index] == 1 and backend.masks(op.output):
                facts_of(op).conv = conv
                facts_of(conv).masked = True


def _readers(ops: Sequence[Op], root: Op) -> list[int]:
    """How many ops between an op and the score read its result; the score is one of them."""
    readers = [0] * len(ops)
    readers[root.index] = 1
    for op in reversed(ops[: root.index + 1]):
        if readers[op.index]:
            for source in op.sources:
                readers[source.index] += 1
    return readers
