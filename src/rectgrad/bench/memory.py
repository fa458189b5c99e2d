"""Peak memory of one call.

On CUDA: what torch has allocated. On a CPU: the resident set. Linux keeps its largest value and lets us reset
it, so the number is the kernel's own; elsewhere a fresh process runs the call and reports its largest value.
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
    """Bytes before the call, with the network and the pictures loaded, and at most during it."""

    before: int
    most: int

    @property
    def growth(self) -> int:
        return self.most - self.before


def peak(run: Callable[[], Any], plan: Plan, model: str, name: str) -> Peak | None:
    """Of a contender's run; None where nothing tells."""
    kind = torch.device(plan.device).type
    if kind == "cuda":
        return allocated(run, plan.device)
    return resident(run) or in_child(plan, model, name) if kind == "cpu" else None


def allocated(run: Callable[[], Any], device: str) -> Peak:
    """The most in three calls: what the first ones keep for the next ones counts, and only here."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    return Peak(before, torch.cuda.max_memory_allocated(device))


def resident(run: Callable[[], Any]) -> Peak | None:
    """In this process, the middle of three calls; None where the kernel's mark cannot be reset."""
    try:
        return sorted((_resident(run) for _ in range(3)), key=lambda peak: peak.growth)[1]
    except OSError:
        return None


def _resident(run: Callable[[], Any]) -> Peak:
    settle()
    CLEAR.write_text("5")  # the mark falls to the present value
    before = status("VmRSS")
    run()
    return Peak(before, status("VmHWM"))


def settle() -> None:
    """Give back what is free: memory that the allocator kept would serve the next call unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def status(key: str) -> int:
    """A line of the kernel's report on this process, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def in_child(plan: Plan, model: str, name: str) -> Peak | None:
    """In a fresh process. What libraries take on first use is counted in."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(asdict(plan)), model, name],
        capture_output=True,
        text=True,
    )
    return Peak(*map(int, done.stdout.split()[-2:])) if done.returncode == 0 else None


def child(plan_json: str, model: str, name: str) -> None:
    """The fresh process: one call, and the largest resident set before and after it."""
    from rectgrad.bench.case import case_of, side
    from rectgrad.bench.contenders import contenders
    from rectgrad.bench.plan import in_force

    plan = Plan(**json.loads(plan_json))
    with in_force(plan):
        case = case_of(plan, model, side(plan, model), plan.batch, light=True)
        run = next(each.run for each in contenders(case, plan) if each.name == name)
        before = largest()
        run()
    print(before, largest())


def largest() -> int:
    """The largest resident set of this process so far; not known on Windows."""
    with contextlib.suppress(OSError, StopIteration):
        return status("VmHWM")  # Linux' other number, ru_maxrss, starts at the parent process's
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
