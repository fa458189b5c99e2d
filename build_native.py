"""Builds the native kernels where there is a C compiler; without one everything works, slower.

One library for each instruction set, from the same sources: the processor it runs on decides which one is
loaded. Nothing but a C compiler is needed. By hand: `python build_native.py`.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "src" / "rectgrad" / "kernels"
SOURCES = ("parallel.c", "select.c", "conv.c", "linear.c", "pool.c", "relevance.c")
FLAGS = "-O3 -std=gnu11 -fPIC -shared -fno-math-errno -ffp-contract=fast -Wno-psabi".split()
LEVELS = {"base": "", "avx2": "-mavx2 -mfma", "avx512": "-mavx512f -mavx512vl -mavx512dq -mavx512bw -mfma"}


def levels() -> dict[str, str]:
    """Instruction sets worth a library of their own on this kind of processor."""
    wide = platform.machine().lower() in ("x86_64", "amd64")
    return LEVELS if wide else {"base": ""}


def compiler() -> list[str] | None:
    """$CC, or the C compiler there is."""
    if os.environ.get("RECTGRAD_NO_NATIVE") or sys.platform == "win32":
        return None
    given = shlex.split(os.environ.get("CC", ""))
    found = given[0] if given else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found, *given[1:]] if found and shutil.which(found) else None


def digest() -> int:
    """Of the sources: `kernels.native` does not use a library that was built from others."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted((HERE / "native").glob("*.[ch]"))))


def build() -> list[Path]:
    """Compile; the libraries that came of it. A failure is said, and is no error."""
    cc, built = compiler(), []
    for level, flags in levels().items() if cc else ():
        out = HERE / f"_native_{level}.so"
        part = out.with_suffix(f".{os.getpid()}.part")
        sources = [str(HERE / "native" / name) for name in SOURCES]
        command = [*cc, *FLAGS, *flags.split(), f"-DRG_SOURCES={digest()}u", *sources]
        command += ["-o", str(part), "-lpthread", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"rectgrad: no native kernels for {level}: {done.stderr.strip()[:500]}", file=sys.stderr)
            part.unlink(missing_ok=True)
            continue
        part.replace(out)  # in one step: another process may have the old one open
        built.append(out)
    if not built:
        print("rectgrad: installed without native kernels (no C compiler): slower on CPUs", file=sys.stderr)
    return built


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object  # type: ignore[assignment,misc]


class NativeKernels(BuildHookInterface):
    """Runs when the package is built or installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = build()
        build_data["artifacts"] += [f"/src/rectgrad/kernels/{path.name}" for path in built]
        if built and version != "editable":  # plain C, so one wheel serves every Python on this platform
            name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{name}")


if __name__ == "__main__":
    for path in build():
        print(path)
