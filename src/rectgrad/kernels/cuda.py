"""Exact selection and the rectified rule on a CUDA device: one launch a layer, and no wait for the device.

The kernels are Triton's (triton_select.py), which comes with torch's CUDA builds and is imported at the first
call. What they have to know of a layer depends on shapes, strides and k alone and is planned once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectgrad.kernels.reference import Reference

# Chosen by measurement on an H200 (benchmarks/select_cuda.py); `_tile` and `_bounds` too.
SMALL = 16384  # units: a row of at most so many is one program's work
CHUNK = 8192  # units that a program reads at a time
PART = 7  # chunks that a job counts, at most: its counters have 8 bits
JOBS = 512  # rows are counted in smaller parts than that if fewer jobs would result
WARPS = 8
HEAD, WORDS = 32, 64  # of the workspace, as in triton_select.py

RULES = {"PR1": 1, "PR2": 2, "PR3": 3, "PR4": 4}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def available() -> bool:
    if not torch.cuda.is_available() or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


class Cuda(Reference):
    """The backend for an NVIDIA GPU: float32, float16 and bfloat16, and the reference for other types."""

    name = "triton"

    def smallest(self, score: Tensor, k: int) -> Tensor:
        usual = score.dtype is torch.float32 and score.numel() > 0
        return smallest(score.resolve_neg(), k) if usual else super().smallest(score, k)

    def rectify(
        self,
        a: Tensor,
        R: Tensor,
        rows: int,
        k: int | None,
        tau: float | None,
        rule: str,
        sums: list,
    ) -> Tensor:
        if a.dtype not in DTYPES or R.dtype not in DTYPES:
            return super().rectify(a, R, rows, k, tau, rule, sums)
        if a.is_neg() or R.is_neg():  # kernels read the memory as it is
            a, R = a.resolve_neg(), R.resolve_neg()
        if not (sums and _is_shared(sums[-1], a)):
            sums.append(torch.zeros(1, dtype=torch.float32, device=a.device))  # one number for all layers
        if k is None:
            assert tau is not None
            return rectify_constant(a, R, tau, rule, sums[-1])
        return rectify(a, R, rows, k, rule, sums[-1])


def _is_shared(total: object, a: Tensor) -> bool:
    """Whether this is the number that the layers on one device share."""
    return isinstance(total, Tensor) and total.dim() == 1 and total.get_device() == a.get_device()


def smallest(score: Tensor, k: int) -> Tensor:
    """The k-th smallest of each row of `score` (rows, d) in float32, counted from 1."""
    score = score.contiguous()
    tau = score.new_empty(score.shape[0])
    if tau.numel():
        _select(score, score, tau.numel(), k, "PR3", tau, None)
    return tau


def rectify(
    a: Tensor,
    R: Tensor,
    rows: int,
    k: int,
    rule: str = "PR1",
    seen: Tensor | None = None,
) -> Tensor:
    """R where a unit's score exceeds tau, the k-th smallest score of its row, else 0; laid out like a.

    The rows are the samples along the first dimension; with rows = 1 all of a is one sample. `seen`, one
    float32 number, becomes NaN where R is not finite.
    """
    return _select(a, R, rows, k, rule, None, seen) if a.numel() else R


def rectify_constant(
    a: Tensor,
    R: Tensor,
    tau: float,
    rule: str = "PR1",
    seen: Tensor | None = None,
) -> Tensor:
    """R where a unit's score exceeds the given tau, else 0; laid out like a."""
    if not a.numel():
        return R
    plan = _plan_constant(a.shape, a.stride(), R.stride(), a.dtype, R.dtype, rule)
    if plan is None:
        return rectify_constant(*_alike(a, R), tau, rule, seen)
    out = _empty(a, R)
    _launch(plan, (a, R, out, _nowhere(a.device) if seen is None else seen), (float(tau),))
    return out


def _select(
    a: Tensor,
    R: Tensor,
    rows: int,
    k: int,
    rule: str,
    tau: Tensor | None,
    seen: Tensor | None,
) -> Tensor:
    """Fills `tau` if it is given; otherwise returns the result of the rule."""
    plan = _plan(a.shape, a.stride(), R.stride(), a.dtype, R.dtype, rows, k, rule, tau is None)
    if plan is None:
        return _select(*_alike(a, R), rows, k, rule, tau, seen)
    out = _empty(a, R) if tau is None else tau
    _launch(plan, (a, R, out, _nowhere(a.device) if seen is None else seen))
    return out


def _empty(a: Tensor, R: Tensor) -> Tensor:
    return torch.empty_like(a) if a.dtype is R.dtype else torch.empty_like(a, dtype=R.dtype)


def _alike(a: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Both with contiguous rows, and R in the order of a."""
    a = a if _usual(a) else a.contiguous()
    return a, _empty(a, R).copy_(R)


def _usual(a: Tensor) -> bool:
    return a.is_contiguous() or (a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last))


@functools.cache
def _nowhere(device: torch.device) -> Tensor:
    """For callers that do not check whether R is finite."""
    return torch.zeros(1, device=device)


class Divisor(NamedTuple):
    """at // n is (at * magic >> 32) >> shift, for at < 2**31 and n > 1: to divide would take longer."""

    n: int
    magic: int
    shift: int


def divisor(n: int) -> Divisor:
    bits = (n - 1).bit_length()
    return Divisor(n, (1 << (31 + bits)) // n + 1, bits - 1) if n > 1 else Divisor(n, 0, 0)


class Runs(NamedTuple):
    """Where R keeps the units of a row, in the order in which a keeps them: runs of `inner` units that
    begin `outer` apart. (A slice of the channels of a channels-last tensor is such.)"""

    inner: int
    outer: int
    magic: int
    shift: int


@dataclass(slots=True)
class Plan:
    """A launch: everything but the tensors."""

    kernel: str
    programs: int
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    options: dict[str, int]
    candidates: int = 0  # places for them, in all rows
    words: int = 0
    compiled: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)
    arguments: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = (*self.numbers, *self.constants)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    strides_R: tuple[int, ...],
    dtype: torch.dtype,
    dtype_R: torch.dtype,
    rows: int,
    k: int,
    rule: str,
    rectifies: bool,
) -> Plan | None:
    """None if a or R must be copied to another layout first."""
    d = _units(shape, dtype, dtype_R, rows)
    if not 1 <= k <= d:
        raise ValueError(f"k is {k}; it can be 1 to {d}, the number of units in a row of {tuple(shape)}")
    layout = _layout(shape, strides, strides_R, rows)
    if layout is None:
        return None
    stride_R, runs, align = layout
    numbers = (stride_R, *(runs or Runs(1, 0, 0, 0)))
    constants = (RULES[rule], rectifies, runs is not None, align)
    if d <= SMALL:
        chunk = max(1024, 1 << (d - 1).bit_length())
        options = {"num_warps": max(4, chunk // 1024)}
        return Plan("select_small_rows", rows, (d, k, *numbers), (*constants, chunk), options)
    chunk, sample, registers = _tile(d)
    chunks = -(-d // chunk)
    parts = min(chunks, max(-(-chunks // PART), JOBS // rows))
    width, together = _bounds(k / d, d, sample)
    capacity = _capacity(width / sample, d)
    return Plan(
        "select_rows",
        rows * (1 + parts + (chunks if rectifies else 0)),
        (rows, d, k, parts, chunks, capacity, round(k / d * sample), width, together, *numbers),
        (*constants, chunk, sample, 32 * WARPS),
        {"num_warps": WARPS, "maxnreg": registers},
        rows * capacity,
        HEAD + rows * WORDS,
    )


@functools.lru_cache(maxsize=4096)
def _plan_constant(
    shape: torch.Size,
    strides: tuple[int, ...],
    strides_R: tuple[int, ...],
    dtype: torch.dtype,
    dtype_R: torch.dtype,
    rule: str,
) -> Plan | None:
    rows = 1 if math.prod(shape) < 2**30 else shape[0]
    d = _units(shape, dtype, dtype_R, rows)
    layout = _layout(shape, strides, strides_R, rows)
    if layout is None:
        return None
    stride_R, runs, align = layout
    chunks = -(-d // CHUNK)
    numbers = (d, chunks, stride_R, *(runs or Runs(1, 0, 0, 0)))
    constants = (RULES[rule], runs is not None, align, CHUNK)
    return Plan("rectify_rows", rows * chunks, numbers, constants, {"num_warps": WARPS})


def _units(shape: torch.Size, dtype: torch.dtype, dtype_R: torch.dtype, rows: int) -> int:
    """d, the number of units in a row."""
    if dtype not in DTYPES or dtype_R not in DTYPES:
        raise TypeError(f"a is {dtype} and R is {dtype_R}; each can be float32, float16 or bfloat16")
    if rows != 1 and (not shape or rows != shape[0]):
        raise ValueError(
            f"{rows} rows of a tensor of shape {tuple(shape)}; it can be 1 or the first dimension"
        )
    d = math.prod(shape) // rows
    if d > 2**30:
        raise ValueError(f"a row of {d} units; it can have {2**30}")
    return d


def _tile(d: int) -> tuple[int, int, int]:
    """(units read at a time, units of the sample, registers of a thread). With fewer more programs run
    at a time, which pays where a row is little work."""
    return (4096, 2048, 64) if d < 2**16 else (CHUNK, 4096, 128)


def _bounds(p: float, d: int, sample: int) -> tuple[int, int]:
    """How a sample bounds the p-quantile of d units: (ranks from its own p-quantile to either bound, how many
    neighbours it takes together, as a power of two).

    Reading single units of a row that is not large would read most of the memory. But neighbours are similar:
    in the layers of EfficientNet-Lite0 and of a random Inception V4 the rank of tau in a sample of 8
    neighbours had up to 1.43 times the standard deviation of independent units, of 4 up to 1.16 times. The
    bounds allow for more than that. If they still miss tau, a slower search finds it.
    """
    sigmas, together = (8.0, 3) if d < 2**17 else (6.5, 2)
    return math.ceil(sigmas * math.sqrt(sample * p * (1 - p))) + 3, together


def _capacity(share: float, d: int) -> int:
    """Places for the candidates of a row: half as many again as are expected at most, 3 * share of it."""
    return min(d, 1024 + math.ceil(4.5 * share * d))


def _layout(
    shape: torch.Size, strides: tuple[int, ...], strides_R: tuple[int, ...], rows: int
) -> tuple[int, Runs | None, int] | None:
    """The layout of R relative to a: (stride between rows, runs of a strided row, common divisor)."""
    inside = range(len(shape)) if rows == 1 else range(1, len(shape))
    order = sorted((i for i in inside if shape[i] != 1), key=lambda i: strides[i])
    dense, runs = 1, [(1, 1)]  # (units, stride), the innermost first
    for i in order:
        if strides[i] != dense:
            return None
        dense *= shape[i]
        units, stride = runs[-1]
        if strides_R[i] == units * stride:
            runs[-1] = (units * shape[i], stride)
        else:
            runs.append((shape[i], strides_R[i]))
    if rows > 1 and strides[0] != dense:
        return None
    stride_R = strides_R[0] if rows > 1 else 0
    if len(runs) == 1:
        return stride_R, None, _align(dense, stride_R)
    (inner, _), (times, outer) = runs[0], runs[1]
    if len(runs) > 2 or inner < 2 or times * outer >= 2**31:
        return None
    _, magic, shift = divisor(inner)
    return stride_R, Runs(inner, outer, magic, shift), _align(dense, stride_R, inner, outer)


def _align(*numbers: int) -> int:
    """Neighbours that can be read at once: 16 if that divides all the numbers."""
    return 16 if all(n % 16 == 0 for n in numbers) else 1


@functools.cache
def _kernels() -> ModuleType:
    from rectgrad.kernels import triton_select

    return triton_select


def _launch(plan: Plan, tensors: tuple[Tensor, ...], leading: tuple[float, ...] = ()) -> None:
    """Runs the planned kernel on the current stream.

    Triton's lookup of a compiled kernel takes longer than the launch. So the plan remembers the kernel, for
    what Triton compiles it anew for: the device and the alignment of a and R (the others are always aligned).
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(plan, tensors, leading)
    stream = _stream(device)
    if plan.words:
        tensors += _scratch(plan, tensors[0].device, stream)
    pointers = [tensor.data_ptr() for tensor in tensors]
    key = (device, pointers[0] % 16, pointers[1] % 16)
    arguments = leading + plan.arguments
    compiled = plan.compiled.get(key)
    if compiled is not None:
        run, function, metadata = compiled
        run(plan.programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *arguments)
        return None
    kernel = getattr(_kernels(), plan.kernel)[plan.programs, 1, 1](*tensors, *arguments, **plan.options)
    if kernel is not None:  # Triton's interpreter compiles nothing
        plan.compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)
    return None


def _stream(device: int) -> int:
    """The current stream's handle; 0 on a CPU."""
    return _current_stream()(device) if device >= 0 else 0


@functools.cache
def _current_stream() -> Callable[[int], int]:
    from triton.runtime import driver  # type: ignore[import-not-found,import-untyped,unused-ignore]

    found: Callable[[int], int] = driver.active.get_current_stream
    return found


@dataclass(slots=True)
class Scratch:
    """Buffers that the kernels of one stream share."""

    candidates: Tensor
    words: deque[Tensor]


_scratches: dict[tuple[torch.device, int], Scratch] = {}


class _OfGraph(threading.local):
    scratch: Scratch | None = None


_of_graph = _OfGraph()


@contextlib.contextmanager
def one_scratch() -> Iterator[None]:
    """Within the context, all kernels of one graph share their buffers."""
    _of_graph.scratch = Scratch(torch.empty(0), deque())
    try:
        yield
    finally:
        _of_graph.scratch = None


def _scratch(plan: Plan, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Places for the candidates, and zeros to count in.

    Kernels of one stream run in order, so they can share the places, and zeros can be made for many calls at
    once. A captured graph may be replayed on any stream: it has its own.
    """
    scratch = _of_graph.scratch
    if scratch is None:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return _places(plan, device), torch.zeros(plan.words, dtype=torch.int32, device=device)
        scratch = _scratches.get((device, stream))
    if scratch is None:
        scratch = _scratches[device, stream] = Scratch(_places(plan, device), deque())
    candidates = scratch.candidates
    if candidates.numel() < plan.candidates:
        candidates = scratch.candidates = _places(plan, device)
    try:
        words = scratch.words.popleft()
        if words.numel() >= plan.words:
            return candidates, words
    except IndexError:
        pass
    zeros = torch.zeros(64, plan.words, dtype=torch.int32, device=device).unbind()
    scratch.words = deque(zeros[1:])
    return candidates, zeros[0]


def _places(plan: Plan, device: torch.device) -> Tensor:
    return torch.empty(plan.candidates, dtype=torch.float32, device=device)
