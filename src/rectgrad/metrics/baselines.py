"""Replacement values for removed pixels: a number, an image, the mean colour or a blurred copy."""

import torch
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


def blur(inputs: Tensor, share: float = BLUR, dims: int = 2) -> Tensor:
    """Gaussian blur of the last dimensions. The standard deviation is a share of the shortest of them; border
    values are repeated."""
    first = inputs.dim() - dims
    sigma = share * min(inputs.shape[first:], default=0)
    radius = max(round(3 * sigma), 1)
    offsets = torch.arange(-radius, radius + 1, device="cpu")
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    for dim in range(first, inputs.dim()):
        side = inputs.shape[dim]
        near = (torch.arange(side, device="cpu")[:, None] + offsets).clamp(0, side - 1)
        matrix = torch.zeros(side, side, dtype=torch.double, device="cpu")
        matrix.scatter_add_(1, near, (weights / weights.sum()).expand(side, -1))
        inputs = (inputs.movedim(dim, -1) @ matrix.T.to(inputs)).movedim(-1, dim)
    return inputs.contiguous()


def blurred(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Five copies, each blurred more than the last: by 2, 4, 8, 16 and 32 % of the shorter side. Dimension 1
    of inputs with more than two is that of the channels."""
    dims = [max(x.dim() - 2, min(x.dim() - 1, 1)) for x in inputs]
    pairs = list(zip(inputs, dims, strict=True))
    return [tuple(blur(real(x), 0.02 * 2**i, d).to(x.dtype) for x, d in pairs) for i in range(5)]


_NAMED = {"blur": blur, "mean": mean}
