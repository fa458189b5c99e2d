"""Evaluates a model on images: its outputs, and one score per image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rectgrad.metrics.checks import real

Model = Callable[..., object]
Target = int | Sequence[int] | Tensor | None


class Scores:
    """Computes one score per image, under no_grad.

    model: a classifier, whose output for the sample's class is the score; or a function that returns the
    scores itself. If `target` is None, the first call determines each sample's class.
    """

    def __init__(self, model: Model, target: Target, n: int, batch_size: int | None = None) -> None:
        if not callable(model):
            own = "give its module, model.module" if hasattr(model, "module") else "the model comes first"
            raise TypeError(f"model must be a module or a function, not {type(model).__name__}; {own}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: needs 1 or more, or None")
        self.model, self.size = model, batch_size or max(n, 1)
        self.target = _checked(target, n)
        self._classes: Tensor | None = None
        self._last = True  # channels

    def __call__(self, images: Tensor) -> Tensor:
        """(N,), in float32 or float64."""
        if len(images) == 0:  # many models do not accept an empty batch
            return real(images.new_zeros(0))
        outputs = self.outputs(images)
        if outputs.ndim == 2:
            return outputs.gather(1, self.classes(outputs)[:, None])[:, 0]
        if self.target is not None:
            raise ValueError(f"{_returned(outputs)}: needs target=None, or a model that returns (N, classes)")
        return outputs

    @torch.no_grad()
    def outputs(self, images: Tensor) -> Tensor:
        """(N, classes), or (N,) if the model returns scores, in float32 or float64."""
        return torch.cat([self._part(part) for part in images.split(self.size)])

    def classes(self, outputs: Tensor) -> Tensor:
        """The class of each sample, (N,)."""
        if outputs.ndim != 2:
            raise ValueError(f"{_returned(outputs)}: needs a classifier that returns (N, classes)")
        if self._classes is None:
            own = outputs.argmax(1) if self.target is None else self.target.to(outputs.device)
            if bool((own < 0).any()) or bool((own >= outputs.shape[1]).any()):
                given = f"target={own.tolist()} for outputs of shape {tuple(outputs.shape)}"
                raise ValueError(f"{given}: needs classes from 0 to {outputs.shape[1] - 1}")
            self._classes = own
        return self._classes

    def _answer(self, images: Tensor) -> object:
        """Channels last takes half of a small CNN's time on a CPU. Networks that call `view` raise an error
        for it."""
        if self._last and isinstance(self.model, nn.Module) and images.dim() == 4 and images.is_cpu:
            try:
                return self.model(images.contiguous(memory_format=torch.channels_last))
            except RuntimeError:
                self._last = False
        return self.model(images)

    def _part(self, images: Tensor) -> Tensor:
        found = self._answer(images)
        found = getattr(found, "logits", found)
        n, shape = len(images), tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if not isinstance(found, Tensor) or found.ndim not in (1, 2) or len(found) != n or not found.numel():
            given = f"model(images of shape {tuple(images.shape)}) returned {shape}"
            raise ValueError(f"{given}: needs outputs ({n}, classes), or one score for each image, ({n},)")
        return real(found)


def _returned(outputs: Tensor) -> str:
    return f"model returned one score for each image, {tuple(outputs.shape)}"


def _checked(target: Target, n: int) -> Tensor | None:
    """One class for each sample; None if no target was given."""
    if target is None:
        return None
    try:
        index = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(0)
    integers = not index.dtype.is_floating_point and index.dtype != torch.bool
    if not integers or tuple(index.shape) not in [(), (n,)]:
        raise ValueError(f"target={target!r}: needs None, an int, or one class for each of {n} samples")
    return index.long().expand(n)
