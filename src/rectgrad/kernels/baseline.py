"""Baselines: inputs that stand for the absence of information, as a number or a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rectgrad.kernels.device import is_capturing
from rectgrad.kernels.reference import wide

Tensors = tuple[Tensor, ...]


def baselines(baseline: Any, inputs: Tensors) -> Tensors:
    """The baseline as a tuple of tensors with the shapes of the inputs."""
    values = baseline if isinstance(baseline, tuple) else (baseline,) * len(inputs)
    if len(values) != len(inputs):
        raise ValueError(f"{len(values)} baselines were given for {len(inputs)} input tensors")
    return tuple(_like(value, x) for value, x in zip(values, inputs, strict=True))


def _like(value: Any, x: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full_like(x, value)
    # The baseline was checked before the capture.
    if not is_capturing(value.device) and not bool(value.isfinite().all()):
        raise ValueError("the baseline contains a NaN or an infinity")
    try:
        return value.detach().to(x).expand(x.shape)
    except RuntimeError:
        shapes = f"baseline of shape {tuple(value.shape)} does not broadcast to the input's {tuple(x.shape)}"
        raise ValueError(shapes) from None


def differences_times(raw: Tensors, inputs: Tensors, baseline: Any) -> Tensors:
    x0 = baselines(baseline, inputs)
    return tuple(r * (x.detach() - b) for r, x, b in zip(raw, inputs, x0, strict=True))


def each_baseline(values: Any, inputs: Tensors) -> list[Tensors]:
    """Several baselines, each as a tuple of tensors with the shapes of the inputs."""
    given = values if isinstance(values, tuple) else (values,)
    for b, x in zip(given, inputs, strict=False):
        if not isinstance(b, Tensor) or b.dim() != x.dim() or not 0 < len(b) == len(given[0]):
            wanted = f"a tensor (B, {', '.join(map(str, x.shape[1:]))}) with a baseline in each row"
            found = tuple(b.shape) if isinstance(b, Tensor) else f"{b!r:.60}"
            raise ValueError(f"baselines must be {wanted}, not {found}")
    return [baselines(row, inputs) for row in zip(*given, strict=True)]


def positions(x: Tensor) -> torch.Size:
    """The sides of a sample, without its channels: dimension 1 of inputs with more than two."""
    return x.shape[2:] if x.dim() > 2 else x.shape[1:]


def column(values: Tensor, x: Tensor) -> Tensor:
    """One number per sample, in a shape that broadcasts."""
    return values.reshape(-1, *(1,) * (x.dim() - 1))


def with_rows(baseline: Any, inputs: Tensors, change: Callable[[Tensor], Tensor]) -> Any:
    """The baseline with other rows, if it has one for each sample."""
    if isinstance(baseline, tuple):
        return tuple(with_rows(b, (x,), change) for b, x in zip(baseline, inputs, strict=True))
    whole = isinstance(baseline, Tensor) and baseline.dim() == inputs[0].dim() and len(baseline) > 1
    return change(baseline) if whole else baseline


def joined(point: Callable[[int], Tensors]) -> Callable[[int, int], Tensors]:
    """A function (start, stop) -> the points with these indices, concatenated."""
    return lambda start, stop: tuple(map(torch.cat, zip(*map(point, range(start, stop)), strict=True)))


def quadrature(n: int, kind: str) -> list[tuple[float, float]]:
    """(position between baseline and input, weight) of n evaluations; the weights sum to 1."""
    if kind == "right":
        return [((i + 1) / n, 1 / n) for i in range(n)]
    inner = 1 / (n - 1)
    return [(i * inner if i < n - 1 else 1.0, inner / 2 if i in (0, n - 1) else inner) for i in range(n)]


def weighted_sum(terms: Any) -> Tensors:
    """Sums of weight * maps; half types are added up in float32."""
    total: list[Tensor] = []
    for weight, maps in terms:
        kinds = [m.dtype for m in maps]
        added = [weight * wide(m) for m in maps]
        total = [a + b for a, b in zip(total, added, strict=True)] if total else added
    return tuple(t.to(kind) for t, kind in zip(total, kinds, strict=True))


def value_range(x: Tensor) -> Tensor:
    """max - min of each sample, in a shape that broadcasts."""
    flat = x.detach().reshape(len(x), -1)
    return column(flat.amax(1) - flat.amin(1), x)
