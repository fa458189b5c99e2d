"""The methods: frozen dataclasses whose fields are their options.

A method names the rules of its backward pass and what is done with the gradient that arrives at the input.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad import ops, rules
from rectgrad.baseline import baseline_rows, baselines, differences_times
from rectgrad.diagnose import check_inputs, warn_if_incomplete
from rectgrad.op import Rules, per_sample
from rectgrad.options import check_baseline, choice, flags, integer, number
from rectgrad.passes import Maps, Pass
from rectgrad.subject import Subject


@dataclass(frozen=True)
class Method:
    """A plain gradient, unless a subclass says otherwise."""

    rectifies: ClassVar[bool] = False  # an error where no rule ran: never a silent plain gradient
    thresholds: ClassVar[bool] = False  # a layer may pass nothing, which is worth a warning
    families: ClassVar[frozenset[str]] = frozenset()  # recorded besides those with a rule
    decompose: ClassVar[tuple[str, ...]] = ()  # families to see the inside of
    facts: ClassVar[tuple[str, ...]] = ()  # what its rules ask of the graph: see graph.py
    one_backward: ClassVar[bool] = True  # a single backward pass makes the map
    runs_model: ClassVar[bool] = True

    @property
    def per_sample(self) -> bool:
        """Whether a rule looks at all units of one sample together."""
        return False

    @property
    def steady(self) -> bool:
        """Whether its rules are known to be the same in every pass and to ask a device nothing, so that they
        can be replayed. A subclass has to say so itself."""
        return False

    def rules(self) -> Rules:
        return {}

    def raw(self, subject: Subject) -> Maps:
        """What arrives at the input."""
        return subject.backward(self)

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        """The map from what arrived."""
        return raw

    def maps(self, subject: Subject) -> Maps:
        return self.finish(self.raw(subject), subject.inputs)

    @property
    def uses_rules(self) -> bool:
        return bool(self.rules())

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        """The method for some of the samples, where a field has one value for each."""
        return self


@dataclass(frozen=True)
class Saliency(Method):
    """The gradient of the score with respect to the input, with its sign."""


@dataclass(frozen=True)
class GradientXInput(Method):
    """The gradient times the input."""

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)


@dataclass(frozen=True)
class GuidedBackprop(Method):
    """Gradient passes an activation where it is positive and the pre-activation is."""

    multiply_by_input: bool = False
    rectifies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        flags(self, "multiply_by_input")

    @property
    def steady(self) -> bool:
        return type(self) in (GuidedBackprop, Deconv)

    def rules(self) -> Rules:
        return rules.guided()

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs) if self.multiply_by_input else raw


@dataclass(frozen=True)
class Deconv(GuidedBackprop):
    """Gradient passes an activation where it is positive."""

    def rules(self) -> Rules:
        return dict.fromkeys(ops.RECTIFIERS, rules.deconv())


@dataclass(frozen=True)
class RectGrad(Method):
    """Gradient passes an activation where activation * gradient exceeds the layer's q-th percentile.

    q: percentile, 0 to 100. tau: a constant threshold instead. rule: what is compared (PR1 to PR4, mod).
    padding_trick: no gradient from outputs that saw zero padding. prr: max pooling shares gradient in
    proportion to its inputs. multiply_by_input, positive_only: the final steps. interpolation: "nearest" or
    "linear".
    """

    q: float = 98.0
    tau: float | None = None
    rule: str = "PR1"
    padding_trick: bool = True
    prr: bool = False
    multiply_by_input: bool = True
    positive_only: bool = True
    interpolation: str = "nearest"
    rectifies: ClassVar[bool] = True
    thresholds: ClassVar[bool] = True
    families: ClassVar[frozenset[str]] = frozenset({"pad"})

    def __post_init__(self) -> None:
        number(self, "q", 0, 100)
        if self.tau is not None:
            number(self, "tau", -math.inf)
        choice(self, "rule")
        choice(self, "interpolation")
        flags(self, "padding_trick", "prr", "multiply_by_input", "positive_only")

    @property
    def per_sample(self) -> bool:
        return self.tau is None

    @property
    def steady(self) -> bool:
        return type(self) is RectGrad and not self.prr and self.interpolation == "nearest"

    @property
    def facts(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("last",) if self.rule == "mod" else ()

    def rules(self) -> Rules:
        rectified = rules.rectified(self.q, self.tau, self.rule, self.interpolation)
        result = dict.fromkeys(ops.RECTIFIERS, rectified)
        if self.padding_trick:
            result["conv"] = rules.masked_padding()
        if self.prr:
            result["max_pool"] = rules.proportional_pooling()
        return result

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        maps = times(raw, inputs) if self.multiply_by_input else raw
        return tuple(m.clamp(min=0) for m in maps) if self.positive_only else maps


@dataclass(frozen=True)
class EpsilonLRP(Method):
    """Layer-wise relevance propagation with the epsilon rule."""

    epsilon: float = 1e-4
    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu")
    facts: ClassVar[tuple[str, ...]] = ("folded",)

    def __post_init__(self) -> None:
        number(self, "epsilon", 0)

    def rules(self) -> Rules:
        return rules.lrp_rules(self.epsilon)

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return times(raw, inputs)


@dataclass(frozen=True)
class DeepLift(Method):
    """DeepLIFT with the Rescale rule: contributions to the difference from a baseline input.

    baseline: a number or a tensor (one for all samples, or one for each; a tuple for several inputs).
    """

    baseline: Any = 0.0
    decompose: ClassVar[tuple[str, ...]] = ("attention", "glu", "norm")

    def __post_init__(self) -> None:
        check_baseline(self)

    def rules(self) -> Rules:
        return rules.deeplift_rules()

    def raw(self, subject: Subject) -> Maps:
        resolved = subject.resolved()
        reference = Pass(subject.at(baselines(self.baseline, subject.inputs)), subject.tape_for(self))
        baseline_scores = reference.scores(resolved)
        passed = Pass(subject, subject.tape_for(self))
        scores = passed.scores(resolved)
        pair(passed, reference)
        raw = subject.finish(self, passed, scores)
        total = sum(per_sample(m).sum(1) for m in self.finish(raw, subject.inputs))
        difference = (scores - baseline_scores).detach()
        passed.tape.trace.completeness_error = total - difference
        if not subject.diagnosing:
            warn_if_incomplete(subject, passed.tape.trace, difference)
        return raw

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return differences_times(raw, inputs, self.baseline)

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, baseline=baseline_rows(self.baseline, start, stop, inputs))


def pair(passed: Pass, reference: Pass) -> None:
    """Each op with its counterpart in the baseline's pass."""
    ours, theirs = passed.tape.ops, reference.tape.ops
    for i, op in enumerate(ours):
        if i >= len(theirs) or theirs[i].name != op.name or theirs[i].shape != op.shape:
            raise ValueError(
                f"the model ran other operations on the baseline than on the input, from "
                f"{passed.tape.trace.layer_of(op)!r} on; DeepLIFT needs both to take the same path"
            )
        op.reference = theirs[i]


@dataclass(frozen=True)
class RandomMap(Method):
    """Uniform noise that depends on the seed and the sample's own values: the control of every experiment."""

    seed: int = 0
    one_backward: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        integer(self, "seed")

    def raw(self, subject: Subject) -> Maps:
        check_inputs(subject.inputs)
        return tuple(self._noise(x.detach().cpu()).to(x) for x in subject.inputs)

    def _noise(self, x: Tensor) -> Tensor:
        """One way from the device and back for all samples."""
        return torch.stack([self._sample(each) for each in x]) if len(x) else torch.empty(x.shape)

    def _sample(self, x: Tensor) -> Tensor:
        values = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        generator = generator_of(str(self.seed).encode(), values)
        return torch.rand(x.shape, generator=generator, dtype=torch.float32, device="cpu")


def generator_of(*parts: bytes) -> torch.Generator:
    """A random generator that depends on its parts alone, on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest.digest(), "big") >> 1)


def times(raw: Maps, inputs: Maps) -> Maps:
    return tuple(r * x.detach() for r, x in zip(raw, inputs, strict=True))
