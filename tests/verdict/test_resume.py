"""A run that was killed, and a run on Ray, give the verdict of an undisturbed run."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rectgrad
from planted import PatchNet, pictures
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.work import Photos

TIMES = ("seconds", "costs", "environment", "times")
COUNTS = {
    "photos": 5,
    "evaluated": 3,
    "repeated": 2,
    "costly": 3,
    "costly_repeated": 2,
    "matched": 2,
    "chunk": 3,
}
SMALL = replace(PRESETS["quick"], **COUNTS, steps=3, draws=1, stages=2, subsets=3, squares=3)
METHODS = ["saliency", "rectgrad"]
MEASURES = "insertion,deletion,sensitivity_n,randomisation,max_sensitivity,specificity,gini"

# Ends itself by SIGKILL, which nothing can catch, while the 12th part is being written.
KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from rectgrad.photos import files
from test_resume import run

written, save = [], files.save_text
def save_text(text, path):
    written.append(path)
    if len(written) == 12:
        Path(str(path) + ".part").write_text(text[:20])
        os.kill(os.getpid(), signal.SIGKILL)
    save(text, path)
files.save_text = save_text
run(Path(sys.argv[1]))
"""


def run(out, pictures_seed=0, weight=4.0, **options):
    network = PatchNet().eval()
    with torch.no_grad():
        network.last.weight[1] = weight
    x = pictures(network, 5, pictures_seed)
    return rectgrad.judge(network, x, METHODS, measures=MEASURES, preset=SMALL, out=out, **options)


def without_times(folder):
    record = json.loads((folder / "verdict.json").read_text())
    return json.dumps({key: value for key, value in record.items() if key not in TIMES})


@pytest.fixture
def undisturbed(tmp_path):
    run(tmp_path / "undisturbed")
    return without_times(tmp_path / "undisturbed")


def test_a_killed_run_resumes(tmp_path, undisturbed, monkeypatch):
    here = Path(__file__).parent
    code = KILLED.format(paths=[str(here), str(here.parent)])
    out = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    finished = list((out / "parts").rglob("*.json"))
    assert len(finished) == 11
    assert not (out / "verdict.json").exists()

    computed, compute = [], Photos.compute
    monkeypatch.setattr(Photos, "compute", lambda *given: computed.append(given) or compute(*given))
    run(out)
    assert without_times(out) == undisturbed
    parts = [
        path for path in (out / "parts").rglob("*.json") if not path.name.startswith(("picture", "cost"))
    ]
    assert len(computed) == len(parts) - len(finished)
    computed.clear()
    run(out)
    assert computed == []


DAMAGED = {
    "cut short": lambda text, whole: text[:30],
    "a number": lambda text, whole: json.dumps(whole | {"value": 3}),
    "another number of photos": lambda text, whole: json.dumps(whole | {"value": {"insertion": [0.5] * 9}}),
    "words": lambda text, whole: json.dumps(whole | {"value": {"insertion": ["x"] * 3}}),
    "an error that is a number": lambda text, whole: json.dumps(whole | {"value": {"error": 3}}),
}


def test_a_damaged_part_is_computed_again(tmp_path, undisturbed):
    out = tmp_path / "undisturbed"
    part = next((out / "parts").rglob("removal-rectgrad*.json"))
    text = part.read_text()
    for name, damage in DAMAGED.items():
        part.write_text(damage(text, json.loads(text)))
        run(out)
        assert without_times(out) == undisturbed, name


@pytest.mark.parametrize("change", [{"seed": 1}, {"pictures_seed": 1}, {"weight": 5.0}], ids=str)
def test_another_seed_photo_or_weight_does_not_use_the_parts(tmp_path, undisturbed, change):
    out = tmp_path / "undisturbed"
    before = set((out / "parts").iterdir())
    run(out, **change)
    assert len(set((out / "parts").iterdir()) - before) == 1
    assert without_times(out) != undisturbed


def test_ray_gives_the_same_numbers(tmp_path, undisturbed, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rectgrad[ray]'")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(rectgrad.__file__).parents[1])
    )  # the network's file is not on it
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        run(tmp_path / "ray", engine="ray")
    finally:
        ray.shutdown()
    assert without_times(tmp_path / "ray") == undisturbed
