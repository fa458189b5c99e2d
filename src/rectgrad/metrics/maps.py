"""Metrics of a single map: noise, sparsity and location."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rectgrad.metrics.checks import ascending, images, of_known, ratio, samples, total


def total_variation(maps: Tensor, normalize: bool = False) -> Tensor:
    """Anisotropic total variation, summed over channels.

    TV(m) = sum |m[c, y+1, x] - m[c, y, x]| + sum |m[c, y, x+1] - m[c, y, x]|

    `normalize` divides by sum |m|, so that maps of different scale are comparable; a zero map gives 0.
    """
    maps = images("total_variation", maps)
    variation = total(maps.diff(dim=-2).abs()) + total(maps.diff(dim=-1).abs())
    return ratio(variation, total(maps.abs())) if normalize else variation


def gini(maps: Tensor) -> Tensor:
    """Gini index of the n absolute values a_1 <= ... <= a_n of a map: 0 if all are equal, near 1 for one
    pixel.

    G = sum_i (2 i - n - 1) a_i / (n sum_i a_i)

    A zero map gives 0. Quantus' Sparseness divides by the largest value M of its batch and adds
    1e-7 to every entry, which makes it smaller by the factor 1 + 1e-7 n M / sum(a): by less than 1e-4
    if the mean of a is above M / 1000.
    """
    a = ascending(samples("gini", maps).abs())
    n = a.shape[1]
    weights = torch.arange(1 - n, n, 2, dtype=a.dtype, device=a.device)
    # dividing by n first keeps float32 sums small
    return ratio((weights / n * a).sum(1), a.sum(1))


def zero_share(maps: Tensor) -> Tensor:
    """Share of entries that are exactly zero, in [0, 1]."""
    maps = samples("zero_share", maps)
    return of_known(maps, (maps == 0).to(maps.dtype).mean(1))


def inside(maps: Tensor, mask: Tensor, share: bool = False) -> Tensor:
    """Attribution on the mask: sum of |map| where `mask` is True.

    `mask` is boolean, (H, W), (N, H, W) or (N, 1, H, W), and applies to every channel. Absolute values
    are used because positive and negative attribution would cancel; for positive attribution only, pass
    `maps.clamp(min=0)`. `share` divides by the sum of |map| over the whole map; a zero map has share 0.
    """
    within, without = _split(images("inside", maps), _mask("inside", maps, mask))
    return ratio(within, within + without) if share else within


def outside(maps: Tensor, mask: Tensor, share: bool = False) -> Tensor:
    """Attribution off the mask: `inside` of `~mask`. A zero map has share 0 outside as well as inside."""
    within, without = _split(images("outside", maps), _mask("outside", maps, mask))
    return ratio(without, within + without) if share else without


def in_box(maps: Tensor, box: Tensor | Sequence[int], share: bool = False) -> Tensor:
    """`inside` for a rectangle (top, left, height, width): one for all samples, or an (N, 4) tensor."""
    within, without = _split(images("in_box", maps), _box_mask(maps, box))
    return ratio(within, within + without) if share else within


def pointing_game(maps: Tensor, mask: Tensor, tolerance: float = 0) -> Tensor:
    """1 if the largest value of the channel-summed map is on the mask, else 0.

    `tolerance` also counts a peak at most that many pixels (Euclidean) from the mask. Of several largest
    values the first in reading order is the peak, so a constant map points at the upper left corner.
    """
    if not tolerance >= 0:
        raise ValueError(f"pointing_game(tolerance={tolerance}): needs a tolerance of 0 pixels or more")
    pixels, target = images("pointing_game", maps).sum(1), _mask("pointing_game", maps, mask)
    height, width = pixels.shape[-2:]
    peak = pixels.flatten(1).argmax(dim=1)[:, None, None]
    rows = torch.arange(height, device=maps.device)[:, None] - peak // width
    columns = torch.arange(width, device=maps.device) - peak % width
    near = rows**2 + columns**2 <= tolerance**2
    return of_known(maps, (near & target).flatten(1).any(dim=1).to(pixels.dtype))


def _mask(call: str, maps: Tensor, mask: Tensor) -> Tensor:
    """The mask as (N, H, W), on the maps' device."""
    n, height, width = len(maps), *maps.shape[-2:]
    fitting = [(height, width), (n, height, width), (n, 1, height, width)]
    if mask.dtype != torch.bool:
        raise ValueError(f"{call}(mask of type {mask.dtype}): needs a boolean mask, such as mask > 0")
    if tuple(mask.shape) not in fitting:
        shapes = f"maps of shape {tuple(maps.shape)}, mask of shape {tuple(mask.shape)}"
        raise ValueError(f"{call}({shapes}): needs a mask of shape {', '.join(map(str, fitting))}")
    mask = mask[:, 0] if mask.ndim == 4 else mask
    return mask.to(maps.device).expand(n, height, width)


def _box_mask(maps: Tensor, box: Tensor | Sequence[int]) -> Tensor:
    """(N, H, W), true inside the box of each sample."""
    boxes = _boxes(maps, torch.as_tensor(box, device=maps.device))
    top, left, tall, wide = boxes[:, :, None, None].unbind(1)
    rows = torch.arange(maps.shape[-2], device=maps.device)[:, None]
    columns = torch.arange(maps.shape[-1], device=maps.device)
    return (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)


def _boxes(maps: Tensor, box: Tensor) -> Tensor:
    """The box as (N, 4), each of at least one pixel and within its map."""
    n, height, width = len(maps), *maps.shape[-2:]
    call = f"in_box(maps of shape {tuple(maps.shape)}, box "
    if box.dtype.is_floating_point or box.dtype == torch.bool or tuple(box.shape) not in [(4,), (n, 4)]:
        given = f"of shape {tuple(box.shape)} and type {box.dtype}"
        raise ValueError(f"{call}{given}): needs integers (top, left, height, width), shape (4,) or ({n}, 4)")
    boxes = box.long().expand(n, 4)
    corners, sizes = boxes[:, :2], boxes[:, 2:]
    limits = torch.tensor([height, width], device=box.device)
    bad = ((corners < 0) | (sizes < 1) | (corners + sizes > limits)).any(dim=1)
    if bad.any():
        first = tuple(boxes[bad][0].tolist())
        raise ValueError(f"{call}{first}): needs (top, left, height, width) that stays within the map")
    return boxes


def _split(images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of |map| on and off the mask. Shares divide by their total, so rounding cannot push them above
    1."""
    pixels = images.abs().sum(1)
    return total(torch.where(mask, pixels, 0)), total(torch.where(mask, 0, pixels))
