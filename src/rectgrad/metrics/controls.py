"""Control maps that do not depend on the network: a method that does not beat them explains nothing.

Each function takes inputs (N, C, H, W) or (N, H, W) and returns maps of their shape. The value of a pixel is
divided by the number of channels, so that the sum over channels is the value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rectgrad.metrics.checks import images, over_channels


def edges(inputs: Tensor) -> Tensor:
    """Strength of the edges: length of the Sobel gradient of the brightness; border pixels are repeated."""
    grey = F.pad(images("edges", inputs).mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    smooth, slope = grey.new_tensor([1, 2, 1]), grey.new_tensor([-1, 0, 1])
    down, right = slope[:, None] * smooth, smooth[:, None] * slope
    gradient = F.conv2d(grey, torch.stack([down, right])[:, None] / 8)
    return _shared(gradient.norm(dim=1), inputs)


def centre(inputs: Tensor, width: float = 0.25) -> Tensor:
    """A Gaussian at the centre of the image; its standard deviation is `width` times the side, in both
    directions."""
    rows, columns = ((torch.arange(size) + 0.5) / size - 0.5 for size in inputs.shape[-2:])
    bump = torch.exp(-(rows[:, None].square() + columns.square()) / (2 * width**2))
    return _shared(bump.to(images("centre", inputs)).expand(len(inputs), -1, -1), inputs)


def brightness(inputs: Tensor) -> Tensor:
    """The brightness of the photo, the mean over channels, minus that of its darkest pixel."""
    grey = images("brightness", inputs).mean(1)
    return _shared(grey - grey.amin((-2, -1), keepdim=True), inputs)


def _shared(pixels: Tensor, inputs: Tensor) -> Tensor:
    channels = max(inputs[0].numel() // pixels[0].numel(), 1) if len(inputs) else 1
    return (over_channels(pixels, inputs) / channels).expand(inputs.shape).to(inputs.dtype)
