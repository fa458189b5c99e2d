"""Averages of any other method over inputs: SmoothGrad, Integrated Gradients and Expected Gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rectgrad.engine.points import Ask
from rectgrad.engine.request import Request
from rectgrad.kernels.baseline import (
    baselines,
    differences_times,
    each_baseline,
    joined,
    quadrature,
    weighted_sum,
    with_rows,
)
from rectgrad.kernels.draws import between, noisy
from rectgrad.methods.gradients import Saliency
from rectgrad.methods.method import Maps, Method
from rectgrad.methods.options import Value, check_baseline, option, wrong_option
from rectgrad.metrics.baselines import blurred


@dataclass(frozen=True)
class Average(Method):
    """The mean of another method over several inputs."""

    over: Method = option(Saliency(), "Method whose maps are averaged.")
    one_backward: ClassVar[bool] = False

    @property
    def uses_rules(self) -> bool:
        return self.over.uses_rules

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, over=self.over.rows(start, stop, inputs))


@dataclass(frozen=True)
class SmoothGrad(Average):
    """The mean of another method's finished maps over noisy copies of the input.

    The j-th noise of a sample depends on (seed, j) and on the sample's own values, so that a map does not
    depend on the batch and no two pictures share their noise.
    """

    samples: int = option(50, "Number of noisy copies; default: 50.", low=1)
    noise: float = option(0.1, "Standard deviation as a share of the value range; default: 0.1.", low=0)
    seed: int = option(0, "Seed of the random numbers.")
    title: ClassVar[str] = "SmoothGrad"

    def raw(self, request: Request) -> Maps:
        return self._mean(request, lambda over, noisy: over.raw(noisy))

    def maps(self, request: Request) -> Maps:
        return self._mean(request, lambda over, noisy: over.maps(noisy))

    def _mean(self, request: Request, ask: Ask) -> Maps:
        copies = joined(noisy(request.inputs, self.noise, self.seed))
        maps = self.over.at_points(ask, request, copies, self.samples)
        return weighted_sum((1 / self.samples, m) for m in maps)


@dataclass(frozen=True)
class IntegratedGradients(Average):
    """(input - baseline) times the mean of another method's raw result between the baseline and the input.

    quadrature: "trapezoid" (both ends included, half-weighted) or "right" (the authors': i / steps for
    i = 1 .. steps).
    """

    steps: int = option(50, "Number of evaluations between the baseline and the input; default: 50.", low=1)
    baseline: Value = option(0.0, "Value that stands for no information; default: 0, mid-grey.")
    quadrature: str = option("trapezoid", "Quadrature: trapezoid or right.", choices=("trapezoid", "right"))
    title: ClassVar[str] = "integrated gradients"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quadrature == "trapezoid" and self.steps < 2:
            raise wrong_option(self, "steps", ValueError, "at least 2")
        check_baseline(self)

    def raw(self, request: Request) -> Maps:
        x0 = baselines(self.baseline, request.inputs)
        ends = list(zip(request.inputs, x0, strict=True))
        points = quadrature(self.steps, self.quadrature)[::-1]
        # The first point is the witness (see points.py): neither an end nor the middle, which is their mean.
        points.insert(0, points.pop(self.steps // 3))
        steps = joined(lambda i: tuple(b + points[i][0] * (x.detach() - b) for x, b in ends))
        maps = self.over.at_points(lambda over, at: over.raw(at), request, steps, self.steps)
        return weighted_sum((weight, m) for (_, weight), m in zip(points, maps, strict=True))

    def finish(self, raw: Maps, inputs: Maps) -> Maps:
        return differences_times(raw, inputs, self.baseline)

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        baseline = with_rows(self.baseline, inputs, lambda rows: rows[start:stop])
        return replace(self, over=self.over.rows(start, stop, inputs), baseline=baseline)


@dataclass(frozen=True)
class ExpectedGradients(Average):
    """(input - baseline) times another method's raw result between the two, at random baselines and points.

    The mean over `samples` draws of (x - b) * raw(b + t (x - b)): b is one of the baselines, t uniform from 0
    to 1. baselines: a tensor (B, ...), the same for all samples; a tuple for several inputs. None: five
    Gaussian-blurred copies of the sample itself. The draws of a sample are its own, as in SmoothGrad.
    """

    samples: int = option(50, "Number of random baselines and points; default: 50.", low=1)
    baselines: Tensor | tuple[Tensor, ...] | None = option(None, "Inputs without information.")
    seed: int = option(0, "Seed of the random numbers.")
    title: ClassVar[str] = "expected gradients"

    def raw(self, request: Request) -> Maps:
        inputs = tuple(x.detach() for x in request.inputs)
        given = blurred(inputs) if self.baselines is None else each_baseline(self.baselines, inputs)
        drawn = between(inputs, given, self.seed)
        points = joined(lambda j: drawn(j)[0])
        maps = self.over.at_points(lambda over, at: over.raw(at), request, points, self.samples)
        products = (map(torch.mul, drawn(j)[1], m) for j, m in enumerate(maps))
        return weighted_sum((1 / self.samples, tuple(each)) for each in products)
