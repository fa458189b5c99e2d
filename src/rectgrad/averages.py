"""Averages over inputs, around any other method: SmoothGrad and Integrated Gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad.baseline import baseline_rows, baselines, differences_times
from rectgrad.copies import Ask, Copies
from rectgrad.methods import Method, Saliency, generator_of
from rectgrad.op import per_sample
from rectgrad.options import check_baseline, choice, integer, number
from rectgrad.passes import Maps
from rectgrad.subject import Subject


@dataclass(frozen=True)
class SmoothGrad(Method):
    """The mean of another method's finished maps over noisy copies of the input.

    over: that method. noise: standard deviation as a share of the sample's value range. The j-th noise tensor
    depends on (seed, j) alone and is shared by all samples.
    """

    over: Method = Saliency()
    samples: int = 50
    noise: float = 0.1
    seed: int = 0
    one_backward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_over(self)
        integer(self, "samples", 1)
        number(self, "noise", 0)
        integer(self, "seed")

    def raw(self, subject: Subject) -> Maps:
        return self._mean(subject, lambda over, noisy: over.raw(noisy))

    def maps(self, subject: Subject) -> Maps:
        return self._mean(subject, lambda over, noisy: over.maps(noisy))

    def _mean(self, subject: Subject, ask: Ask) -> Maps:
        maps = Copies(ask, self.over, subject).each(self._noisy(subject), self.samples)
        return weighted_sum((1 / self.samples, m) for m in maps)

    def _noisy(self, subject: Subject) -> Iterator[Maps]:
        scale = [self.noise * _range(x) for x in subject.inputs]
        for j in range(self.samples):
            generator = generator_of(str(self.seed).encode(), str(j).encode())
            noise = [_normal(x, generator) for x in subject.inputs]
            noisy = zip(subject.inputs, scale, noise, strict=True)
            yield tuple(x.detach() + s * e for x, s, e in noisy)

    @property
    def uses_rules(self) -> bool:
        return self.over.uses_rules

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, over=self.over.rows(start, stop, inputs))


@dataclass(frozen=True)
class IntegratedGradients(Method):
    """(input - baseline) times the mean of another method's raw result on the way from baseline to input.

    steps: number of evaluations. quadrature: "trapezoid" (both ends included, half-weighted) or "right" (the
    authors': i / steps for i = 1 .. steps).
    """

    over: Method = Saliency()
    steps: int = 50
    baseline: Any = 0.0
    quadrature: str = "trapezoid"
    one_backward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_over(self)
        choice(self, "quadrature")
        integer(self, "steps", 2 if self.quadrature == "trapezoid" else 1)
        check_baseline(self)

    def raw(self, subject: Subject) -> Maps:
        x0 = baselines(self.baseline, subject.inputs)
        ends = list(zip(subject.inputs, x0, strict=True))
        points = self._points()[::-1]
        # The first one stands for all (see copies): neither an end nor the middle, which is their mean.
        points.insert(0, points.pop(self.steps // 3))
        steps = (tuple(b + alpha * (x.detach() - b) for x, b in ends) for alpha, _ in points)
        maps = Copies(lambda over, step: over.raw(step), self.over, subject).each(steps, self.steps)
        return weighted_sum((weight, m) for (_, weight), m in zip(points, maps, strict=True))

    def _points(self) -> list[tuple[float, float]]:
        """(position between baseline and input, weight); the weights sum to 1."""
        n = self.steps
        if self.quadrature == "right":
            return [((i + 1) / n, 1 / n) for i in range(n)]
        inner = 1 / (n - 1)
        return [(i * inner if i < n - 1 else 1.0, inner / 2 if i in (0, n - 1) else inner) for i in range(n)]

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return differences_times(raw, inputs, self.baseline)

    @property
    def uses_rules(self) -> bool:
        return self.over.uses_rules

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        baseline = baseline_rows(self.baseline, start, stop, inputs)
        return replace(self, over=self.over.rows(start, stop, inputs), baseline=baseline)


def check_over(method: Any) -> None:
    if not isinstance(method.over, Method):
        raise TypeError(f"{type(method).__name__}: over must be a method or its name, not {method.over!r}")


def weighted_sum(terms: Any) -> Maps:
    """Sums of weight * maps; half types are added up in float32."""
    total: list[Tensor] = []
    for weight, maps in terms:
        kinds = [m.dtype for m in maps]
        wide = [weight * (m.float() if m.element_size() < 4 else m) for m in maps]
        total = [a + b for a, b in zip(total, wide, strict=True)] if total else wide
    return tuple(t.to(kind) for t, kind in zip(total, kinds, strict=True))


def _normal(x: Tensor, generator: torch.Generator) -> Tensor:
    """Noise for one sample of x: drawn on the CPU in float32, the same for every device and type."""
    return torch.randn(x.shape[1:], generator=generator, dtype=torch.float32, device="cpu").to(x)


def _range(x: Tensor) -> Tensor:
    """max - min of each sample, shaped to broadcast."""
    flat = per_sample(x.detach())
    return (flat.amax(1) - flat.amin(1)).reshape(-1, *(1,) * (x.dim() - 1))
