"""Methods that hide parts of the input and look at the score: Occlusion and RISE. They need no gradient.

A part is hidden in all channels: dimension 1, where an input has more than two. Of several input tensors one
is changed at a time. A map has one value for each position, divided equally among the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rectgrad.engine.bridge import BridgedPass, BridgeRecorder
from rectgrad.engine.op import wide
from rectgrad.engine.request import Request
from rectgrad.engine.target import logits
from rectgrad.kernels.baseline import baselines, positions, with_rows
from rectgrad.kernels.draws import generator_of
from rectgrad.kernels.masks import Masks, Windows
from rectgrad.methods.method import Maps, Method
from rectgrad.methods.options import Value, check_baseline, option, wrong_option


@dataclass(frozen=True)
class Forward(Method):
    """The outputs, by the forward pass alone: what `rectgrad.capture` replays."""

    def raw(self, request: Request) -> Maps:
        with closing(request.recording(self)) as request.last:
            request.answer = logits(request.last.outputs).detach()
        if request.suspicions is not None:
            request.suspicions.append(~request.answer.isfinite().all())
        return (request.answer,)


@dataclass(frozen=True)
class Perturbation(Method):
    """The effect on the score of hiding parts of the input."""

    one_backward: ClassVar[bool] = False
    over: ClassVar[Method] = Forward()  # what a capture replays
    _values: ClassVar[Callable[..., Tensor]]  # one for each position of the k-th input: (N, *sides)

    def raw(self, request: Request) -> Maps:
        maps = []
        for k, x in enumerate(request.inputs):
            values = self._values(request, k, positions(x))
            values = values.reshape(len(x), *(1,) * (x.dim() - values.dim()), *values.shape[1:])
            maps.append(torch.empty_like(x, requires_grad=False).copy_(values * (values.numel() / x.numel())))
        if not all(bool(m.isfinite().all()) for m in maps):
            Method().raw(request.at(request.inputs))  # names the layer, if the whole input shows it
            raise ValueError("the score of a partly hidden input is NaN or infinite, or their sum overflows")
        return tuple(maps)


def changes(request: Request, k: int, hide: Callable[[Tensor, int], None], count: int) -> Tensor:
    """score(x with a part hidden) - score(x) for each of `count` parts of the k-th input: (count, N).

    hide(copies, i): hides parts i, i + 1, ... in copies (K, N, ...) of that input, one in each.
    """

    def points(start: int, stop: int) -> Maps:
        if start == 0:
            return request.inputs
        copies = [torch.cat([x.detach()] * (stop - start)) for x in request.inputs]
        hide(copies[k].unflatten(0, (stop - start, -1)), start - 1)
        return tuple(copies)

    found = Method().at_points(forward, request, points, count + 1)
    scores = torch.stack([score for (score,) in found]).to(wide(request.inputs[k][:0]))
    return scores[1:] - scores[0]


def forward(_: Any, request: Request) -> Maps:
    """One score for each sample, by a forward pass that records nothing and builds no graph."""
    if request.replay is not None:
        request.answer = request.replay(request.inputs, None)[1]
        return (request.resolved()(request.answer),)
    passed = BridgedPass(request, BridgeRecorder((), transparent=True), differentiable=False)
    outputs = getattr(passed.outputs, "logits", passed.outputs)
    request.last, request.answer = passed, outputs if isinstance(outputs, Tensor) else None
    return (passed.scores(request.resolved(passed.outputs)),)


@dataclass(frozen=True)
class Occlusion(Perturbation):
    """How far the score falls when a window that slides over the input is replaced.

    At each position the mean of score(x) - score(x with the window replaced) over the windows that cover it.
    baseline: what replaces the window, a number or a tensor (a tuple for several inputs).
    """

    window: int | None = option(None, "Side of the window; default: an eighth of each side.", low=1)
    stride: int | None = option(None, "Step of the window; default: half the window.", low=1)
    baseline: Value = option(0.0, "Value that stands for no information; default: 0, mid-grey.")
    title: ClassVar[str] = "occlusion"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_baseline(self)

    def _values(self, request: Request, k: int, sides: Sequence[int]) -> Tensor:
        b = baselines(self.baseline, request.inputs)[k]
        windows = Windows([self._places(side) for side in sides], sides, b.device)
        return windows.mean(-changes(request, k, partial(windows.replace, values=b), windows.count))

    def _places(self, side: int) -> list[range]:
        """The positions of windows along one side; the last one may be cut off."""
        window = min(self.window or max(side // 8, 1), side)
        stride = self.stride or max(window // 2, 1)
        if window < min(side, stride):
            raise wrong_option(self, "stride", ValueError, f"at most the window, {window}")
        return [range(i, i + window) for i in range(0, side - window + stride, stride)]

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, baseline=with_rows(self.baseline, inputs, lambda rows: rows[start:stop]))


@dataclass(frozen=True)
class RISE(Perturbation):
    """The mean of random masks, weighted by the score of the input that each of them leaves.

    Petsiuk et al. 2018: sum over i of (s_i - mean of s) * m_i / (keep * masks), s_i = score(x * m_i). Without
    the mean, which the paper's probabilities hardly need, the map is that of a logit's offset. A mask is a
    grid of cells, each visible with probability `keep`, upsampled linearly and shifted at random.
    """

    masks: int = option(4000, "Number of random masks; default: 4000.", low=1)
    cells: int = option(7, "Cells of a mask along each side; default: 7.", low=1)
    keep: float = option(0.5, "Probability that a cell is visible; default: 0.5.", low=0.01, high=1)
    seed: int = option(0, "Seed of the random numbers.")

    def _values(self, request: Request, k: int, sides: Sequence[int]) -> Tensor:
        random, device = generator_of(str(self.seed).encode()), request.inputs[k].device
        masks = Masks(sides, self.masks, self.cells, self.keep, random, device)
        found = changes(request, k, masks.apply, self.masks)
        return masks.sum(found - found.mean(0)) / (self.keep * self.masks)
