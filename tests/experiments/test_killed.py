"""An experiment that is killed repeatedly gives the same numbers as an uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Each line of the input asks for a run, in a process of its own. It is forked, so that the imports are done
# once. After `seconds` of CPU time it is killed: nothing handles SIGPROF, so it ends a process like SIGKILL.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from rectgrad import data
from rectgrad.data import Dataset, shapes
from rectgrad.experiments import lab, matched, noise_level
from rectgrad.experiments.reproduce import reproduce

small = Dataset("shapes", tuple(shapes.CLASSES), shapes.generate(40, 1), shapes.generate(60, 2))
data.DATASETS["shapes"] = lambda: small
lab.EPOCHS["shapes"] = 5
noise_level.PRESETS["quick"] = {"per_class": 2, "images": 20, "matched": 4}
noise_level.COMPARED = ("saliency", "deeplift", "rectgrad")
matched.COMPARED = ("saliency", "rectgrad")
for line in sys.stdin:
    out, cache, seconds = json.loads(line)
    number = os.fork()
    if number == 0:
        os.environ["RECTGRAD_CACHE"] = cache
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reproduce("noise-level", out=Path(out))
        os._exit(0)
    _, status, used = os.wait4(number, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)
"""


@pytest.fixture
def run():
    """Runs the experiment; returns its exit code and how many seconds of CPU time it used."""

    def ask(out: Path, cache: Path, seconds: float = 0) -> tuple[int, float]:
        process.stdin.write(json.dumps([str(out), str(cache), seconds]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield ask


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_killed_five_times(tmp_path, run):
    """The times are random: training, parts and record may all be interrupted."""
    status, length = run(tmp_path / "whole", tmp_path / "cache-whole")
    assert status == 0
    out, cache, moments = tmp_path / "killed", tmp_path / "cache", random.Random(0)
    for _ in range(5):
        assert run(out, cache, moments.uniform(0.02, length / 4))[0] == -signal.SIGPROF
    assert run(out, cache)[0] == 0
    paths = [tmp_path / name / "shapes" / "noise-level.json" for name in ("whole", "killed")]
    whole, killed = (json.loads(each.read_text())["metrics"] for each in paths)
    assert killed == whole
    files = ["noise-level-matched.svg", "noise-level.json", "noise-level.svg"]
    assert sorted(p.name for p in paths[1].parent.iterdir()) == files
