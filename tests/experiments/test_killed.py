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
# once. `seconds` of CPU time after a number of files were saved, it is killed: nothing handles SIGPROF, so it
# ends a process like SIGKILL. A run answers with its exit code and how many files it saved.
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
original, saved = os.replace, 0

def replace(*names):
    global saved
    original(*names)
    saved += 1
    if saved == most:
        signal.setitimer(signal.ITIMER_PROF, seconds)

os.replace = replace
for line in sys.stdin:
    out, cache, most, seconds = json.loads(line)
    number = os.fork()
    if number == 0:
        os.environ["RECTGRAD_CACHE"] = cache
        reproduce("noise-level", out=Path(out))
        print(saved, flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
"""


class Runs:
    """Runs the experiment, as often as asked."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True)

    def _ask(self, *request: object) -> None:
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()

    def finish(self, out: Path, cache: Path) -> int:
        """The number of files that were saved."""
        self._ask(out, cache, 0, 0)
        saved, status = (int(self.process.stdout.readline()) for _ in range(2))
        assert status == 0
        return saved

    def kill(self, out: Path, cache: Path, most: int, seconds: float) -> None:
        self._ask(out, cache, most, seconds)
        assert int(self.process.stdout.readline()) == -signal.SIGPROF


@pytest.fixture
def runs():
    found = Runs()
    with found.process:
        yield found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_killed_five_times(tmp_path, runs):
    """At random moments, the first in training and the last when parts are finished."""
    whole, out, cache, moments = tmp_path / "whole", tmp_path / "killed", tmp_path / "cache", random.Random(0)
    assert runs.finish(whole, tmp_path / "cache-whole") == 17  # a start, five epochs, parts, record, figures
    for most in (2, 4, 4, 4, 4):  # each run saves its start first
        runs.kill(out, cache, most, moments.uniform(0.001, 0.02))
    runs.finish(out, cache)
    paths = [folder / "shapes" / "noise-level.json" for folder in (whole, out)]
    assert len({json.dumps(json.loads(each.read_text())["metrics"]) for each in paths}) == 1
    files = ["noise-level-matched.svg", "noise-level.json", "noise-level.svg"]
    assert sorted(p.name for p in paths[1].parent.iterdir()) == files
