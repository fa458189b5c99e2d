"""Rules for rectified activations. a: activation, R: gradient arriving at it, s = a * R: a unit's score.

PR1   R where a * R > tau        Rectified Gradient (section 3 of the paper)
PR2   R where |a * R| > tau      PR3   R where a > tau      PR4   R where R > tau
mod   PR1 at the last rectified activations, PR2 at all others
Deconv   R where R > 0           Guided   R where R > 0 and the pre-activation > 0
gated    R where s * g > tau >= 0, g in 0..1: where the class is
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule, wide
from rectgrad.kernels.class_maps import SILENT
from rectgrad.kernels.closed_forms import positive_gradient
from rectgrad.kernels.reference import SCORES, advice, percentile, rank
from rectgrad.rules.class_layer import ClassGate


def score(op: Op, R: Tensor, rule: str = "PR1", eps: float = 0.0, gate: ClassGate | None = None) -> Tensor:
    """What is compared with tau, one number for each unit; in float32 at least."""
    a, g = wide(op.output), None if gate is None else gate(op)
    s = SCORES[compared(op, rule)](a + eps if eps else a, wide(R))
    return s if g is None else s * g if s is a or s is R else s.mul_(g)


def compared(op: Op, rule: str) -> str:
    """The rule, PR1 to PR4, that applies to an op."""
    return rule if rule != "mod" else "PR1" if op.facts.last else "PR2"


def rectified(
    q: float = 98.0,
    tau: float | None = None,
    rule: str = "PR1",
    interpolation: str = "nearest",
    eps: float = 0.0,
    gate: ClassGate | None = None,
) -> Rule:
    """R where the unit's score exceeds tau, strictly; 0 elsewhere. What passes is R itself.

    tau is the q-th percentile of the scores of the sample's layer, or a constant. `eps` is added to the
    activation: with tau = 0 and a small eps the rule is Deconv (claim 1 of the paper). With a gate, which
    multiplies the scores, tau is at least 0.
    """
    tau = tau if gate is None or tau is None else max(tau, 0)

    def apply(op: Op, R: Tensor) -> Any:
        if not R.numel() or eps or (interpolation != "nearest" and tau is None):
            return _written_out(op, R)
        k = None if tau is not None else rank(R.numel() // op.batch, q)
        a, kind = op.output, compared(op, rule)
        if gate is not None:  # the percentile of non-negative scores is not negative
            s, kind = score(op, R, rule, gate=gate), "PR3"
            a = s.clamp(min=0) if s is op.output or s is R else s.clamp_(min=0)
        return op.backend.rectify(a, R, op.batch, k, tau, kind, op.state.sums)

    def _written_out(op: Op, R: Tensor) -> Tensor:
        op.state.report(R)
        s = score(op, R, rule, eps, gate)
        if tau is not None:
            return torch.where(s > tau, R, 0)
        if not s.numel():
            return R
        rows = s.reshape(op.batch, -1)
        least = percentile(rows, q, interpolation).unsqueeze(1)
        passes = rows > (least if gate is None else least.clamp(min=0))
        return torch.where(passes.reshape(s.shape), R, 0)

    def why(op: Op, R: Tensor, row: int) -> str | None:
        if gate is not None and gate.cams.silent(row):
            return f"because {SILENT}"
        return advice(score(op, R, rule, eps, gate).reshape(op.batch, -1)[row], q, tau, interpolation)

    return Rule(apply, "rectified", reads="output", checks=True, advice=why)


def deconv() -> Rule:
    """R where R > 0."""
    return Rule(lambda op, R: R.clamp(min=0), "deconv", reads="output")


def guided() -> dict[str, Rule]:
    """R where R > 0 and the pre-activation is positive, for each rectifier.

    Most rectifiers keep the sign, so that the activation tells, and the pre-activation need not be kept.
    """
    by_output = Rule(lambda op, R: positive_gradient(R, op.output), "guided", reads="output")
    by_input = Rule(lambda op, R: positive_gradient(R, op.inputs[0]), "guided")
    return {f: by_output if f in ops.SIGN_KEEPING else by_input for f in sorted(ops.RECTIFIERS)}
