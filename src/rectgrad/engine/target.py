"""Targets: from a model's output to the score of each sample that is explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rectgrad.kernels.device import moved


class contrast:  # noqa: N801 - reads as a function: target=contrast(281, 285)
    """A target: why class `a` rather than class `b`? The score is output[a] - output[b].

    Each is an int, or a list or tensor with one class for each sample.
    """

    def __init__(self, a: int | Sequence[int] | Tensor, b: int | Sequence[int] | Tensor) -> None:
        self.a, self.b = a, b

    def __call__(self, outputs: object) -> Tensor:
        scores = logits(outputs)
        a, b = (Picked(indices(scores, target)) for target in (self.a, self.b))
        return a(scores) - b(scores)

    def __repr__(self) -> str:
        return f"contrast({self.a!r}, {self.b!r})"


def logits(outputs: Any) -> Tensor:
    """The tensor of scores in a model's output."""
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Tensor) and not found.is_complex():
        return found
    raise TypeError(
        f"the model returned {_describe(found)}, not a real tensor; give a callable target that takes it and "
        "returns one score for each sample, shape (N,)"
    )


@dataclass(frozen=True)
class Picked:
    """A resolved target: one class for each sample."""

    index: Tensor

    def __call__(self, outputs: Any) -> Tensor:
        """scores[i, index[i]] for each sample i."""
        scores = logits(outputs)
        return scores if scores.dim() == 1 else scores.gather(1, self.index.unsqueeze(1)).squeeze(1)

    def gradient(self, outputs: Tensor) -> Tensor:
        """The gradient of the sum of the scores: 1 for each picked output."""
        if outputs.dim() == 1:
            return torch.ones_like(outputs, requires_grad=False)
        return torch.zeros_like(outputs, requires_grad=False).scatter_(1, self.index.unsqueeze(1), 1)


@dataclass(frozen=True)
class Open:
    """A target of a capture: one class for each sample, or -1 for the largest output."""

    index: Tensor


Scores = Callable[[Any], Tensor]
Target = int | Sequence[int] | Tensor | Callable[..., Tensor] | None


def resolve(target: Any, outputs: Any, n: int) -> Scores:
    """`target` as a function from outputs to (N,) scores. None becomes the largest of these outputs."""
    if callable(target):
        return target
    scores = logits(outputs)
    if scores.shape[:1] != (n,):
        advice = f"give a callable target that returns shape ({n},)"
        raise ValueError(f"the model returned shape {tuple(scores.shape)} for {n} samples; {advice}")
    if isinstance(target, Open):
        return Picked(torch.where(target.index < 0, indices(scores, None), target.index))
    return Picked(indices(scores, target))


def checked(scores: Any, n: int) -> Tensor:
    """The scores of a callable target, after a check that there is one for each of n samples."""
    said = "the callable target returned"
    if not isinstance(scores, Tensor) or scores.is_complex():
        raise TypeError(f"{said} {_describe(scores)}; it must return a real tensor ({n},)")
    if scores.shape != (n,):
        raise ValueError(f"{said} shape {tuple(scores.shape)}; it must be ({n},)")
    return scores


def indices(scores: Tensor, target: Any) -> Tensor:
    """The class to explain for each sample, shape (N,)."""
    scores = scores.unsqueeze(1) if scores.dim() == 1 else scores
    shape = tuple(scores.shape)
    if len(shape) != 2:
        raise ValueError(
            f"the model's output has shape {shape}, not (N, classes); give a callable target, for example "
            f"target=lambda out: out[:, 3].mean(dim={tuple(range(1, len(shape) - 1))})"
        )
    n, classes = shape
    if classes == 0 or scores.dtype == torch.bool:
        raise ValueError(f"the model's output, {scores.dtype} of shape {shape}, has no real scores")
    if target is None:
        return scores.detach().argmax(1)
    index = _as_integers(target, n)  # checked on its own device: reading from a GPU would synchronise
    asked = index.reshape(-1).tolist()
    if outside := [each for each in asked if not 0 <= each < classes]:
        valid = f"the model has {classes} outputs, 0 to {classes - 1}"
        raise ValueError(f"target {outside[0]} is out of range: {valid}")
    if index.dim() == 0:
        return torch.full((n,), asked[0], device=scores.device)
    return moved(index, scores.device)


def _as_integers(target: Any, n: int) -> Tensor:
    """A copy of the target as integers: one class for all, or one for each of n samples."""
    try:
        index = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        index = None
    if index is None or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(
            "target must be None, an int, a list or integer tensor with one class for each sample, or a "
            f"callable; got {target!r}"
        )
    if index.dim() > 0 and index.shape != (n,):
        shape = tuple(index.shape)
        raise ValueError(f"target has shape {shape}; one class for each of {n} samples is needed")
    return index.to(torch.long, copy=True)  # the caller's may be an inference tensor


def changed(target: Any, n: int, change: Callable[[Tensor], Tensor]) -> Any:
    """The target with `change` applied to its classes, if it has one for each of n samples."""
    if isinstance(target, (Picked, Open)):
        return type(target)(change(target.index))
    if isinstance(target, contrast):
        return contrast(changed(target.a, n, change), changed(target.b, n, change))
    if target is None or callable(target) or isinstance(target, int):
        return target
    index = _as_integers(target, n)
    return change(index) if index.dim() else target


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, list(value)[:6]))}"
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {'complex tensor' if isinstance(value, Tensor) else type(value).__name__}{size}"
