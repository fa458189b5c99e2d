"""Kills `train`, `reproduce` and `data` at random moments and restarts them.

    python benchmarks/kills.py [--kills 20] [--only train] [--out FILE]

Each run is killed with SIGKILL at a random moment, restarted, and compared with an undisturbed run: weights,
figures and datasets byte by byte (but for the order of safetensors' metadata), records without times and
dates. Nothing else may be left in the folders. Every second kill comes just after a file appeared, where it
is most likely to hit a write. The datasets are generated. Writes results/bench/kills.json by default.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rectgrad.bench.environment import commit, environment
from rectgrad.photos import files

SMALL = """
import sys
from rectgrad import data
from rectgrad.data import Dataset, shapes
small = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(200, 1), shapes.generate(60, 2))
data.DATASETS["shapes"] = lambda: small
"""
PROGRAMS = {
    "train": SMALL
    + """
from rectgrad.cli import main
print("started", flush=True)
sys.argv[1:] = ["train", "--dataset", "shapes", "--epochs", "6", "--out", sys.argv[1] + "/w.safetensors"]
main()
""",
    "reproduce": SMALL
    + """
from pathlib import Path
from rectgrad.experiments import lab, noise_level
from rectgrad.experiments.reproduce import reproduce
lab.EPOCHS["shapes"] = 3
noise_level.PRESETS["quick"] = {"per_class": 2, "images": 20, "matched": 10}
noise_level.COMPARED = ("saliency", "deeplift", "rectgrad")
print("started", flush=True)
reproduce("noise-level", out=Path(sys.argv[1]))
""",
    "data": """
import sys
sys.path.insert(0, sys.argv[2])
import hashlib
import test_data
from rectgrad.data import cifar10
from rectgrad.training import digest_of
cifar10.DIGESTS = {part: digest_of(images) for part, images in test_data.made_up().items()}
found = test_data.official_files()
cifar10.BATCH_DIGESTS = {name: hashlib.md5(content).hexdigest() for name, content in found.items()}
from rectgrad.cli import main
print("started", flush=True)
sys.argv[1:] = ["data", "cifar10", "--from", sys.argv[3]]
main()
""",
}
TIMES = {"seconds", "date", "environment", "created", "time"}  # of a record


def start(name: str, folder: Path, given: Path) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    tests = Path(__file__).parents[1] / "tests" / "data"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAMS[name], str(folder / "out"), str(tests), str(given)],
        env={**os.environ, "RECTGRAD_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # "started"
    return process


def content(folder: Path) -> dict[str, str]:
    """Every file by name: the digest of its content, without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".json":
                data = json.dumps(timeless(json.loads(data)), sort_keys=True).encode()
            if path.suffix == ".safetensors":
                data = ordered(data)
            found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()[:16]
    return found


def ordered(data: bytes) -> bytes:
    """A file of weights with its header in order: safetensors writes the metadata in a random one."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:start]), sort_keys=True).encode() + data[start:]


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not any(each in k for each in TIMES)}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def kill(process: subprocess.Popen[str], folder: Path, moment: float, at_write: bool) -> bool:
    """Kills the process after `moment` seconds, or just after the next file appears. Whether it still ran."""
    time.sleep(moment)
    before = set(folder.rglob("*"))
    while at_write and process.poll() is None and set(folder.rglob("*")) <= before:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def attack(name: str, kills: int, scratch: Path, given: Path) -> dict[str, Any]:
    started = time.monotonic()
    assert start(name, scratch / "whole", given).wait() == 0
    length, expected = time.monotonic() - started, content(scratch / "whole")
    moments, hit, different, left = random.Random(0), 0, [], []
    partial = 0
    for i in range(kills):
        folder = scratch / f"killed-{i}"
        began = time.monotonic()
        process = start(name, folder, given)
        rest = max(length - (time.monotonic() - began), 0.2)  # without the start of Python
        hit += kill(process, folder, moments.uniform(0, rest), bool(i % 2))
        partial += any(".part" in path.name or ".tmp" in path.name for path in folder.rglob("*"))
        assert start(name, folder, given).wait() == 0
        found = content(folder)
        different += [f"{i}: {each}" for each in expected if found.get(each) != expected[each]]
        left += [f"{i}: {each}" for each in found if each not in expected]
        print(f"{name} {i + 1} of {kills}: {hit} hit, {len(different)} differ, {len(left)} left", flush=True)
    return {
        "kills": kills,
        "while_running": hit,
        "partial_files_after_the_kill": partial,
        "different": different,
        "left": left,
        "files": sorted(expected),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--out", type=Path, default=Path("results/bench/kills.json"))
    given = parser.parse_args()
    record: dict[str, Any] = files.load_json(given.out) or {}
    with tempfile.TemporaryDirectory() as scratch:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))
        import test_data

        archive = test_data.written("official", Path(scratch) / "given", packed=True)
        for name in PROGRAMS:
            if given.only in (None, name):
                record[name] = attack(name, given.kills, Path(scratch) / name, archive)
                record[name] |= {"commit": commit(), "environment": environment("cpu")}
                files.save_json(record, given.out)


if __name__ == "__main__":
    main()
