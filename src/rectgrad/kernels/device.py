"""Differences between devices besides kernels: memory, random state, rounding, CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectgrad.kernels.linear_ops import constants
from rectgrad.kernels.reference import wide

# Bytes of activations in one pass, and rows. On a CPU, larger passes are slower: tensors no longer fit in the
# caches, and new memory costs more than the calls that are saved. Activations that are not recorded are not
# counted. If memory runs out for that reason, a GPU raises an error, but a CPU may not.
BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
# Bytes of the largest activation in a forward pass that keeps none. On a CPU, larger blocks are new memory
# each time: EfficientNet-Lite0 takes 32 ms per image with 6 images, 39 ms with 8 and 82 ms with 64.
LARGEST = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
ROWS = {"cpu": 64, "cuda": 1024}


def limits(device: torch.device, kept: bool = True) -> tuple[int, int]:
    """The maximum bytes of activations and number of rows for one pass. kept: of all activations; otherwise
    of the largest one, about four of which exist at a time."""
    most, rows = (each.get(device.type, each["cpu"]) for each in (BYTES if kept else LARGEST, ROWS))
    if device.type == "cuda":  # half of the memory that is free or unused by torch
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        most = min(most, (torch.cuda.mem_get_info(device)[0] + unused) // (2 if kept else 8))
    return most, rows


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, for which torch has several messages."""
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    ways = ("out of memory", "allocate memory", "not enough memory", "insufficient memory")
    return known or any(words in str(error).lower() for words in ways)


def free_unused_memory() -> None:
    """Return unused memory that torch holds to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rounding(x: Tensor) -> float:
    """The rounding error of numbers near 1. On a GPU, float32 convolutions use TF32 by default."""
    return 2**-10 if x.is_cuda and x.dtype == torch.float32 else torch.finfo(x.dtype).eps


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = wide(a), wide(b)
    scale = a.abs().max()
    if not bool(scale > 0):
        return bool((b == a).all())
    a, b = a / scale, b / scale  # squares of very small or large numbers underflow or overflow
    return bool((a - b).norm() <= tolerance * a.norm())


def agree(alone: Sequence[Tensor], together: Sequence[Tensor]) -> bool:
    """Whether the outputs and the maps of one copy agree. Outputs are compared up to rounding; maps in the
    mean, because rounding may move a unit across a threshold. Outputs alone would not suffice: saturated ones
    hardly change."""
    eps = max(map(rounding, alone))
    (outputs, other), *maps = zip(alone, together, strict=True)
    return _near(outputs, other, eps**0.5) and all(_near(a, b, eps**0.25) for a, b in maps)


def largest_difference(maps: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the expected maps' largest value."""
    scales = [b.abs().max().clamp(min=torch.finfo(b.dtype).tiny) for b in expected]
    return max(float((a - b).abs().max() / s) for a, b, s in zip(maps, expected, scales, strict=True))


def not_finite(tensors: Sequence[Tensor], sums: list[Tensor | float]) -> Tensor:
    """Which of these are not finite, by their sums, on the device."""
    values = [x.sum(dtype=torch.float32 if x.element_size() < 4 else None) for x in tensors]
    values += [s.abs() if s.is_complex() else s for s in sums if isinstance(s, Tensor)]
    dtype = torch.float64 if any(s.dtype is torch.float64 for s in values) else torch.float32
    device = tensors[-1].device
    wrong = ~torch.stack([s.reshape(()).to(device, dtype) for s in values]).isfinite()
    numbers = all(math.isfinite(s) for s in sums if not isinstance(s, Tensor))
    return wrong if numbers else torch.ones_like(wrong)


def is_capturing(device: torch.device) -> bool:
    """Whether kernels are being captured into a graph, which must not synchronise."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def moved(index: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on another device, without synchronisation."""
    pinned = index.pin_memory() if device.type == "cuda" and index.is_cpu else index
    return pinned.to(device, non_blocking=True)


def random_state(device: torch.device) -> list[tuple[Callable[[Any], Any], Any]]:
    """The random state of torch, Python, numpy and, last, a GPU, as pairs (function that sets it, state)."""
    states: list[Any] = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    states.append((np.random.set_state, np.random.get_state(legacy=False)))
    if device.type == "cuda":  # a seed and an offset, which is faster than the whole state
        generator = torch.cuda.default_generators[device.index]
        states.append((generator.manual_seed, generator.initial_seed()))
        states.append((generator.set_offset, generator.get_offset()))
    return states


def restore_random_state(states: list[tuple[Callable[[Any], Any], Any]], device: torch.device) -> None:
    """Restores the states; not that of a GPU while kernels are captured."""
    for write, state in states[: 3 if is_capturing(device) else None]:
        write(state)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures on a device. One is enough: torch keeps workspaces for every stream."""
    return torch.cuda.Stream(device)


def has_graphs(device: torch.device) -> bool:
    """Whether kernels on a device can be captured into a `Graph`."""
    return device.type == "cuda"


class Graph:
    """The kernels that `work` launches, as one CUDA graph. places: the tensors that it reads. `result` is
    what it returned; its tensors hold the values of the last replay."""

    def __init__(self, work: Callable[[], Any], places: tuple[Tensor, ...]) -> None:
        from rectgrad.kernels.cuda import one_scratch

        self._places, device = places, places[0].device
        current, stream = torch.cuda.current_stream(device), _stream(device)
        stream.wait_stream(current)
        self._graph = graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):  # compiles and selects kernels, makes constants
                work()
            self._constants = tuple(constants.values())  # which the graph reads
            torch.cuda.synchronize(device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                with one_scratch():
                    self.result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the cause is reported, not that the graph is empty
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)
        self._last = current

    def replay(self, values: tuple[Tensor | int, ...]) -> Any:
        """`result` for other values of the places."""
        stream = torch.cuda.current_stream(self._places[0].device)
        if self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        with torch.no_grad():
            for place, value in zip(self._places, values, strict=True):
                place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
            self._graph.replay()
        return self.result
