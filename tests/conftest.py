"""Without a GPU, Triton's kernels are run by its interpreter. It must know before anything imports Triton, as
torch's optimisers do."""

import gc
import importlib.util
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import pytest
import torch

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A background job of a shell ignores Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected here is garbage: a third of the time went into looking for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def no_kernel_in_the_interpreter_of_triton_3_0() -> Iterator[None]:
    """With Triton 3.0, which comes with torch 2.4, a test is skipped when it launches a kernel."""
    if not INTERPRETED or not torch.__version__.startswith("2.4."):
        yield
        return
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    def launch(*_: Any) -> NoReturn:
        pytest.skip(
            "Triton 3.0's interpreter knows no float64, one-bit integers or NumPy 2: no kernel is run"
        )

    with pytest.MonkeyPatch.context() as patch:
        if triton.__version__.startswith("3.0."):
            patch.setattr(InterpretedFunction, "__getitem__", launch)
        yield
