"""Kills `train`, `reproduce` and `data` at random moments and restarts them.

    python benchmarks/kills.py [--kills 20] [--only train] [--out FILE]

Each run is killed with SIGKILL at a random moment, restarted, and compared with an undisturbed run: weights,
figures and datasets byte by byte (but for the order of safetensors' metadata), records without times and
dates. Nothing else may be left in the folders. Every second kill comes just after a file appeared, where it
is most likely to hit a write. A kill that comes after the end of the run does not count: each command is
started until `--kills` of them hit a running process. The datasets are generated. The exit status is 1 if a
file differs or is left over. Writes results/bench/kills.json by default.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rectgrad import cli, data
from rectgrad.bench.environment import commit, environment
from rectgrad.cli import data as _data  # noqa: F401 - commands are imported before a process is forked
from rectgrad.cli import train as _train  # noqa: F401
from rectgrad.data import Dataset, cifar10, digest_of, shapes
from rectgrad.experiments import lab, noise_level
from rectgrad.experiments.reproduce import reproduce
from rectgrad.photos import files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))
import test_data


def train_command(out: Path, given: Path) -> None:
    sys.argv[1:] = ["train", "--dataset", "shapes", "--epochs", "6", "--out", str(out / "w.safetensors")]
    cli.main()


def reproduce_command(out: Path, given: Path) -> None:
    lab.EPOCHS["shapes"] = 3
    noise_level.PRESETS["quick"] = {"per_class": 2, "images": 20, "matched": 10}
    noise_level.COMPARED = ("saliency", "deeplift", "rectgrad")  # type: ignore[assignment]
    reproduce("noise-level", out=out)


def data_command(out: Path, given: Path) -> None:
    sys.argv[1:] = ["data", "cifar10", "--from", str(given)]
    cli.main()


COMMANDS: dict[str, Callable[[Path, Path], None]] = {
    "train": train_command,
    "reproduce": reproduce_command,
    "data": data_command,
}
TRIES = 5  # starts for each kill that hits, at most
TIMES = {"seconds", "date", "environment", "created", "time"}  # of a record


def start(name: str, folder: Path, given: Path) -> BaseProcess:
    """Runs a command in a process of its own. It is forked, so that nothing is imported again."""
    folder.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=run, args=(name, folder, given))
    process.start()
    return process


def run(name: str, folder: Path, given: Path) -> None:
    os.environ["RECTGRAD_CACHE"] = str(folder / "cache")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    COMMANDS[name](folder / "out", given)


def finished(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


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


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def kill(process: BaseProcess, folder: Path, moment: float, at_write: bool) -> bool:
    """Kills the process after `moment` seconds, or just after the next file appears. Whether it still ran."""
    time.sleep(moment)
    before = files_in(folder)
    while at_write and process.is_alive() and files_in(folder) <= before:
        time.sleep(0.001)
    process.kill()
    return finished(process) == -signal.SIGKILL


def attack(name: str, kills: int, scratch: Path, given: Path) -> dict[str, Any]:
    started = time.monotonic()
    assert finished(start(name, scratch / "whole", given)) == 0
    length, expected = time.monotonic() - started, content(scratch / "whole")
    moments, folder = random.Random(0), scratch / "killed"
    hit = partial = attempts = 0
    different, left = list[str](), list[str]()
    while hit < kills:
        if attempts == TRIES * kills:
            raise RuntimeError(f"{name}: only {hit} of {attempts} kills hit a running process")
        attempts += 1
        began = time.monotonic()
        process = start(name, folder, given)
        if kill(process, folder, moments.uniform(0, length), bool(attempts % 2)):
            hit += 1
            partial += any(path.suffix == ".part" for path in files_in(folder))
            assert finished(start(name, folder, given)) == 0
            found = content(folder)
            different += [f"{attempts}: {each}" for each in expected if found.get(each) != expected[each]]
            left += [f"{attempts}: {each}" for each in found if each not in expected]
            print(f"{name}: {hit} of {kills} hit, {len(different)} differ, {len(left)} left", flush=True)
        else:
            length = min(length, time.monotonic() - began)  # other work had slowed the first run
        shutil.rmtree(folder)
    return {
        "kills_of_a_running_process": hit,
        "after_the_end": attempts - hit,
        "partial_files_after_the_kill": partial,
        "different": different,
        "left": left,
        "files": sorted(expected),
    }


def generate(folder: Path) -> Path:
    """Makes small datasets take the place of the real ones. Returns an archive of CIFAR-10."""
    small = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(200, 1), shapes.generate(60, 2))
    data.DATASETS["shapes"] = lambda: small
    cifar10.DIGESTS = {part: digest_of(images) for part, images in test_data.made_up().items()}
    official = test_data.official_files()
    cifar10.BATCH_DIGESTS = {name: hashlib.md5(content).hexdigest() for name, content in official.items()}
    return test_data.written("official", folder, packed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path("results/bench/kills.json"))
    given = parser.parse_args()
    record: dict[str, Any] = files.load_record(given.out)
    with tempfile.TemporaryDirectory() as scratch:
        archive = generate(Path(scratch) / "given")
        for name in COMMANDS:
            if given.only in (None, name):
                record[name] = attack(name, given.kills, Path(scratch) / name, archive)
                record[name] |= {"commit": commit(), "environment": environment("cpu")}
                files.save_json(record, given.out)
    sys.exit(1 if any(each["different"] or each["left"] for each in record.values()) else 0)


if __name__ == "__main__":
    main()
