"""Rules for rectified activations. a: activation, R: gradient arriving at it, s = a * R: a unit's score.

PR1   R where a * R > tau        Rectified Gradient (section 3 of the paper)
PR2   R where |a * R| > tau      PR3   R where a > tau      PR4   R where R > tau
mod   PR1 at the last rectified activations, PR2 at all others
Deconv   R where R > 0           Guided   R where R > 0 and the pre-activation > 0
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rectgrad import kernels, ops
from rectgrad.engine.op import Op, Rule, wide
from rectgrad.kernels.reference import percentile, rank
from rectgrad.rules.padding import passing_region

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "PR1": lambda a, R: a * R,
    "PR2": lambda a, R: (a * R).abs(),
    "PR3": lambda a, R: a,
    "PR4": lambda a, R: R,
}


def score(op: Op, R: Tensor, rule: str = "PR1", eps: float = 0.0) -> Tensor:
    """What is compared with tau, one number a unit; in float32 at least."""
    a = wide(op.output)
    return SCORES[compared(op, rule)](a + eps if eps else a, wide(R))


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

    def rectified(op: Op, R: Tensor) -> Tensor:
        fast = _fast(op, R)
        if fast is not None:
            return fast
        op.current.look(R)
        s = score(op, R, rule, eps)
        if tau is not None:
            return torch.where(s > tau, R, 0)
        if s.numel() == 0:
            return R
        rows = s.reshape(op.batch, -1)
        passes = rows > percentile(rows, q, interpolation).unsqueeze(1)
        return torch.where(passes.reshape(s.shape), R, 0)

    def _fast(op: Op, R: Tensor) -> Tensor | None:
        """The same by a kernel that reads activation and gradient once, where there is one."""
        if eps or interpolation != "nearest" or not R.numel():
            return None
        k = None if tau is not None else rank(R.numel() // op.batch, q)
        carry, seen, padded = op.facts.get("carry"), op.current.sums, op.facts.get("padded")
        if padded is None or not kernels.masks(op.output):
            return kernels.rectify(op.output, R, op.batch, k, tau, compared(op, rule), seen, carry)
        # The padding trick of the convolution before, in the same launch.
        within = passing_region(padded)
        result = kernels.rectify(op.output, R, op.batch, k, tau, compared(op, rule), seen, carry, within)
        if result is not None:
            padded.facts["region"] = None
        return result

    def through(op: Op, R: Tensor) -> Tensor | None:
        """The same and the gradient of the convolution before, in one call of a kernel that takes both."""
        if eps or interpolation != "nearest" or not R.numel():
            return None
        known = op.facts.get("through")
        if known is None:  # of an op that is met again, once
            k = None if tau is not None else rank(R.numel() // op.batch, q)
            conv, norm = op.facts["chain"]
            within = passing_region(conv) if "conv" in op.current.rules else None
            known = conv.step, k, compared(op, rule), norm and norm.step, within
            op.facts["through"] = known
        step, k, which, scale, within = known
        found: Tensor | None = step.through(op, R, k, tau, which, scale, within)
        return found

    rectified.looks = True  # type: ignore[attr-defined]
    rectified.through = id(rectified), through  # type: ignore[attr-defined]
    return _of_output(rectified)


def compared(op: Op, rule: str) -> str:
    """Which of PR1 to PR4 acts here."""
    if rule != "mod":
        return rule
    return "PR1" if op.facts.get("last") else "PR2"


def deconv() -> Rule:
    """R where R > 0."""

    def deconv(op: Op, R: Tensor) -> Tensor:
        return torch.where(R > 0, R, 0)

    return _of_output(deconv)


def guided() -> dict[str, Rule]:
    """R where R > 0 and the pre-activation is positive, for each rectifier."""

    def guided(op: Op, R: Tensor) -> Tensor:
        # Most rectifiers keep the sign, so the activation tells, and the pre-activation need not be kept.
        z = op.output if op.family in ops.SIGN_KEEPING else op.inputs[0]
        return torch.where((R > 0) & (z > 0), R, 0)

    def guided_by_output(op: Op, R: Tensor) -> Tensor:
        return guided(op, R)

    guided_by_output.__name__ = "guided"
    _of_output(guided_by_output)
    return {f: guided_by_output if f in ops.SIGN_KEEPING else guided for f in sorted(ops.RECTIFIERS)}


def _of_output(rule: Rule) -> Rule:
    """Marks a rule that reads the op's output alone."""
    rule.output_only = True  # type: ignore[attr-defined]
    return rule
