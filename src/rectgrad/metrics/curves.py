"""Insertion and deletion: how the score changes as pixels are added or removed in the order of the map."""

from collections.abc import Callable

import torch
from torch import Tensor

from rectgrad.metrics.checks import images, real


def insertion(
    model_score: Callable[[Tensor], Tensor],
    inputs: Tensor,
    maps: Tensor,
    steps: int = 100,
    baseline: float | Tensor = 0.0,
    batch_size: int | None = None,
) -> Tensor:
    """Scores, (N, steps + 1), as the pixels of `inputs` replace those of `baseline`, most important first.

    Column k is the score with floor(k P / steps) of the P pixels in place, all channels at once. Pixels are
    ranked by the channel-summed map, largest first, ties in reading order; `baseline` is a number or a
    tensor that broadcasts to `inputs`.

    `model_score` maps images to one number each, under no_grad. It sees all N samples, in order, at every
    step, so it may hold labels: `lambda x: model(x).gather(1, labels[:, None])[:, 0]`. `batch_size` shows
    it at most that many samples at a time instead, for scores that need no labels, as of one fixed class.
    """
    order = _pixel_order("insertion", inputs, maps)
    return _curve(model_score, _filled(baseline, inputs), inputs, order, steps, batch_size)


def deletion(
    model_score: Callable[[Tensor], Tensor],
    inputs: Tensor,
    maps: Tensor,
    steps: int = 100,
    baseline: float | Tensor = 0.0,
    batch_size: int | None = None,
) -> Tensor:
    """The reverse of `insertion`: pixels of `baseline` replace those of `inputs`."""
    order = _pixel_order("deletion", inputs, maps)
    return _curve(model_score, inputs, _filled(baseline, inputs), order, steps, batch_size)


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


def _filled(baseline: float | Tensor, inputs: Tensor) -> Tensor:
    """The baseline as a batch like `inputs`."""
    values = torch.as_tensor(baseline, dtype=inputs.dtype, device=inputs.device)
    try:
        return values.expand(inputs.shape)
    except RuntimeError as error:
        shapes = f"baseline of shape {tuple(values.shape)} for inputs of shape {tuple(inputs.shape)}"
        raise ValueError(f"{shapes}: needs a number or a tensor that broadcasts to the inputs") from error


def _curve(
    model_score: Callable[[Tensor], Tensor],
    start: Tensor,
    end: Tensor,
    order: Tensor,
    steps: int,
    batch_size: int | None,
) -> Tensor:
    """Scores, (N, steps + 1), as pixels of `end` replace those of `start` in the given order."""
    if steps < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"steps={steps}, batch_size={batch_size}: needs 1 or more (or batch_size=None)")
    pixels = order.shape[-2] * order.shape[-1]
    counts = [k * pixels // steps for k in range(steps + 1)]
    with torch.no_grad():
        columns = [_scores(model_score, torch.where(order < n, end, start), batch_size) for n in counts]
    return torch.stack(columns, dim=1)


def _scores(model_score: Callable[[Tensor], Tensor], images: Tensor, batch_size: int | None) -> Tensor:
    if len(images) == 0:  # many models cannot take an empty batch
        return real(images.new_zeros(0))
    size = batch_size or len(images)
    return torch.cat([_score(model_score, images[i : i + size]) for i in range(0, len(images), size)])


def _score(model_score: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    scores = model_score(images)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if shape != (len(images),):
        given = f"images of shape {tuple(images.shape)} returned {shape}"
        raise ValueError(f"model_score({given}): needs one number per image, a tensor ({len(images)},)")
    return real(scores)
