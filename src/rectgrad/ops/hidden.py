"""Finds parts of a network whose activations rules cannot reach, by the names of autograd's nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rectgrad.ops.table import LINEAR_CALLS, RECTIFIERS, refine

# Backward nodes of rectifiers. Those with a rule are bridged, so these ran where the mode did not see them.
_UNSEEN = {name.lower(): name for name in "ReLU LeakyReLU ELU SiLU GELU Mish Hardswish Softplus".split()}
_UNSEEN |= {"prelukernel": "PReLU", "rreluwithnoise": "RReLU"}


def hidden_part(
    kinds: Mapping[Any, str], calls: Collection[str], inside: Mapping[str, list[str]], saved: Any
) -> str | None:
    """A sentence about the first part that hides its activations, or None. kinds: what each node without a
    rule does, in one word. calls: the names of all calls. inside: the calls made in each custom
    autograd.Function. saved: (node, names) -> what a node saved under one of them."""
    if "rnn_relu" in calls:
        return "an nn.RNN with ReLU, which applies its activations inside one call; write its steps out"
    for node, kind in kinds.items():
        name = type(node).name(node)
        if "DifferentiableGraphBackward" in name or "CompiledFunctionBackward" in name:
            return "a scripted or compiled part, whose inside cannot be seen; use the original Python code"
        if unseen := _unseen(node, kind, saved):
            return f"a {unseen} outside Python, perhaps in a scripted function; use the original Python code"
        if hasattr(node, "_forward_cls") and (wrong := _foreign(name.removesuffix("Backward"), inside)):
            return wrong
    return None


def _unseen(node: Any, kind: str, saved: Callable[..., Any]) -> str | None:
    """The name of the rectifier that a node of torch belongs to, or None."""
    if kind not in ("clamp", "clampmin", "hardtanh"):
        return _UNSEEN.get(kind)
    bounds = {"min": saved(node, "min", "min_val"), "max": saved(node, "max", "max_val")}
    return "clamp at 0" if refine("clamp", "clamp", bounds.get) in RECTIFIERS else None


def _foreign(name: str, inside: Mapping[str, list[str]]) -> str | None:
    """Why a custom autograd.Function is not accepted; None if all of its calls are known to be linear."""
    if name == "CheckpointFunction":
        return "reentrant checkpointing; call checkpoint with use_reentrant=False or switch it off"
    custom = name.removeprefix("GeneratedBackwardFor_")  # as torch.library names the gradient of a custom op
    if custom != name:
        return f"the custom op {custom}, whose inside cannot be seen; write it in torch"
    activations = [call for call in inside.get(name, ()) if call not in LINEAR_CALLS]
    if name == "BackwardHookFunction" or (name in inside and not activations):
        return None  # the former is of a module's backward hooks
    what = f"which hides a {activations[0]}" if activations else "whose inside cannot be seen"
    return f"the custom autograd.Function {name}, {what}; write what it computes with torch operations"
