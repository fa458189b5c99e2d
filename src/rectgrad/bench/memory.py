"""Peak memory of one call.

On CUDA this is the memory that torch allocated, on a CPU the resident set. Linux records its peak and lets us
reset it; elsewhere a fresh process runs the call and reports its peak.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rectgrad.bench.plan import Plan

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CHILD = "import sys; from rectgrad.bench.memory import child; child(*sys.argv[1:])"


class Peak(NamedTuple):
    """Bytes before the call, with network and images loaded, and the maximum during the call."""

    before: int
    most: int

    @property
    def growth(self) -> int:
        return self.most - self.before


def peak(run: Callable[[], Any], plan: Plan, model: str, name: str) -> Peak | None:
    """The peak memory of a contender; None if it cannot be measured."""
    kind = torch.device(plan.device).type
    if kind == "cuda":
        return allocated(run, plan.device)
    return resident(run) or in_child(plan, model, name) if kind == "cpu" else None


def allocated(run: Callable[[], Any], device: str) -> Peak:
    """The maximum over three calls, which includes memory that a call keeps for the next one."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    return Peak(before, torch.cuda.max_memory_allocated(device))


def resident(run: Callable[[], Any], calls: int = 3) -> Peak | None:
    """The median of some calls in this process; None if the kernel's peak cannot be reset."""
    try:
        return sorted((_resident(run) for _ in range(calls)), key=lambda peak: peak.growth)[calls // 2]
    except OSError:
        return None


def _resident(run: Callable[[], Any]) -> Peak:
    settle()
    CLEAR.write_text("5")  # resets the peak to the current value
    before = status("VmRSS")
    run()
    return Peak(before, status("VmHWM"))


def settle() -> None:
    """Returns free memory to the system: memory kept by the allocator would hide that of the next call."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only in glibc
        ctypes.CDLL(None).malloc_trim(0)


def status(key: str) -> int:
    """A value of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def in_child(plan: Plan, model: str, name: str) -> Peak | None:
    """Measures in a fresh process, including what libraries allocate on first use."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(asdict(plan)), model, name],
        capture_output=True,
        text=True,
    )
    return Peak(*map(int, done.stdout.split()[-2:])) if done.returncode == 0 else None


def child(plan_json: str, model: str, name: str) -> None:
    """Runs in the fresh process: one call, and the peak resident set before and after it."""
    from rectgrad.bench.case import case_of, side
    from rectgrad.bench.contenders import contenders
    from rectgrad.bench.plan import applied

    plan = Plan(**json.loads(plan_json))
    with applied(plan):
        case = case_of(plan, model, side(plan, model), plan.batch, light=True)
        run = next(each.run for each in contenders(case, plan) if each.name == name)
        before = largest()
        run()
    print(before, largest())


def largest() -> int:
    """The peak resident set of this process so far; not available on Windows."""
    with contextlib.suppress(OSError, StopIteration):
        return status("VmHWM")  # on Linux, ru_maxrss starts at the value of the parent process
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
