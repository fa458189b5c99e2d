"""The native libraries that this processor can run, one for each instruction set."""

import ctypes
import functools

import pytest

from rectgrad.kernels import native

LIBRARY = native.load()
WHY = "NO NATIVE KERNELS were built (no C compiler?): the fast CPU code is not tested here"
needs_native = pytest.mark.skipif(LIBRARY is None, reason=WHY)
LEVELS = native.LEVELS[: native.LEVELS.index(LIBRARY.level) + 1] if LIBRARY is not None else ()


@functools.cache
def library(level):
    path = native.FOLDER / f"_native_{level}.so"
    return native.Library(level, native._declared(ctypes.CDLL(str(path))))


def close(fast, slow):
    assert fast.shape == slow.shape
    assert (fast - slow).abs().max() <= 1e-5 * slow.abs().max() + 1e-30
