"""What the autograd graph says about a pass: parts no rule can reach, and facts about ops that depend on
the ops around them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import BRIDGES, Op, Overwrite, Rules, storage_of
from rectgrad.engine.trace import Trace
from rectgrad.kernels.sparse import carrier

# Backward nodes of rectifiers. Ours are bridged, so one of these was run where the engine could not see it.
_UNSEEN = {
    "ReluBackward": "ReLU",
    "LeakyReluBackward": "LeakyReLU",
    "PreluKernelBackward": "PReLU",
    "EluBackward": "ELU",
    "SiluBackward": "SiLU",
    "GeluBackward": "GELU",
    "MishBackward": "Mish",
    "HardswishBackward": "Hardswish",
    "SoftplusBackward": "Softplus",
    "RreluWithNoiseBackward": "RReLU",
}
_OPAQUE = ("DifferentiableGraphBackward", "CompiledFunctionBackward")
_COVERED = "rectgrad: all of the base was overwritten"
_HARMLESS = ("BackwardHookFunctionBackward", "OverwriteBackward")


class Graph:
    """All nodes below a score: the nodes that gradient goes to from each, and the ops that are recorded."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.below: dict[Any, list[Any]] = {}
        self.ops: dict[Any, Op] = {}
        waiting: list[Any] = [self.root]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self.below:
                waiting.extend(self._enter(node))

    def _enter(self, node: Any) -> list[Any]:
        """What an in-place op overwrote gets no gradient."""
        following = [f for f, _ in node.next_functions]
        made_by = getattr(node, "_forward_cls", None)
        if made_by in BRIDGES:
            self.ops[node] = node.op
        elif made_by is Overwrite or node.metadata.get(_COVERED):
            following = following[1:]
        self.below[node] = following
        return following

    def hooked(self, node: Any) -> bool:
        """Whether somebody looks at the gradient that arrives at a node."""
        return bool(node.metadata.get(_HOOKED))

    @functools.cached_property
    def readers(self) -> dict[Any, list[Any]]:
        """The nodes that read each node's result."""
        readers: dict[Any, list[Any]] = {}
        for node, following in self.below.items():
            for each in following:
                readers.setdefault(each, []).append(node)
        return readers


class LinkedGraph(Graph):
    """The same of a linked pass, whose nodes are its ops."""

    def _enter(self, node: Any) -> list[Any]:
        self.ops[node] = node
        self.below[node] = following = list(node.sources)
        return following


class Written:
    """In-place ops on views: which of them together wrote all of the tensor they are views of."""

    def __init__(self) -> None:
        # Written elements, the node of the first write, and the base itself, lest its address be used again.
        self._parts: dict[int, tuple[Tensor, Any, Tensor]] = {}

    def note(self, view: Tensor) -> None:
        base = view._base
        assert base is not None
        size = base.untyped_storage().nbytes() // base.element_size()
        fresh = torch.zeros(size, dtype=torch.bool, device=base.device), base.grad_fn, base
        written, first, _ = self._parts.setdefault(storage_of(base), fresh)
        written.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        if bool(written.as_strided(base.shape, base.stride(), base.storage_offset()).all()):
            first.metadata[_COVERED] = True
            del self._parts[storage_of(base)]


def hidden_part(graph: Graph, trace: Trace) -> str | None:
    """A sentence about the first part of the network whose activations no rule can reach, or None."""
    for node in graph.below:
        if node in graph.ops:
            continue
        name = node.name() if hasattr(node, "name") else type(node).__name__
        if any(opaque in name for opaque in _OPAQUE):
            return "a scripted or compiled part, whose inside cannot be seen; use the original Python code"
        unseen = _unseen(node, name.rstrip("0123456789"))
        if unseen:
            return f"a {unseen} run outside Python (a scripted function, say); use the original Python code"
        if hasattr(node, "_forward_cls") and name not in _HARMLESS:
            sentence = _foreign(name.removesuffix("Backward"), trace)
            if sentence:
                return sentence
    return None


def _unseen(node: Any, name: str) -> str | None:
    """The rectifier that a node of torch's own belongs to."""
    if name in ("ClampBackward", "ClampMinBackward", "HardtanhBackward"):
        low, high = (_saved(node, f"_saved_{end}", f"_saved_{end}_val") for end in ("min", "max"))
        return "clamp at 0" if low == 0 and (high is None or high > 1) else None
    return _UNSEEN.get(name)


def _saved(node: Any, *names: str) -> Any:
    return next((getattr(node, name) for name in names if hasattr(node, name)), None)


def _foreign(name: str, trace: Trace) -> str | None:
    """What is wrong with a custom autograd.Function: only one that is seen to be linear is not."""
    if name == "CheckpointFunction":
        return "reentrant checkpointing; call checkpoint with use_reentrant=False or switch it off"
    calls = [row.name for row in trace.hidden if row.function == name]
    activation = next((call for call in calls if call not in ops.LINEAR_CALLS), None)
    if calls and activation is None:
        return None
    inside = f"which hides a {activation}" if activation else "whose inside cannot be seen"
    return f"the custom autograd.Function {name}, {inside}; write what it computes with torch operations"


def mark_last(graph: Graph) -> None:
    """facts["last"]: rectified activations from which the output is reached without meeting another one."""
    met: set[Any] = set()
    waiting = [graph.root]
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        op = graph.ops.get(node)
        if op is not None and op.family in ops.RECTIFIERS:
            op.facts["last"] = True
        else:
            waiting.extend(graph.below[node])


def mark_gates(graph: Graph) -> None:
    """facts["gate"]: a ReLU6 of which only a sixth is read. That is a hard sigmoid, which squashes."""
    for node, op in graph.ops.items():
        if op.family == "relu6":
            reading = graph.readers.get(node, [])
            op.facts["gate"] = len(reading) == 1 and divides_by_six(reading[0], graph.ops.get(reading[0]))


def divides_by_six(node: Any, op: Op | None) -> bool:
    """Whether a node does, an op of ours or not."""
    if op is not None:
        name = {"div": "DivBackward", "mul": "MulBackward"}.get(op.family, "")
        factor = op.args[1] if name and len(op.args) > 1 and op.data_count == 1 else None
    else:
        name = node.name().rstrip("0123456789")
        factor = getattr(node, "_saved_other", None) if name in ("DivBackward", "MulBackward") else None
    if not isinstance(factor, (int, float)) and not (isinstance(factor, Tensor) and factor.numel() == 1):
        return False
    return abs(float(factor) - (6 if name == "DivBackward" else 1 / 6)) < 1e-3


def plain_steps(rules: Rules) -> bool:
    """Whether linear steps have no rule, or the padding trick alone, so that they take lists and can be
    merged with one another."""
    conv = rules.get("conv")
    ours = conv is None or getattr(conv, "itself", None) == id(conv)  # not a rule around it
    return ours and rules.keys().isdisjoint(("linear", "batch_norm", "avg_pool"))


def mark_carrying(graph: Graph) -> None:
    """facts["carry"]: how lists travel from an op, where they may do so alone, because its gradient goes to
    one step, which takes lists and gets its gradient from nowhere else."""
    takers = {node for node, op in graph.ops.items() if _takes_lists(op) and _read_once(graph, node)}
    for node, op in graph.ops.items():
        if op.family in ops.RECTIFIERS or op.family == "batch_norm":
            following = graph.below[node]
            carries = len(following) == 1 and _passes_on(graph, following[0], takers)
            op.facts["carry"] = carrier if carries else None


def _takes_lists(op: Op) -> bool:
    return op.step is not None and op.step.takes_lists


def _read_once(graph: Graph, node: Any) -> bool:
    return len(graph.readers.get(node, ())) == 1 and not graph.hooked(node)


def _passes_on(graph: Graph, node: Any, takers: set[Any]) -> bool:
    """A scale hands lists on, so that a convolution must follow: only that knows channels."""
    if node not in takers:
        return False
    if graph.ops[node].family != "batch_norm":
        return True
    (after, *others) = graph.below[node]
    return not others and after in takers and graph.ops[after].family == "conv"


def mark_hooked(x: Tensor) -> None:
    """Somebody looks at the gradient that arrives at x: it must be whole."""
    node: Any = x.grad_fn
    node.metadata[_HOOKED] = True


_HOOKED = "rectgrad: somebody looks at this gradient"


def mark_folded(graph: Graph) -> None:
    """facts["folded"]: linear layers whose only reader adds a bias or is a batch norm; the two are one linear
    map, as if the bias were the layer's own or the norm had been folded into the weights."""
    for node in graph.readers:
        op = graph.ops.get(node)
        if op is not None and op.family in _FOLDABLE and _linear_in_one(op):
            reader = _only_reader(graph, node)
            op.facts["folded"] = reader is not None and (
                reader.family == "batch_norm" or (reader.family == "add" and reader.data_count == 1)
            )


def _linear_in_one(op: Op) -> bool:
    """Whether one data tensor is all that an op reads, weights aside."""
    return op.data_count == 1 or op.facts.get("constant", ()).count(False) == 1


_FOLDABLE = ("conv", "conv_transpose", "linear", "matmul", "add")
_SHAPES = ("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "Unsqueeze", "Squeeze", "T", "Alias")


def _only_reader(graph: Graph, node: Any) -> Op | None:
    """The recorded op that alone reads a node's result, perhaps in another shape."""
    while len(graph.readers.get(node, ())) == 1:
        node = graph.readers[node][0]
        if node in graph.ops:
            return graph.ops[node]
        if node.name().rstrip("0123456789").removesuffix("Backward") not in _SHAPES:
            return None
    return None


def mark_constant(graph: Graph, leaves: Iterable[Tensor]) -> None:
    """facts["constant"]: for each input of a product, whether it depends on the network's input through a
    softmax alone, or not at all (a weight computed before the call)."""
    weights: dict[Any, bool] = {}
    for node in graph.below:
        if hasattr(node, "variable"):
            weights[node] = not any(node.variable is leaf for leaf in leaves)
    for node, op in graph.ops.items():
        if op.family in _PRODUCTS:
            op.facts["constant"] = tuple(_is_weight(graph, f, weights) for f in graph.below[node])


_PRODUCTS = ("mul", "matmul", "div", "linear", "conv", "conv_transpose")


def _is_weight(graph: Graph, node: Any, known: dict[Any, bool]) -> bool:
    """All ways from `node` to the network's input lead through a softmax."""
    known[None] = True
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


# Where channels lie, by the node that made them.
_LAST = ("AddmmBackward", "MmBackward", "BmmBackward", "NativeLayerNormBackward", "UnsafeViewBackward")
_SECOND = ("ConvolutionBackward", "NativeBatchNormBackward", "NativeGroupNormBackward")
_LAST_FAMILIES = ("linear", "matmul")
_SECOND_FAMILIES = ("conv", "conv_transpose", "batch_norm")


def mark_channels(graph: Graph) -> None:
    """facts["channels_last"]: whether the layer that made a rectified activation keeps its channels last."""
    for node, op in graph.ops.items():
        if op.family in ops.RECTIFIERS:
            op.facts["channels_last"] = _made_channels_last(graph, node)


def _made_channels_last(graph: Graph, node: Any) -> bool:
    """Searches from the activation towards the input, nearest first."""
    waiting, met = list(graph.below[node]), set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in met:
            continue
        met.add(node)
        op, name = graph.ops.get(node), node.name().rstrip("0123456789")
        family = op.family if op is not None else ""
        if name in _SECOND or family in _SECOND_FAMILIES:
            return False
        if name in _LAST or family in _LAST_FAMILIES or (op and op.name in ("layer_norm", "rms_norm")):
            return True
        waiting.extend(graph.below[node])
    return False
