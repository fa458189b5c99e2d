"""What the autograd graph says about a pass: parts no rule can reach, and facts about ops that depend on
the ops around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from rectgrad import ops
from rectgrad.op import Op, Overwrite, op_of
from rectgrad.trace import Trace

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
_HARMLESS = ("BackwardHookFunctionBackward", "OverwriteBackward")


def walk(scores: Tensor) -> list[Any]:
    """All nodes of the graph below `scores`."""
    nodes: dict[Any, None] = {}
    waiting = [scores.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting.extend(below(node))
    return list(nodes)


def below(node: Any) -> list[Any]:
    """The nodes that gradient goes to from here. What an in-place op overwrote gets none."""
    following = [f for f, _ in node.next_functions]
    return following[1:] if getattr(node, "_forward_cls", None) is Overwrite else following


def hidden_part(nodes: Iterable[Any], trace: Trace) -> str | None:
    """A sentence about the first part of the network whose activations no rule can reach, or None."""
    for node in nodes:
        name = node.name() if hasattr(node, "name") else type(node).__name__
        if any(opaque in name for opaque in _OPAQUE):
            return (
                "a scripted or compiled part, whose inside cannot be seen; use the original Python function"
            )
        unseen = _UNSEEN.get(name.rstrip("0123456789"))
        if unseen:
            return f"a {unseen} run outside Python (a scripted function, say); use the original Python code"
        if hasattr(node, "_forward_cls") and op_of(node) is None and name not in _HARMLESS:
            sentence = _foreign(name.removesuffix("Backward"), trace)
            if sentence:
                return sentence
    return None


def _foreign(name: str, trace: Trace) -> str | None:
    if not trace.hidden:
        return None
    row = trace.hidden[0]
    where = f" ({type(row.module).__name__})" if isinstance(row.module, nn.Module) else ""
    if name == "CheckpointFunction":
        return (
            f"reentrant checkpointing around a {row.name}{where}; call checkpoint with use_reentrant=False "
            "or switch checkpointing off"
        )
    return (
        f"the custom autograd.Function {name}, which hides a {row.name}{where}; write that activation with "
        "torch operations"
    )


def mark_last(scores: Tensor) -> None:
    """facts["last"]: rectified activations from which the output is reached without meeting another one."""
    met: set[Any] = set()
    waiting = [scores.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        op = op_of(node)
        if op is not None and op.family in ops.RECTIFIERS:
            op.facts["last"] = True
        else:
            waiting.extend(below(node))


def mark_folded(nodes: Iterable[Any]) -> None:
    """facts["folded"]: convolutions and linear layers whose only reader is a batch norm; the two are one
    linear map, as if the norm had been folded into the weights."""
    readers: dict[Any, list[Op | None]] = {}
    for node in nodes:
        for following in below(node):
            readers.setdefault(following, []).append(op_of(node))
    for node, reading in readers.items():
        op = op_of(node)
        if op is not None and op.family in ("conv", "conv_transpose", "linear") and len(reading) == 1:
            op.facts["folded"] = reading[0] is not None and reading[0].family == "batch_norm"


def mark_constant(nodes: Iterable[Any]) -> None:
    """facts["constant"]: for each input of a product, whether it depends on the network's input through a
    softmax alone."""
    weights: dict[Any, bool] = {}
    for node in nodes:
        op = op_of(node)
        if op is not None and op.family in ("mul", "matmul", "div"):
            op.facts["constant"] = tuple(_is_weight(f, weights) for f in below(node))


def _is_weight(node: Any, known: dict[Any, bool]) -> bool:
    """All ways from `node` to the network's input lead through a softmax."""
    known[None] = True
    waiting = [node]
    while waiting:
        here = waiting[-1]
        op = op_of(here)
        following = [] if here is None else below(here)
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


def mark_channels(nodes: Iterable[Any]) -> None:
    """facts["channels_last"]: whether the layer that made a rectified activation keeps its channels last."""
    for node in nodes:
        op = op_of(node)
        if op is not None and op.family in ops.RECTIFIERS:
            op.facts["channels_last"] = _made_channels_last(node)


def _made_channels_last(node: Any) -> bool:
    """Searches from the activation towards the input, nearest first."""
    waiting, met = below(node), set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in met:
            continue
        met.add(node)
        op, name = op_of(node), node.name().rstrip("0123456789")
        family = op.family if op is not None else ""
        if name in _SECOND or family in _SECOND_FAMILIES:
            return False
        if name in _LAST or family in _LAST_FAMILIES or (op and op.name in ("layer_norm", "rms_norm")):
            return True
        waiting.extend(below(node))
    return False
