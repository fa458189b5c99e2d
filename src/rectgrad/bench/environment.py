"""The environment of a measurement: hardware, versions, command and commit."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rectgrad import __version__


def environment(device: str) -> dict[str, Any]:
    return {
        "rectgrad": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
        "tf32": {
            "products": torch.backends.cuda.matmul.allow_tf32,
            "convolutions": torch.backends.cudnn.allow_tf32,
        },
        "kernels": kernels(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(Path(word).name for word in sys.argv),
    }


def processor() -> str:
    """The model name of the CPU."""
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def cores() -> int:
    """The number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernels() -> dict[str, str]:
    """The kernels in use for each type of device."""
    try:
        return importlib.import_module("rectgrad.kernels").in_use()
    except (ImportError, AttributeError):
        return {}


@functools.cache
def commit() -> str | None:
    """The commit of the running source, with "+" if it was modified; None outside a repository."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
