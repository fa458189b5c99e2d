"""An experiment that is killed repeatedly gives the same numbers as an uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from rectgrad import data
from rectgrad.data import Dataset, shapes
from rectgrad.experiments import lab, matched, noise_level
from rectgrad.experiments.reproduce import reproduce

small = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(200, 1), shapes.generate(60, 2))
data.DATASETS["shapes"] = lambda: small
lab.EPOCHS["shapes"] = 5
noise_level.PRESETS["quick"] = {"per_class": 2, "images": 60, "matched": 4}
noise_level.COMPARED = ("saliency", "deeplift", "rectgrad")
matched.COMPARED = ("saliency", "rectgrad")
print("started", flush=True)
reproduce("noise-level", out=Path(sys.argv[1]))
"""


def start(out: Path, cache: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out)],
        env={**os.environ, "RECTGRAD_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n", process.stderr.read()
    return process


def finish(out: Path, cache: Path) -> None:
    with start(out, cache) as process:
        assert process.wait() == 0, process.stderr.read()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_killed_five_times(tmp_path):
    """The times are random: training, parts and record may all be interrupted."""
    started = time.monotonic()
    finish(tmp_path / "whole", tmp_path / "cache-whole")
    length, moments = time.monotonic() - started, random.Random(0)
    out, cache, kills = tmp_path / "killed", tmp_path / "cache", 0
    path = out / "shapes" / "noise-level.json"
    while kills < 5 and not path.exists():
        with start(out, cache) as process:
            time.sleep(moments.uniform(0.05, length / 6))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
    finish(out, cache)
    paths = [tmp_path / name / "shapes" / "noise-level.json" for name in ("whole", "killed")]
    whole, killed = (json.loads(each.read_text())["metrics"] for each in paths)
    assert killed == whole
    assert kills == 5
    files = ["noise-level-matched.svg", "noise-level.json", "noise-level.svg"]
    assert sorted(p.name for p in path.parent.iterdir()) == files
