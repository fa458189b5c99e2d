"""What the ops around an op say of it in a linked pass: whether it is a gate, which lists it may hand on, and
what it can do of its neighbours' work.

An op is `only_read` where one other op reads its result: what arrives at it comes from there alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rectgrad import kernels
from rectgrad.engine.graph import divides_by_six
from rectgrad.engine.op import Op
from rectgrad.kernels.linear_ops import Conv, Scale
from rectgrad.kernels.sparse import as_they_are
from rectgrad.ops import RECTIFIERS


def only_read(op: Op | None) -> Op | None:
    return op if op is not None and op.readers == 1 else None


def mark_gates(linked: Sequence[Op]) -> None:
    """facts["gate"]: a ReLU6 of which only a sixth is read. That is a hard sigmoid, which squashes."""
    for op in linked:
        if op.family in ("div", "mul") and op.sources:
            before = only_read(op.sources[0])
            if before is not None and before.family == "relu6" and divides_by_six(op, op):
                before.facts["gate"] = True


def mark_lists(linked: Sequence[Op]) -> None:
    """facts["carry"]: lists may travel from an op, because what takes its gradient takes lists.
    facts["chain"]: the convolution that takes them in the end, and the batch norm in between, or None."""
    for op in linked:
        if op.family not in RECTIFIERS and op.family != "batch_norm":
            continue
        before = _takes_lists(op.sources[0])
        if before is not None and type(before.step) is Scale:
            norm, before = before, _takes_lists(before.sources[0])
        else:
            norm = None
        conv = before if before is not None and type(before.step) is Conv else None
        if op.family == "batch_norm":
            op.facts["carry"] = as_they_are if conv is not None and norm is None else None
            continue
        linear = before is not None and norm is None
        op.facts["carry"] = as_they_are if conv is not None or linear else None
        if conv is not None and not op.facts.get("gate"):
            op.facts["chain"] = conv, norm


def _takes_lists(op: Op | None) -> Op | None:
    op = only_read(op)
    return op if op is not None and op.step is not None and op.step.takes_lists else None


def fold_norms(linked: Sequence[Op]) -> None:
    """Batch norms whose scale goes into the weights of the convolution before them, which are fewer numbers
    than its gradient: where nobody else reads what the convolution made, and there is a kernel."""
    for op in linked:
        norm = op.step
        if type(norm) is Scale:
            before = only_read(op.sources[0])
            conv = before.step if before is not None else None
            if type(conv) is Conv and _on_gpu(conv.weight[0], norm.variance[0], norm.weight[0]):
                conv.norm, norm.folded = norm, True


def _on_gpu(*weights: Tensor | None) -> bool:
    return all(x is None or (x.is_cuda and x.dtype is torch.float32) for x in weights) and kernels.scales()


def mark_padded(linked: Sequence[Op]) -> None:
    """facts["padded"]: the convolution in two dimensions whose result an activation alone reads, if need be
    through a batch norm. What it would leave out of the gradient, the activation can."""
    for op in linked:
        if op.family in RECTIFIERS:
            before = only_read(op.sources[0])
            if before is not None and type(before.step) is Scale:
                before = only_read(before.sources[0])
            if before is not None and type(before.step) is Conv and len(before.shape) == 4:
                op.facts["padded"] = before
