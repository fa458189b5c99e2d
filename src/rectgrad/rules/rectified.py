"""Rules for rectified activations. a: activation, R: gradient arriving at it, s = a * R: a unit's score.

PR1   R where a * R > tau        Rectified Gradient (section 3 of the paper)
PR2   R where |a * R| > tau      PR3   R where a > tau      PR4   R where R > tau
mod   PR1 at the last rectified activations, PR2 at all others
Deconv   R where R > 0           Guided   R where R > 0 and the pre-activation > 0
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule, wide
from rectgrad.kernels.reference import SCORES, largest_q, passes, percentile, rank


def score(op: Op, R: Tensor, rule: str = "PR1", eps: float = 0.0) -> Tensor:
    """What is compared with tau, one number for each unit; in float32 at least."""
    a = wide(op.output)
    return SCORES[compared(op, rule)](a + eps if eps else a, wide(R))


def compared(op: Op, rule: str) -> str:
    """Which of PR1 to PR4 acts on an op."""
    return rule if rule != "mod" else "PR1" if op.facts.last else "PR2"


def rectified(
    q: float = 98.0,
    tau: float | None = None,
    rule: str = "PR1",
    interpolation: str = "nearest",
    eps: float = 0.0,
) -> Rule:
    """R where the unit's score exceeds tau, strictly; 0 elsewhere. What passes is R itself.

    tau is the q-th percentile of the scores of the sample's layer, or a constant. `eps` is added to the
    activation: with tau = 0 and a small eps the rule is Deconv (claim 1 of the paper).
    """

    def apply(op: Op, R: Tensor) -> Any:
        if not R.numel() or eps or (interpolation != "nearest" and tau is None):
            return _written_out(op, R)
        k = None if tau is not None else rank(R.numel() // op.batch, q)
        return op.backend.rectify(op.output, R, op.batch, k, tau, compared(op, rule), op.state.sums)

    def _written_out(op: Op, R: Tensor) -> Tensor:
        op.state.report(R)
        s = score(op, R, rule, eps)
        if tau is not None:
            return torch.where(s > tau, R, 0)
        if not s.numel():
            return R
        rows = s.reshape(op.batch, -1)
        passes = rows > percentile(rows, q, interpolation).unsqueeze(1)
        return torch.where(passes.reshape(s.shape), R, 0)

    def why(op: Op, R: Tensor, row: int) -> str | None:
        return advice(score(op, R, rule, eps).reshape(op.batch, -1)[row], q, tau, interpolation)

    return Rule(apply, "rectified", reads="output", checks=True, advice=why)


def deconv() -> Rule:
    """R where R > 0."""
    return Rule(lambda op, R: R.clamp(min=0), "deconv", reads="output")


def guided() -> dict[str, Rule]:
    """R where R > 0 and the pre-activation is positive, for each rectifier.

    Most rectifiers keep the sign, so that the activation tells, and the pre-activation need not be kept.
    """
    by_output = Rule(lambda op, R: _positive(R, op.output), "guided", reads="output")
    by_input = Rule(lambda op, R: _positive(R, op.inputs[0]), "guided")
    return {f: by_output if f in ops.SIGN_KEEPING else by_input for f in sorted(ops.RECTIFIERS)}


def _positive(R: Tensor, z: Tensor) -> Tensor:
    """R where R > 0 and z > 0, in two passes over memory instead of four: R where z exceeds 0 is what torch
    calls the gradient of a threshold."""
    return torch.ops.aten.threshold_backward.default(R, z, 0).clamp_(min=0)


def advice(s: Tensor, q: float, tau: float | None, interpolation: str) -> str | None:
    """What would let something through a layer with these scores; None if something did go through."""
    if tau is not None:
        stopped = bool(0 < s.max() <= tau)
        return f"above tau={tau:g}; its largest score is {float(s.max()):.4g}" if stopped else None
    if passes(s, q, interpolation) or not bool(s.max() > 0):
        return None
    if bool((s < s.max()).any()):
        return f"at q={q:g}; the largest q that passes one unit is {largest_q(s, interpolation):.2f}"
    return f"at q={q:g}; no percentile passes scores that are all the same, a constant tau does"
