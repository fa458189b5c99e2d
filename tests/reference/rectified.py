"""RectGrad, Guided Backprop and Deconv."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx

from reference.cam import Image, channels_first, class_gate, gate_at
from reference.graph import RECTIFIERS, Rule, Run, Shares, family, output_node, plain
from reference.windows import mask_of, prr_max_pool, windows_of


def tau_of(scores: Sequence[float], q: float, interpolation: str = "nearest") -> float:
    """The q-th percentile of one layer's scores of one sample."""
    if interpolation == "linear":
        return float(np.percentile(scores, q))
    d = len(scores)
    return sorted(scores, reverse=True)[round((d - 1) * (1 - q / 100))]


def score(a: float, r: float, rule: str) -> float:
    return {"PR1": a * r, "PR2": abs(a * r), "PR3": a, "PR4": r}[rule]


def rectified(
    a: Tensor,
    R: Tensor,
    q: float = 98.0,
    tau: float | None = None,
    rule: str = "PR1",
    interpolation: str = "nearest",
    margins: list[float] | None = None,
    g: Tensor | None = None,
) -> Tensor:
    """R where score > tau, else 0. `margins` collects how far the nearest other score is from tau. With g the
    scores are multiplied by it, and tau is at least 0."""
    scores = [score(*unit, rule) for unit in zip(a.flatten().tolist(), R.flatten().tolist(), strict=True)]
    if g is not None:
        scores = [s * each for s, each in zip(scores, g.flatten().tolist(), strict=True)]
    limit = tau_of(scores, q, interpolation) if tau is None else tau
    limit = limit if g is None else max(limit, 0.0)
    if margins is not None:
        largest = max(abs(s) for s in scores) or 1.0
        margins += [abs(s - limit) / largest for s in scores if s != limit]
    passed = [r if s > limit else 0.0 for s, r in zip(scores, R.flatten().tolist(), strict=True)]
    return torch.tensor(passed, dtype=R.dtype).reshape(R.shape)


def guided(z: Tensor, R: Tensor) -> Tensor:
    """R where R > 0 and the pre-activation > 0."""
    return torch.where((R > 0) & (z > 0), R, 0.0)


def deconv(R: Tensor) -> Tensor:
    """R where R > 0."""
    return torch.where(R > 0, R, 0.0)


def last_rectifiers(record: Run) -> set[fx.Node]:
    """The rectified activations from which the output is reached without meeting another one."""
    found, seen, todo = set(), set(), [output_node(record.graph)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if family(node) in RECTIFIERS:
            found.add(node)
        else:
            todo += record.sources(node)
    return found


def rectgrad_rule(
    q: float = 98.0,
    tau: float | None = None,
    rule: str = "PR1",
    padding_trick: bool = True,
    prr: bool = False,
    interpolation: str = "nearest",
    margins: list[float] | None = None,
    gate: str | None = None,
    image: Image = channels_first,
) -> Rule:
    class_map = torch.empty(0)

    def step(record: Run, node: fx.Node, R: Tensor) -> Shares:
        nonlocal class_map
        kind = family(node)
        if gate is not None and node is output_node(record.graph):
            class_map = class_gate(record, R, image)
        if kind in RECTIFIERS:
            here = rule if rule != "mod" else "PR1" if node in last_rectifiers(record) else "PR2"
            a = record.values[node]
            g = None if gate is None else gate_at(class_map, a, image)
            return [(node.args[0], rectified(a, R, q, tau, here, interpolation, margins, g))]
        if kind == "conv" and padding_trick:
            return plain(record, node, R * mask_of(record, node))
        if kind in ("max_pool", "adaptive_max_pool") and prr:
            return [(node.args[0], prr_max_pool(record.values[node.args[0]], R, windows_of(record, node)))]
        return plain(record, node, R)

    return step


def guided_rule(record: Run, node: fx.Node, R: Tensor) -> Shares:
    if family(node) in RECTIFIERS:
        return [(node.args[0], guided(record.values[node.args[0]], R))]
    return plain(record, node, R)


def deconv_rule(record: Run, node: fx.Node, R: Tensor) -> Shares:
    return [(node.args[0], deconv(R))] if family(node) in RECTIFIERS else plain(record, node, R)
