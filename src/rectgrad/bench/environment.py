"""The environment of a measurement: hardware, versions, command, commit and code."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
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

import rectgrad

COMPUTES = ("ops", "kernels", "engine", "rules", "methods", "metrics")  # folders


def environment(device: str) -> dict[str, Any]:
    return {
        "rectgrad": rectgrad.__version__,
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
        "command": _command(),
    }


def _command() -> str:
    """The words of the command line, without folders. `python -m NAME` is NAME."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *(Path(word).name for word in sys.argv[1:])])


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
    """The commit of the running source, with "+" if it was modified; None outside a repository. A copy of the
    source says where it comes from by RECTGRAD_COMMIT, which `code_digest` can verify."""
    if given := os.environ.get("RECTGRAD_COMMIT"):
        return given
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
        found = done.stdout.strip()
    except OSError:
        found = ""
    return found or None


@functools.cache
def code_digest(*more: str) -> str:
    """A hash of the code that computes maps and measures, and of other files and folders of the package."""
    found, package = hashlib.sha256(), Path(rectgrad.__file__).parent
    for name in (*COMPUTES, *more):
        inside = [package / name] if name.endswith(".py") else (package / name).rglob("*")
        for path in sorted(each for each in inside if each.suffix in (".py", ".c", ".h")):
            found.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]
