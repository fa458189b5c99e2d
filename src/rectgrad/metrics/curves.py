"""Insertion and deletion: how the score changes as pixels are added or removed in the order of the map."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rectgrad.metrics.baselines import filled
from rectgrad.metrics.checks import images, real

Model = Callable[..., object]
Target = int | Sequence[int] | Tensor | None


def insertion(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    steps: int = 100,
    baseline: float | Tensor | str = 0.0,
    batch_size: int | None = None,
) -> Tensor:
    """Scores, (N, steps + 1), as the pixels of `inputs` replace those of `baseline`, most important first.

    Column k is the score with floor(k P / steps) of the P pixels in place, all channels at once. Pixels are
    ranked by the channel-summed map, largest first, ties in reading order.

    model: a classifier, whose output for the class `target` is the score; or a function that returns the
    scores itself, one number for each image, and takes no `target`. It runs under no_grad.
    target: an int, or one class for each sample; default: each sample's largest output for `inputs`.
    baseline: a number, a tensor that broadcasts to `inputs`, "mean" (each channel's mean) or "blur" (a
    Gaussian of 5 % of the shorter side).
    batch_size: run the model on this many samples at a time; not for functions that hold labels of all N.
    """
    order = _pixel_order("insertion", inputs, maps)
    scores = _Scores(model, target, len(inputs), batch_size)
    return _curve(scores, filled(baseline, inputs), inputs, order, steps, clean_last=True)


def deletion(
    model: Model,
    inputs: Tensor,
    maps: Tensor,
    target: Target = None,
    *,
    steps: int = 100,
    baseline: float | Tensor | str = 0.0,
    batch_size: int | None = None,
) -> Tensor:
    """The reverse of `insertion`: pixels of `baseline` replace those of `inputs`."""
    order = _pixel_order("deletion", inputs, maps)
    scores = _Scores(model, target, len(inputs), batch_size)
    return _curve(scores, inputs, filled(baseline, inputs), order, steps, clean_last=False)


def area(curve: Tensor) -> Tensor:
    """Area under curves (N, K), K >= 2 equally spaced points over fractions 0 to 1, by trapezoids."""
    if curve.ndim < 1 or curve.shape[-1] < 2:
        raise ValueError(f"area(curve of shape {tuple(curve.shape)}): needs at least 2 points, (N, K >= 2)")
    return torch.trapezoid(real(curve), dx=1 / (curve.shape[-1] - 1))


def _pixel_order(call: str, inputs: Tensor, maps: Tensor) -> Tensor:
    """The rank of each pixel, 0 for the most important, in a shape that broadcasts to `inputs`."""
    given = f"{call}(inputs of shape {tuple(inputs.shape)}, maps of shape {tuple(maps.shape)})"
    if inputs.ndim < 3 or maps.ndim < 3 or len(inputs) != len(maps) or inputs.shape[-2:] != maps.shape[-2:]:
        raise ValueError(f"{given}: needs (N, H, W) or (N, C, H, W), with the same N, H and W")
    pixels = images(call, maps).sum(1).flatten(1)
    order = pixels.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return order.reshape(len(inputs), *[1] * (inputs.ndim - 3), *inputs.shape[-2:])


def _curve(
    scores: _Scores, start: Tensor, end: Tensor, order: Tensor, steps: int, clean_last: bool
) -> Tensor:
    """Scores, (N, steps + 1), as pixels of `end` replace those of `start` in the given order.

    The clean inputs, which are the first or the last step, are evaluated first: they determine the class if
    `target` is None.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: needs 1 or more")
    pixels = order.shape[-2] * order.shape[-1]
    counts = [k * pixels // steps for k in range(steps + 1)]
    with torch.no_grad():
        shown = reversed(counts) if clean_last else iter(counts)
        columns = [scores(torch.where(order < n, end, start)) for n in shown]
    return torch.stack(columns[::-1] if clean_last else columns, dim=1)


class _Scores:
    """Computes one score per image. If `target` is None, the first call determines each sample's class."""

    def __init__(self, model: Model, target: Target, n: int, batch_size: int | None) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: needs 1 or more, or None")
        self.model, self.size = model, batch_size or max(n, 1)
        self.given = _checked(target, n)
        self.classes: dict[int, Tensor] = {}  # index of a chunk's first sample -> classes of the chunk

    def __call__(self, images: Tensor) -> Tensor:
        if len(images) == 0:  # many models do not accept an empty batch
            return real(images.new_zeros(0))
        starts = range(0, len(images), self.size)
        return torch.cat([self._part(images[i : i + self.size], i) for i in starts])

    def _part(self, images: Tensor, start: int) -> Tensor:
        found = self.model(images)
        found = getattr(found, "logits", found)
        n, shape = len(images), tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if not isinstance(found, Tensor) or found.ndim not in (1, 2) or len(found) != n or not found.numel():
            given = f"model(images of shape {tuple(images.shape)}) returned {shape}"
            raise ValueError(f"{given}: needs outputs ({n}, classes), or one score for each image, ({n},)")
        if found.ndim == 2:
            return real(found).gather(1, self._classes(found, start)[:, None])[:, 0]
        if self.given is not None:
            raise ValueError(
                f"model returned one score for each image, ({n},): needs target=None, or a model that "
                f"returns ({n}, classes)"
            )
        return real(found)

    def _classes(self, outputs: Tensor, start: int) -> Tensor:
        if start not in self.classes:
            own = outputs.argmax(1) if self.given is None else self.given[start : start + len(outputs)]
            if bool((own < 0).any()) or bool((own >= outputs.shape[1]).any()):
                needs = f"needs classes from 0 to {outputs.shape[1] - 1}"
                raise ValueError(
                    f"target={own.tolist()} for outputs of shape {tuple(outputs.shape)}: {needs}"
                )
            self.classes[start] = own.to(outputs.device)
        return self.classes[start]


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
