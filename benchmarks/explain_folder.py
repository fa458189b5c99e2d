"""Measures the speed and memory of `rectgrad explain FOLDER`, with and without specificity.

    python benchmarks/explain_folder.py PHOTOS [--against OTHER/src] [--rounds 3] [--method rectgrad]
        [--json FILE]

Runs the command in a subprocess, so that another checkout can be measured too: `git worktree add OTHER
COMMIT`, then `--against OTHER/src`. The two alternate, and the ratio of the medians is printed. Photos per
second are counted from the first result to the last, without imports and loading the model; `whole command`
includes them. So does the processor time per photo, which says more on a busy machine. Memory is the resident
size after a fifth of the photos and at the end. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[1] / "src"


class Measured(NamedTuple):
    """Photos per second, from first to last result and for the whole command; seconds of processor time per
    photo; memory early and late (MB)."""

    rate: float
    whole: float
    processor: float
    early: float
    late: float


def measure(source: Path, photos: Path, method: str, options: list[str]) -> Measured:
    """Runs the command of the checkout whose `src` folder is given."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = [sys.executable, "-m", "rectgrad", "explain", str(photos), "--method", method]
        environment = os.environ | {"PYTHONPATH": str(source)}
        started, before = time.monotonic(), _processor_time()
        process = subprocess.Popen(
            [*command, "--out", str(out), *options],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        sizes = _sizes(process.pid, process, out)
        took, spent = time.monotonic() - started, _processor_time() - before
        assert process.stderr is not None
        if process.returncode:
            raise SystemExit(process.stderr.read().decode())
        times = sorted(path.stat().st_mtime for path in out.rglob("*.json"))
    count = len(times)
    early = next(size for done, size in sizes if done >= count / 5)
    return Measured((count - 1) / (times[-1] - times[0]), count / took, spent / count, early, sizes[-1][1])


def _processor_time() -> float:
    """Of all finished subprocesses, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _sizes(pid: int, process: subprocess.Popen, out: Path) -> list[tuple[int, float]]:
    """Samples (results so far, memory in MB) while the process runs."""
    sizes: list[tuple[int, float]] = []
    while process.poll() is None:
        done = sum(1 for _ in out.rglob("*.json")) if out.exists() else 0
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            break
        if pages:  # 0 while the process exits
            sizes.append((done, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
        time.sleep(0.5)
    process.wait()
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--against", type=Path, help="src folder of another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", default="rectgrad")
    parser.add_argument("--json", type=Path, help="write a record")
    given = parser.parse_args()
    runs: dict[str, tuple[Path, list[str]]] = {
        "with specificity": (HERE, ["--specificity"]),
        "without": (HERE, ["--no-specificity"]),
    }
    if given.against:
        runs["other checkout"] = (given.against.resolve(), [])
    found: dict[str, list[Measured]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, (source, options) in runs.items():
            found[name].append(measure(source, given.photos, given.method, options))
            print(f"{name:18}", _row(found[name][-1]), flush=True)
    rates = {name: statistics.median(each.rate for each in own) for name, own in found.items()}
    for name, rate in rates.items():
        print(f"median, {name}: {rate:.2f} photos/s")
    if given.against:
        for name in ("with specificity", "without"):
            print(f"{name}: {rates[name] / rates['other checkout']:.2f} times the other checkout")
    if given.json:
        from rectgrad.bench.environment import commit, environment

        record = {
            "photos": sum(path.is_file() for path in given.photos.iterdir()),
            "median photos per second": rates,
            "rounds": {name: [each._asdict() for each in own] for name, own in found.items()},
            "environment": environment("cpu"),
            "commit": commit(),
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


def _row(each: Measured) -> str:
    return (
        f"{each.rate:6.2f} photos/s, whole command {each.whole:6.2f}/s, "
        f"{1000 * each.processor:4.0f} ms of processor time each, "
        f"memory {each.early:5.0f} MB after a fifth, {each.late:5.0f} MB at the end"
    )


if __name__ == "__main__":
    main()
