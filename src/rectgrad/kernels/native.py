"""The native kernels (native/*.c) as Python functions: float32 on the CPU. Optional: `load` gives None where
they were not built."""

from __future__ import annotations

import ctypes
import functools
import warnings
import zlib
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectgrad.kernels.portable import Portable
from rectgrad.kernels.sparse import Sparse

FOLDER = Path(__file__).parent
LEVELS = ("base", "avx2", "avx512")  # instruction sets, each a library of its own; see build_native.py
RULES = {"PR1": 0, "PR2": 1, "PR3": 2, "PR4": 3}
DENSEST = 0.25  # if more than this share of units passed, a dense convolution is faster


class _Survivors(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("units", c_int64),
        ("count", POINTER(c_int64)),
        ("position", POINTER(POINTER(c_int32))),
        ("value", POINTER(POINTER(c_float))),
        ("tau", POINTER(c_float)),
    )


class _Scores(Structure):
    _fields_ = (
        ("a", c_void_p),
        ("r", c_void_p),
        ("rows", c_int64),
        ("units", c_int64),
        ("a_stride", c_int64),
        ("r_stride", c_int64),
        ("rule", c_int32),
    )


class Convolution(Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in "samples channels_in height width channels_out out_height out_width kernel_y kernel_x "
        "stride_y stride_x padding_y padding_x dilation_y dilation_x groups "
        "first_y last_y first_x last_x".split()
    )


class Pooling(Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in "planes height width out_height out_width kernel_y kernel_x stride_y stride_x "
        "padding_y padding_x padded".split()
    )


class _Shares(Structure):
    _fields_ = (
        *((name, c_void_p) for name in "c z part scale shift offset".split()),
        *((name, c_float) for name in "epsilon factor sign gamma biased".split()),
        *((name, c_int64) for name in ("planes", "channels", "each")),
    )


class Library(NamedTuple):
    level: str
    functions: ctypes.CDLL


@functools.cache
def load() -> Library | None:
    """The library for the instruction set of this processor; None if there is none."""
    level = _level()
    while level >= 0 and _is_current():
        path = FOLDER / f"_native_{LEVELS[level]}.so"
        if path.exists():
            return Library(LEVELS[level], _declared(ctypes.CDLL(str(path))))
        level -= 1
    return None


def _level() -> int:
    base = FOLDER / "_native_base.so"
    return int(ctypes.CDLL(str(base)).rg_level()) if base.exists() else -1


def _is_current() -> bool:
    """Whether the libraries were built from the sources beside them. Others may take other arguments."""
    sources = sorted((FOLDER / "native").glob("*.[ch]"))
    built = getattr(ctypes.CDLL(str(FOLDER / "_native_base.so")), "rg_sources", lambda: 0)()
    if not sources or built & 0xFFFFFFFF == zlib.crc32(b"".join(path.read_bytes() for path in sources)):
        return True
    warnings.warn(
        "the native kernels were built from other sources and are not used; install rectgrad again: "
        "pip install -e .",
        stacklevel=2,
    )
    return False


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.rg_select.restype = POINTER(_Survivors)
    lib.rg_select.argtypes = [POINTER(_Scores), c_int64, c_float, c_double, POINTER(c_double), c_int]
    lib.rg_use_capsules.argtypes = [c_void_p]
    lib.rg_use_capsules(ctypes.cast(ctypes.pythonapi.PyCapsule_GetPointer, c_void_p))
    lib.rg_masked.argtypes = [POINTER(_Survivors), POINTER(_Scores), c_void_p, c_int]
    lib.rg_conv.argtypes = [POINTER(_Survivors), POINTER(Convolution), c_void_p, c_void_p, c_void_p, c_int]
    lib.rg_linear.argtypes = [POINTER(_Survivors), c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int]
    lib.rg_avg_pool.argtypes = [POINTER(Pooling), c_void_p, c_void_p, c_int]
    lib.rg_scale.argtypes = [c_void_p, c_void_p, c_double, c_int64, c_void_p]
    lib.rg_scaled.argtypes = [
        *(c_void_p, c_void_p, c_void_p, c_double, c_int64, c_int64, c_int64, c_void_p, c_int)
    ]
    lib.rg_share.argtypes = [POINTER(_Shares), c_void_p, c_void_p, c_int]
    lib.rg_stabilised.argtypes = [c_void_p, c_void_p, c_float, c_int64, c_void_p, c_int]
    lib.rg_use_pool.argtypes = [c_void_p]
    lib.rg_use_pool(_pool())
    return lib


def _pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch brought along."""
    for path in _openmp():
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _openmp() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return []
    return sorted({word for word in maps if word.startswith("/") and _is_openmp(Path(word).name)})


def _is_openmp(name: str) -> bool:
    return name.startswith(("libgomp", "libiomp5", "libomp")) and ".so" in name


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [c_void_p, c_void_p, c_void_p]


class Lists:
    """The units of one layer that passed, in memory of the native library.

    A capsule frees them: a `__del__` in Python could swallow an interrupt that arrives while it runs.
    """

    __slots__ = ("_owner", "counts", "library", "pointer")

    def __init__(self, library: Library, pointer: Any) -> None:
        release = ctypes.cast(library.functions.rg_release, c_void_p)
        self._owner = _capsule(ctypes.cast(pointer, c_void_p), None, release)
        self.library, self.pointer = library, pointer
        content = pointer[0]
        # Units that passed in each row; -1 if they are too many for a list.
        self.counts: list[int] = content.count[: content.rows]

    @property
    def tau(self) -> list[float]:
        content = self.pointer.contents
        return list(content.tau[: content.rows])

    def dense(self, shape: torch.Size) -> Tensor:
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        self.library.functions.rg_masked(self.pointer, None, out.data_ptr(), torch.get_num_threads())
        return out


def _select(
    library: Library, scores: _Scores, rank: int, tau: float, densest: float, seen: list | None
) -> Lists | None:
    total = c_double()
    threads = torch.get_num_threads()
    pointer = library.functions.rg_select(byref(scores), rank, tau, densest, byref(total), threads)
    if not pointer:
        return None
    if seen is not None:
        seen.append(total.value)
    return Lists(library, pointer)


def smallest(library: Library, score: Tensor, k: int) -> Tensor | None:
    """The k-th smallest of each row, counted from 1."""
    score = score.detach().contiguous().resolve_neg()
    rows, units = score.shape
    scores = _Scores(None, score.data_ptr(), rows, units, units, units, RULES["PR4"])
    lists = _select(library, scores, units - k, 0.0, 0.0, None)
    return None if lists is None else torch.tensor(lists.tau, dtype=torch.float32, device="cpu")


class Native(Portable):
    """The backend for a CPU with the native library: float32, and the portable one for other types."""

    def __init__(self, library: Library) -> None:
        self.library, self.name = library, f"native {library.level}"

    def smallest(self, score: Tensor, k: int) -> Tensor:
        if score.dtype is not torch.float32 or not score.numel():
            return super().smallest(score, k)
        found = smallest(self.library, score, k)
        return super().smallest(score, k) if found is None else found

    def rectify(
        self,
        a: Tensor,
        R: Tensor,
        rows: int,
        k: int | None,
        tau: float | None,
        rule: str,
        sums: list,
    ) -> Any:
        """A `Sparse`, if few units passed in every row."""
        if a.dtype is torch.float32 and R.dtype is torch.float32:
            found = rectify(self.library, a, R, rows, k, tau, rule, sums)
            if found is not None:
                return found
        return super().rectify(a, R, rows, k, tau, rule, sums)


def rectify(
    library: Library,
    a: Tensor,
    R: Tensor,
    rows: int,
    k: int | None,
    tau: float | None,
    rule: str,
    sums: list | None,
) -> Tensor | Sparse | None:
    turned = not a.is_contiguous() and a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last)
    if turned:
        a, R = a.permute(0, 2, 3, 1), R.permute(0, 2, 3, 1)
    a = a.contiguous().resolve_neg()
    if rows == 1 or not R[0].is_contiguous():
        R = R.contiguous()
    R = R.resolve_neg()
    units = a.numel() // rows
    step = R.stride(0) if rows > 1 else units
    scores = _Scores(a.data_ptr(), R.data_ptr(), rows, units, units, step, RULES[rule])
    rank = -1 if k is None else units - k
    lists = _select(library, scores, rank, 0.0 if tau is None else tau, DENSEST, sums)
    if lists is None:
        return None
    if not turned and rows == len(a) and min(lists.counts) >= 0:
        return Sparse(lists, a.shape)
    out = torch.empty_like(a)
    library.functions.rg_masked(lists.pointer, byref(scores), out.data_ptr(), torch.get_num_threads())
    return out.permute(0, 3, 1, 2) if turned else out


def scale(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight / sqrt(variance + eps), the factor of a batch norm."""
    library = load()
    assert library is not None
    out = torch.empty_like(variance)
    given = None if weight is None else weight.data_ptr()
    library.functions.rg_scale(variance.data_ptr(), given, eps, len(variance), out.data_ptr())
    return out


def scaled(R: Tensor, variance: Tensor, factor: Tensor | None, eps: float) -> Tensor:
    """R / sqrt(variance + eps) * factor, one of each a channel, in one pass and rounded as torch does it."""
    library = load()
    assert library is not None
    out = torch.empty_like(R)
    channels = len(variance)
    planes = len(R) * channels
    each = R.numel() // planes if planes else 0
    given = None if factor is None else factor.data_ptr()
    library.functions.rg_scaled(
        *(R.data_ptr(), variance.data_ptr(), given, eps, planes, channels, each),
        *(out.data_ptr(), torch.get_num_threads()),
    )
    return out


def conv(passed: Sparse, c: Any, weight: Tensor, out: Tensor) -> bool:
    """The gradient at a convolution's input into `out`, for the samples that have lists."""
    lists, scale = passed.lists, passed.scale
    scale = None if scale is None else scale.contiguous()
    status = lists.library.functions.rg_conv(
        lists.pointer,
        byref(c),
        weight.data_ptr(),
        None if scale is None else scale.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return bool(status == 0)


def linear(passed: Sparse, weight: Tensor, out: Tensor) -> None:
    """The gradient at a linear layer's input into `out`."""
    lists = passed.lists
    outputs, inputs = weight.shape
    positions = lists.pointer.contents.units // outputs
    lists.library.functions.rg_linear(
        lists.pointer, positions, inputs, outputs, weight.data_ptr(), out.data_ptr(), torch.get_num_threads()
    )


def avg_pool(p: Pooling, R: Tensor, out: Tensor) -> bool:
    """The gradient at an average pooling's input into `out`."""
    library, R = load(), R.contiguous().resolve_neg()  # which must live until the kernel has read it
    assert library is not None
    status = library.functions.rg_avg_pool(byref(p), R.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return bool(status == 0)


def share(
    units: tuple[Tensor, ...],
    epsilon: float,
    factor: float = 1.0,
    sign: float = 1.0,
    gamma: float = 0.0,
    biased: bool = True,
    mixed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """How units share relevance: see rg_share. units: c, z and part, (N, C, ...), and scale, shift and offset
    of each channel. mixed: the second result is what the positive weights get."""
    library, c, units = load(), units[0], tuple([x.contiguous() for x in units])
    assert library is not None
    out, favoured = torch.empty_like(c), torch.empty_like(c) if mixed else None
    channels = c.shape[1]
    planes = len(c) * channels
    numbers = *(x.data_ptr() for x in units), epsilon, factor, sign, gamma, biased
    given = _Shares(*numbers, planes, channels, c.numel() // planes if planes else 0)
    second = None if favoured is None else favoured.data_ptr()
    library.functions.rg_share(byref(given), out.data_ptr(), second, torch.get_num_threads())
    return out, favoured


def stabilised(c: Tensor, z: Tensor, epsilon: float) -> Tensor:
    """c * |z| / (|z| + epsilon)"""
    library = load()
    assert library is not None
    out = torch.empty_like(c)
    threads = torch.get_num_threads()
    library.functions.rg_stabilised(c.data_ptr(), z.data_ptr(), epsilon, c.numel(), out.data_ptr(), threads)
    return out
