"""Numbers that describe saliency maps: how noisy, how sparse, where, how alike, how faithful.

Pure functions on batches: the first dimension counts samples and every metric returns one value per sample.
Making maps, drawing them and averaging over a dataset live elsewhere.

A map is (N, H, W) or (N, C, H, W); any further dimensions between the first and the last two are channels
too. Metrics without a notion of place (`gini`, `zero_share`, `rank_correlation`) take any (N, ...). Half
types and integers are computed, and answered, in float32.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "area",
    "deletion",
    "gini",
    "in_box",
    "insertion",
    "inside",
    "outside",
    "pointing_game",
    "rank_correlation",
    "ssim",
    "total_variation",
    "zero_share",
]

SSIM_WINDOW = 7


# Noise and sparsity


def total_variation(maps: Tensor, normalize: bool = False) -> Tensor:
    """Anisotropic total variation, summed over channels.

    TV(m) = sum |m[c, y+1, x] - m[c, y, x]| + sum |m[c, y, x+1] - m[c, y, x]|

    `normalize` divides by sum |m|, so that maps of different scale compare; a zero map stays 0.
    """
    maps = _images("total_variation", maps)
    variation = _total(maps.diff(dim=-2).abs()) + _total(maps.diff(dim=-1).abs())
    return _ratio(variation, _total(maps.abs())) if normalize else variation


def gini(maps: Tensor) -> Tensor:
    """Gini index of the n absolute values a_1 <= ... <= a_n of a map: 0 all equal, towards 1 one pixel.

    G = sum_i (2 i - n - 1) a_i / (n sum_i a_i)

    A zero map is all equal: 0. Quantus' Sparseness divides by the largest value M of its batch and adds
    1e-7 to every entry, which makes it smaller by the factor 1 + 1e-7 n M / sum(a): by less than 1e-4
    wherever the mean of a is above M / 1000.
    """
    a = _samples("gini", maps).abs().sort(dim=1).values
    n = a.shape[1]
    weights = torch.arange(1 - n, n, 2, dtype=a.dtype, device=a.device)
    # dividing by n first keeps float32 sums small
    return _ratio((weights / n * a).sum(1), a.sum(1))


def zero_share(maps: Tensor) -> Tensor:
    """Share of entries that are exactly zero, in [0, 1]."""
    maps = _samples("zero_share", maps)
    return (maps == 0).to(maps.dtype).mean(1)


# Place


def inside(maps: Tensor, mask: Tensor, share: bool = False) -> Tensor:
    """Attribution on the mask: sum of |map| where `mask` is True.

    `mask` is boolean, (H, W), (N, H, W) or (N, 1, H, W), and holds for every channel. Absolute values,
    because positive and negative attribution would cancel; for positive attribution only, pass
    `maps.clamp(min=0)`. `share` divides by the sum of |map| over the whole map; a zero map has share 0.
    """
    within, without = _split(_images("inside", maps), _mask("inside", maps, mask))
    return _ratio(within, within + without) if share else within


def outside(maps: Tensor, mask: Tensor, share: bool = False) -> Tensor:
    """Attribution off the mask: `inside` of `~mask`. A zero map has share 0 outside as well as inside."""
    within, without = _split(_images("outside", maps), _mask("outside", maps, mask))
    return _ratio(without, within + without) if share else without


def in_box(maps: Tensor, box: Tensor | Sequence[int], share: bool = False) -> Tensor:
    """`inside` for a rectangle (top, left, height, width): one for all samples, or an (N, 4) tensor."""
    within, without = _split(_images("in_box", maps), _box_mask(maps, box))
    return _ratio(within, within + without) if share else within


def pointing_game(maps: Tensor, mask: Tensor, tolerance: float = 0) -> Tensor:
    """1 where the largest value of the channel-summed map lies on the mask, else 0.

    `tolerance` also counts a peak at most that many pixels (Euclidean) from the mask. Of several largest
    values the first in reading order is the peak, so a constant map points at the upper left corner.
    """
    if not tolerance >= 0:
        raise ValueError(f"pointing_game(tolerance={tolerance}): needs a tolerance of 0 pixels or more")
    pixels, target = _images("pointing_game", maps).sum(1), _mask("pointing_game", maps, mask)
    height, width = pixels.shape[-2:]
    peak = pixels.flatten(1).argmax(dim=1)[:, None, None]
    rows = torch.arange(height, device=maps.device)[:, None] - peak // width
    columns = torch.arange(width, device=maps.device) - peak % width
    near = rows**2 + columns**2 <= tolerance**2
    return (near & target).flatten(1).any(dim=1).to(pixels.dtype)


# Likeness of two maps


def rank_correlation(a: Tensor, b: Tensor, absolute: bool = False) -> Tensor:
    """Spearman's correlation over all entries of a sample: Pearson's correlation of their ranks.

    Tied entries share the mean of their ranks, as in scipy; `absolute` ranks |a| and |b|. A constant map
    has no order to compare, and gives NaN, as in scipy.
    """
    _same_shape("rank_correlation", a, b)
    a, b = _samples("rank_correlation", a), _samples("rank_correlation", b)
    x, y = (_centred_ranks(m.abs() if absolute else m) for m in (a, b))
    lengths = x.square().sum(1).sqrt() * y.square().sum(1).sqrt()
    return ((x * y).sum(1) / lengths).clamp(-1, 1)


def ssim(a: Tensor, b: Tensor, data_range: float | None = None) -> Tensor:
    """Structural similarity, mean over channels and all 7x7 windows that fit (skimage's defaults).

    S = (2 u_a u_b + C1) (2 v_ab + C2) / ((u_a^2 + u_b^2 + C1) (v_a + v_b + C2))

    with window means u, sample (co)variances v, C1 = (0.01 R)^2 and C2 = (0.03 R)^2. R is `data_range`, by
    default max - min over both maps of a sample and all channels. Equal maps give 1, constant ones too.
    """
    _same_shape("ssim", a, b)
    x, y = _images("ssim", a), _images("ssim", b)
    _check_ssim(x, data_range)
    R = _joint_range(x, y) if data_range is None else data_range
    # S does not change with scale; dividing by R keeps the squares of tiny maps from underflowing
    return _window_ssim(x / R, y / R).flatten(1).mean(1)


# Faithfulness


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
    """`insertion` the other way round: pixels of `baseline` replace those of `inputs`."""
    order = _pixel_order("deletion", inputs, maps)
    return _curve(model_score, inputs, _filled(baseline, inputs), order, steps, batch_size)


def area(curve: Tensor) -> Tensor:
    """Area under curves (N, K), K >= 2 equally spaced points over fractions 0 to 1, by trapezoids."""
    if curve.ndim < 1 or curve.shape[-1] < 2:
        raise ValueError(f"area(curve of shape {tuple(curve.shape)}): needs at least 2 points, (N, K >= 2)")
    return torch.trapezoid(_real(curve), dx=1 / (curve.shape[-1] - 1))


# Checks, and what several metrics share


def _real(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _images(call: str, maps: Tensor) -> Tensor:
    """Maps as (N, C, H, W), in a type to compute with."""
    if maps.ndim < 3:
        raise ValueError(f"{call}(maps of shape {tuple(maps.shape)}): needs (N, H, W) or (N, C, H, W)")
    return _real(maps).unsqueeze(1).flatten(1, -3)


def _samples(call: str, maps: Tensor) -> Tensor:
    """Maps as (N, entries), in a type to compute with."""
    if maps.ndim < 2:
        raise ValueError(f"{call}(maps of shape {tuple(maps.shape)}): needs (N, ...), samples first")
    return _real(maps).flatten(1)


def _same_shape(call: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        shapes = f"a of shape {tuple(a.shape)}, b of shape {tuple(b.shape)}"
        raise ValueError(f"{call}({shapes}): needs two batches of maps of one shape")


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
    """True, in (N, H, W), in each sample's box."""
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


def _total(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1)


def _ratio(part: Tensor, total: Tensor) -> Tensor:
    """part / total; 0 where there is nothing to share, since there `part` is 0 too."""
    return part / torch.where(total == 0, 1, total)


def _split(images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of |map| on and off the mask. A share is taken of their sum, so rounding never lifts it over 1."""
    pixels = images.abs().sum(1)
    return _total(torch.where(mask, pixels, 0)), _total(torch.where(mask, 0, pixels))


def _centred_ranks(values: Tensor) -> Tensor:
    """Twice (average rank - mean rank), per row.

    The 1-based average rank is (smaller + smaller_or_equal + 1) / 2 and its mean (n + 1) / 2, so the
    difference comes from counts alone, exactly.
    """
    ordered = values.detach().sort(dim=1).values
    smaller = torch.searchsorted(ordered, values.contiguous())
    smaller_or_equal = torch.searchsorted(ordered, values.contiguous(), right=True)
    ranks = (smaller + smaller_or_equal - values.shape[1]).to(values.dtype)
    return ranks.masked_fill(values.isnan(), torch.nan)


def _check_ssim(images: Tensor, data_range: float | None) -> None:
    height, width = images.shape[-2:]
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(f"ssim(maps of {height} by {width} pixels): needs {SSIM_WINDOW} or more each way")
    if data_range is not None and not data_range > 0:
        raise ValueError(f"ssim(data_range={data_range}): needs a positive number, or None")


def _joint_range(x: Tensor, y: Tensor) -> Tensor:
    """max - min over both maps of each sample, (N, 1, 1, 1)."""
    both = torch.cat([x.flatten(1), y.flatten(1)], dim=1)
    extent = both.amax(dim=1) - both.amin(dim=1)
    # equal constants have no range; over infinity both become 0, and alike
    return torch.where(extent == 0, torch.inf, extent)[:, None, None, None]


def _window_ssim(x: Tensor, y: Tensor) -> Tensor:
    """S of every window of (N, C, H, W) maps whose data range is 1."""

    def mean(values: Tensor) -> Tensor:
        return F.avg_pool2d(values, SSIM_WINDOW, stride=1)

    def covariance(p: Tensor, q: Tensor) -> Tensor:
        # about the image's mean, where E[pq] - E[p] E[q] cancels fewer digits
        p, q = (m - m.mean(dim=(-2, -1), keepdim=True) for m in (p, q))
        return samples / (samples - 1) * (mean(p * q) - mean(p) * mean(q))

    samples, C1, C2 = SSIM_WINDOW**2, 0.01**2, 0.03**2
    luminance = (2 * mean(x) * mean(y) + C1) / (mean(x) ** 2 + mean(y) ** 2 + C1)
    return luminance * (2 * covariance(x, y) + C2) / (covariance(x, x) + covariance(y, y) + C2)


def _pixel_order(call: str, inputs: Tensor, maps: Tensor) -> Tensor:
    """Place of each pixel in the order of importance, 0 first, in a shape that broadcasts to `inputs`."""
    given = f"{call}(inputs of shape {tuple(inputs.shape)}, maps of shape {tuple(maps.shape)})"
    if inputs.ndim < 3 or maps.ndim < 3 or len(inputs) != len(maps) or inputs.shape[-2:] != maps.shape[-2:]:
        raise ValueError(f"{given}: needs (N, H, W) or (N, C, H, W), with the same N, H and W")
    pixels = _images(call, maps).sum(1).flatten(1)
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
    """Scores, (N, steps + 1), on the way from `start` to `end`, pixel by pixel in the given order."""
    if steps < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"steps={steps}, batch_size={batch_size}: needs 1 or more (or batch_size=None)")
    pixels = order.shape[-2] * order.shape[-1]
    counts = [k * pixels // steps for k in range(steps + 1)]
    with torch.no_grad():
        columns = [_scores(model_score, torch.where(order < n, end, start), batch_size) for n in counts]
    return torch.stack(columns, dim=1)


def _scores(model_score: Callable[[Tensor], Tensor], images: Tensor, batch_size: int | None) -> Tensor:
    if len(images) == 0:  # many models cannot take an empty batch
        return _real(images.new_zeros(0))
    size = batch_size or len(images)
    return torch.cat([_score(model_score, images[i : i + size]) for i in range(0, len(images), size)])


def _score(model_score: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    scores = model_score(images)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if shape != (len(images),):
        given = f"images of shape {tuple(images.shape)} returned {shape}"
        raise ValueError(f"model_score({given}): needs one number per image, a tensor ({len(images)},)")
    return _real(scores)
