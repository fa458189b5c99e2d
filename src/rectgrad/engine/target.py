"""Which number is explained: from a model's output and a `target` to one score a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class contrast:  # noqa: N801 - reads as a function: target=contrast(281, 285)
    """A target: why class `a` rather than class `b`? The score is output[a] - output[b].

    Each is an int, or a list or tensor with one class for each sample.
    """

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def __call__(self, outputs: Any) -> Tensor:
        scores = logits(outputs)
        n = scores.shape[0]
        return pick(scores, indices(scores, self.a, n)) - pick(scores, indices(scores, self.b, n))

    def __repr__(self) -> str:
        return f"contrast({self.a!r}, {self.b!r})"


def logits(outputs: Any) -> Tensor:
    """The tensor of scores in a model's output."""
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Tensor):
        return found
    raise TypeError(
        f"the model returned {_describe(outputs)}, not a tensor; give a callable target that takes it and "
        "returns one score for each sample, shape (N,)"
    )


@dataclass(frozen=True)
class Picked:
    """One class for each sample."""

    index: Tensor

    def at(self, outputs: Any) -> Picked:
        """The classes, once the outputs are known."""
        return self

    def __call__(self, outputs: Any) -> Tensor:
        return pick(logits(outputs), self.index)

    def gradient(self, outputs: Tensor) -> Tensor:
        """Of the scores' sum: 1 where an output was picked."""
        if outputs.dim() == 1:
            return torch.ones_like(outputs, requires_grad=False)
        return torch.zeros_like(outputs, requires_grad=False).scatter_(1, self.index.unsqueeze(1), 1)

    def rows(self, start: int, stop: int) -> Picked:
        return Picked(self.index[start:stop])

    def copies(self, k: int) -> Picked:
        return Picked(self.index.repeat(k))


@dataclass(frozen=True)
class Open(Picked):
    """One class for each sample, or -1 for the largest output: which one is seen when there are outputs."""

    def at(self, outputs: Any) -> Picked:
        scores = logits(outputs)
        if scores.dim() == 1:
            return self
        return Picked(torch.where(self.index < 0, scores.detach().argmax(1), self.index))


@dataclass(frozen=True)
class Given:
    """A callable target for n samples."""

    target: Any
    n: int

    def at(self, outputs: Any) -> Given:
        return self

    def __call__(self, outputs: Any) -> Tensor:
        return _checked(self.target, outputs, self.n)

    def rows(self, start: int, stop: int) -> Given:
        return Given(narrow(self.target, start, stop, self.n), stop - start)

    def copies(self, k: int) -> Given:
        return Given(repeated(self.target, k), k * self.n)


Scores = Picked | Given


def resolve(target: Any, outputs: Any, n: int) -> Scores:
    """`target` as a function from outputs to (N,) scores; a class left open is settled by these outputs."""
    if callable(target):
        return Given(target, n)
    scores = logits(outputs)
    if scores.dim() == 0 or scores.shape[0] != n:
        raise ValueError(
            f"the model returned shape {tuple(scores.shape)} for {n} samples; give a callable target that "
            f"returns shape ({n},)"
        )
    return Picked(indices(scores, target, n))


def indices(scores: Tensor, target: Any, n: int) -> Tensor:
    """The class to explain for each sample, shape (N,)."""
    if scores.dim() == 1:
        scores = scores.unsqueeze(1)
    if scores.dim() != 2:
        raise ValueError(
            f"the model's output has shape {tuple(scores.shape)}, not (N, classes); give a callable target, "
            f"for example target=lambda out: out[:, 3].mean(dim={tuple(range(1, scores.dim() - 1))})"
        )
    if scores.shape[1] == 0:
        raise ValueError(f"the model's output has shape {tuple(scores.shape)}: it has no classes")
    if target is None:
        return scores.detach().argmax(1)
    index = _as_integers(target)  # checked where it is: to ask a GPU is to wait for it
    index = index.clone() if index.is_inference() else index
    if index.dim() > 0 and index.shape != (n,):
        raise ValueError(
            f"target has shape {tuple(index.shape)}; one class for each of {n} samples is needed"
        )
    outside = index[(index < 0) | (index >= scores.shape[1])]
    if outside.numel():
        raise ValueError(
            f"target {int(outside[0])} is out of range: the model has {scores.shape[1]} outputs, "
            f"0 to {scores.shape[1] - 1}"
        )
    if index.dim() == 0:
        return torch.full((n,), int(index), device=scores.device)
    if scores.is_cuda and not index.is_cuda:
        index = index.pin_memory()  # or the copy would wait for the device
    return index.to(scores.device, non_blocking=True)


def _as_integers(target: Any) -> Tensor:
    try:
        index = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        index = None
    if index is None or index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(
            f"target must be None, an int, a list or integer tensor with one class for each sample, or a "
            f"callable; got {target!r}"
        )
    return index.long()


def pick(scores: Tensor, index: Tensor) -> Tensor:
    """scores[i, index[i]] for each sample i."""
    if scores.dim() == 1:
        return scores
    return scores.gather(1, index.unsqueeze(1)).squeeze(1)


def narrow(target: Any, start: int, stop: int, n: int) -> Any:
    """The target of samples start to stop, where it names a class for each sample."""
    if isinstance(target, contrast):
        return contrast(narrow(target.a, start, stop, n), narrow(target.b, start, stop, n))
    if target is None or callable(target) or isinstance(target, int):
        return target
    index = _as_integers(target)
    if index.dim() == 0:
        return target
    if index.shape != (n,):
        raise ValueError(
            f"target has shape {tuple(index.shape)}; one class for each of {n} samples is needed"
        )
    return index[start:stop]


def repeated(target: Any, k: int) -> Any:
    """The target of k copies of the samples, where it names a class for each sample."""
    if isinstance(target, contrast):
        return contrast(repeated(target.a, k), repeated(target.b, k))
    if callable(target) or isinstance(target, int):
        return target
    index = _as_integers(target)
    return index.repeat(k) if index.dim() else target


def _checked(target: Callable[[Any], Any], outputs: Any, n: int) -> Tensor:
    scores = target(outputs)
    if not isinstance(scores, Tensor):
        raise TypeError(f"the callable target returned {_describe(scores)}; it must return a tensor ({n},)")
    if scores.shape != (n,):
        raise ValueError(f"the callable target returned shape {tuple(scores.shape)}; it must be ({n},)")
    return scores


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, list(value)[:6]))}"
    return f"a {type(value).__name__}"
