"""Shape checks and per-sample sums that the metrics share."""

import numpy as np
import torch
from torch import Tensor


def real(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def images(call: str, maps: Tensor) -> Tensor:
    """Maps as (N, C, H, W) in float32 or float64."""
    if maps.ndim < 3:
        raise ValueError(f"{call}(maps of shape {tuple(maps.shape)}): needs (N, H, W) or (N, C, H, W)")
    return real(maps).unsqueeze(1).flatten(1, -3)


def samples(call: str, maps: Tensor) -> Tensor:
    """Maps as (N, entries) in float32 or float64."""
    if maps.ndim < 2:
        raise ValueError(f"{call}(maps of shape {tuple(maps.shape)}): needs (N, ...), samples first")
    return real(maps).flatten(1)


def same_shape(call: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        shapes = f"a of shape {tuple(a.shape)}, b of shape {tuple(b.shape)}"
        raise ValueError(f"{call}({shapes}): needs two batches of maps of one shape")


def same_pixels(call: str, inputs: Tensor, maps: Tensor) -> None:
    for name, values in (("inputs", inputs), ("maps", maps)):
        if not isinstance(values, Tensor):
            raise TypeError(f"{call}(): {name} must be a tensor, not {type(values).__name__}")
    given = f"{call}(inputs of shape {tuple(inputs.shape)}, maps of shape {tuple(maps.shape)})"
    if inputs.ndim < 3 or maps.ndim < 3 or len(inputs) != len(maps) or inputs.shape[-2:] != maps.shape[-2:]:
        raise ValueError(f"{given}: needs (N, H, W) or (N, C, H, W), with the same N, H and W")


def of_known(maps: Tensor, values: Tensor) -> Tensor:
    """`values`, (N, ...), with NaN for samples whose map has a NaN: its values have no order."""
    unknown = maps.flatten(1).isnan().any(1).to(values.device)
    return torch.where(unknown.reshape(-1, *[1] * (values.dim() - 1)), torch.nan, values)


def over_channels(pixels: Tensor, inputs: Tensor) -> Tensor:
    """One value for each pixel, N * H * W in all, in a shape that broadcasts to `inputs`."""
    return pixels.reshape(len(inputs), *[1] * (inputs.ndim - 3), *inputs.shape[-2:])


def ascending(values: Tensor) -> Tensor:
    """The rows of (N, n), sorted. On a CPU, numpy takes a fifth of torch's time."""
    if values.device.type != "cpu" or values.requires_grad:
        return values.sort(dim=1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=1))


def order(values: Tensor) -> Tensor:
    """The indices that sort the rows of (N, n), ties in any order. numpy takes half of torch's time."""
    if values.device.type != "cpu" or values.requires_grad:
        return values.argsort(dim=1)
    return torch.from_numpy(np.argsort(values.numpy(), axis=1))


def total(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1)


def ratio(part: Tensor, total: Tensor) -> Tensor:
    """part / total, and 0 where total is 0."""
    return part / torch.where(total == 0, 1, total)
