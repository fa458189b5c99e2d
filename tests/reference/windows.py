"""Windows of convolutions and poolings: the padding trick, and proportional redistribution (PRR)."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from reference.graph import SPATIAL, Run, family

Pair = tuple[int, int]


def outer(axes: Sequence[Iterable]) -> list[tuple]:
    return list(itertools.product(*axes))


def inside(length: int, kernel: int, stride: int, padding: Pair, dilation: int) -> list[bool]:
    """For each window along one axis: does it touch the image only?"""
    left, right = padding
    kept, start = [], -left
    while start + dilation * (kernel - 1) < length + right:
        taps = [start + dilation * t for t in range(kernel)]
        kept.append(all(0 <= tap < length for tap in taps))
        start += stride
    return kept


def padding_mask(
    lengths: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Pair],
    dilation: Sequence[int],
    extra: Sequence[Pair] | None = None,
) -> Tensor:
    """1 at the output positions of a convolution whose window stays inside the image, 0 at the others.

    `lengths` are those of the image before any padding, `extra` is the zero padding of a separate F.pad;
    both and `padding` go axis by axis as (before, after). Where no position would be left, all are.
    """
    extra = extra or [(0, 0)] * len(lengths)
    both = [(p[0] + e[0], p[1] + e[1]) for p, e in zip(padding, extra, strict=True)]
    axes = [inside(*axis) for axis in zip(lengths, kernel, stride, both, dilation, strict=True)]
    kept = [all(position) for position in outer(axes)]
    mask = torch.tensor(kept, dtype=torch.float64).reshape([len(axis) for axis in axes])
    return mask if any(kept) else torch.ones_like(mask)


Windows = list[list[list[int]]]  # axis, output position, the real input positions it covers


def pool_windows(
    lengths: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Windows:
    """What each output position of a pooling covers; ceil mode shows in `out` alone."""
    windows = []
    for length, size, k, s, p, d in zip(lengths, out, kernel, stride, padding, dilation, strict=True):
        taps = [[o * s - p + d * t for t in range(k)] for o in range(size)]
        windows.append([[tap for tap in window if 0 <= tap < length] for window in taps])
    return windows


def adaptive_windows(lengths: Sequence[int], out: Sequence[int]) -> Windows:
    """Output o of n covers floor(o * length / n) up to, not including, ceil((o + 1) * length / n)."""
    return [
        [list(range(o * length // n, -(-(o + 1) * length // n))) for o in range(n)]
        for length, n in zip(lengths, out, strict=True)
    ]


def each_window(x: Tensor, R: Tensor, windows: Windows) -> Iterable[tuple[tuple, list[tuple]]]:
    """(output index, input indices) of every window of every channel and leading dimension."""
    leading = [range(n) for n in x.shape[: x.ndim - len(windows)]]
    for channel in outer(leading):
        for position in outer([range(len(axis)) for axis in windows]):
            covered = [axis[o] for axis, o in zip(windows, position, strict=True)]
            yield channel + position, [channel + place for place in outer(covered)]


def prr_max_pool(x: Tensor, R: Tensor, windows: Windows) -> Tensor:
    """R * input / (sum of the window + count * 1e-10); the plain arg-max where that sum is negative."""
    shares = torch.zeros_like(x)
    for target, places in each_window(x, R, windows):
        values = [x[place].item() for place in places]
        total = sum(values)
        if total < 0:
            shares[places[values.index(max(values))]] += R[target]
            continue
        for place, value in zip(places, values, strict=True):
            shares[place] += R[target] * value / (total + len(places) * 1e-10)
    return shares


# --- the rules at the nodes of a network -------------------------------------------------------------------


def tuple_of(value: Any, n: int) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * n


def windows_of(record: Run, node: fx.Node) -> Windows:
    """The windows of a max-pooling node."""
    n = SPATIAL[node.target.__name__[-2:]]
    lengths, out = record.values[node.args[0]].shape[-n:], record.values[node].shape[-n:]
    if family(node) == "adaptive_max_pool":
        return adaptive_windows(lengths, out)

    def regular(kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        settings = (kernel_size, stride or kernel_size, padding, dilation)
        return pool_windows(lengths, out, *(tuple_of(setting, n) for setting in settings))

    return regular(*node.args[1:], **node.kwargs)


def zero_pad_before(node: fx.Node, n: int) -> list[Pair]:
    """(before, after) for each of the n convolved axes, from a zero F.pad that feeds a convolution."""
    pad = node.args[0]
    if family(pad) != "pad":
        return [(0, 0)] * n

    def pairs(input, pad, mode="constant", value=None):
        amounts = list(pad) + [0] * (2 * n)
        if mode != "constant" or value:
            return [(0, 0)] * n
        return [(max(amounts[2 * i], 0), max(amounts[2 * i + 1], 0)) for i in reversed(range(n))]

    return pairs(*pad.args, **pad.kwargs)


def mask_of(record: Run, node: fx.Node) -> Tensor:
    """The padding trick's mask of a convolution node."""
    n = SPATIAL[node.target.__name__[-2:]]

    def settings(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        kernel, dilation = tuple(weight.shape[-n:]), tuple_of(dilation, n)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        same = [(r // 2, r - r // 2) for r in reach]
        own = same if padding == "same" else [(0, 0)] * n if padding == "valid" else None
        own = own or [(p, p) for p in tuple_of(padding, n)]
        extra = zero_pad_before(node, n)
        lengths = [length - sum(e) for length, e in zip(input.shape[-n:], extra, strict=True)]
        return padding_mask(lengths, kernel, tuple_of(stride, n), own, dilation, extra)

    return settings(*record.value(node.args), **record.value(node.kwargs))
