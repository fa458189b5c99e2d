"""Replacement values for removed pixels: a number, an image, the mean colour or a blurred copy."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.metrics.checks import real

BLUR = 0.05  # standard deviation of "blur", as a share of the shorter side


def filled(baseline: float | Tensor | str, inputs: Tensor) -> Tensor:
    """The baseline as a tensor shaped like `inputs`."""
    if isinstance(baseline, str):
        if baseline not in _NAMED:
            raise ValueError(
                f"baseline={baseline!r}: needs a number, a tensor, or one of {', '.join(map(repr, _NAMED))}"
            )
        return _NAMED[baseline](real(inputs)).to(inputs.dtype)
    values = torch.as_tensor(baseline, dtype=inputs.dtype, device=inputs.device)
    try:
        return values.expand(inputs.shape)
    except RuntimeError as error:
        shapes = f"baseline of shape {tuple(values.shape)} for inputs of shape {tuple(inputs.shape)}"
        raise ValueError(f"{shapes}: needs a number or a tensor that broadcasts to the inputs") from error


def mean(inputs: Tensor) -> Tensor:
    """Each channel's mean over the pixels of the sample."""
    return inputs.mean((-2, -1), keepdim=True).expand(inputs.shape)


def blur(inputs: Tensor) -> Tensor:
    """Gaussian blur with a standard deviation of 5 % of the shorter side; border pixels are repeated."""
    height, width = inputs.shape[-2:]
    sigma = BLUR * min(height, width)
    radius = max(round(3 * sigma), 1)
    at = torch.arange(-radius, radius + 1, dtype=inputs.dtype, device=inputs.device)
    weights = torch.exp(-0.5 * (at / sigma) ** 2)
    weights = weights / weights.sum()
    planes = inputs.reshape(-1, 1, height, width)
    padded = F.pad(planes, (radius,) * 4, mode="replicate")
    blurred = F.conv2d(F.conv2d(padded, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return blurred.reshape(inputs.shape)


_NAMED = {"blur": blur, "mean": mean}
