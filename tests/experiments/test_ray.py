"""Ray: the same numbers as without it, even if a worker is killed; an error if Ray is not installed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rectgrad import cli, data
from rectgrad.data import Dataset, shapes
from rectgrad.experiments import lab, roar_kar
from rectgrad.experiments.reproduce import reproduce
from rectgrad.photos import cluster
from small_gallery import tinted

# Classes that are learned in three steps: the accuracies differ from network to network.
SMALL = Dataset("shapes", tuple(shapes.CLASSES), tinted(40, 1), tinted(60, 2))
NUMBERS = {
    "methods": ["saliency"],
    "fractions": [0.1, 0.9],
    "seeds": 1,
    "retraining": {"pictures": 20, "epochs": 3},
    "blurred": [],
    "ties": ["ties by gradient"],
    "swapped": ["saliency"],
    "samples": {},
    "road": 10,
}


@pytest.fixture(scope="module")
def ray():
    found = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rectgrad[ray]'")
    # Ray leaves sockets and files to the garbage collector
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        found.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield found
        found.shutdown()


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("RECTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: SMALL)
    monkeypatch.setitem(lab.EPOCHS, "shapes", 1)
    monkeypatch.setitem(roar_kar.PRESETS, "quick", NUMBERS)
    return tmp_path


def metrics(path: Path) -> dict:
    return json.loads(path.read_text())["metrics"]


def workers(task: str) -> list[int]:
    """Processes that currently run a task: Ray names them after it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().startswith(f"ray::{task}".encode()):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_same_numbers_though_a_worker_is_killed(ray, small):
    """A kill affects only its own task: results that were finished before do not change."""
    if not Path("/proc").is_dir():
        pytest.skip("looks for Ray's processes in /proc")
    local = metrics(reproduce("roar-kar", out=small / "local", figures=False))
    for attempt in range(5):  # on a busy machine, no task may be running when we look
        found, killed, seen = with_a_kill(small / f"ray{attempt}")
        assert found == local
        if killed:
            break
    ((_, before),) = killed
    assert before <= seen  # no finished cell was written again


def with_a_kill(out: Path) -> tuple[Any, list[tuple[int, set]], set]:
    """The metrics of a run on Ray in which a worker is killed; the killed workers, with the parts finished by
    then; and the parts at the end."""
    parts, over = out / "shapes" / ".roar-kar.parts", threading.Event()
    killed: list[tuple[int, set]] = []

    def finished() -> set:
        return {(p.name, p.stat().st_mtime_ns) for p in parts.rglob("*.json") if not p.name.startswith(".")}

    def kill() -> None:
        while not killed and not over.wait(0.02):
            try:
                done, running = finished(), workers("_trained")
            except FileNotFoundError:  # the run has ended and removed its parts
                return
            if len(done) >= 2 and running:
                os.kill(running[0], signal.SIGKILL)
                killed.append((running[0], done))

    original, seen = lab.Parts.clear, set()

    def clear(self) -> None:
        seen.update(finished())
        original(self)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.Parts, "clear", clear)
        found = metrics(reproduce("roar-kar", out=out, engine="ray", figures=False))
    over.set()
    thread.join()
    return found, killed, seen


def command(monkeypatch, out: str, engine: str) -> int:
    options = ["--model", "cifar10_cnn", "--maps", "npy", "--device", "cpu", "--out", out, "--engine", engine]
    monkeypatch.setattr(sys, "argv", ["rectgrad", "explain", "photos", *options])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_folder_of_photos(ray, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for i, pixels in enumerate(SMALL.test.pixels[:5]):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{i}.png")
    (tmp_path / "photos" / "bad.png").write_text("no picture")
    monkeypatch.setattr("rectgrad.cli.explain_ray.CHUNK", 2)
    assert command(monkeypatch, "a", "local") == 1
    assert command(monkeypatch, "b", "ray") == 1
    assert capsys.readouterr().err.count("bad.png") == 2
    for i in range(5):
        one, other = (json.loads((tmp_path / o / f"{i}.json").read_text()) for o in "ab")
        assert one == other
        a, b = (np.load(tmp_path / o / f"{i}.npy") for o in "ab")
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    times = [p.stat().st_mtime_ns for p in sorted((tmp_path / "b").glob("*.png"))]
    command(monkeypatch, "b", "ray")
    assert [p.stat().st_mtime_ns for p in sorted((tmp_path / "b").glob("*.png"))] == times


def test_without_ray_there_is_an_error_message(monkeypatch, small):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'rectgrad\[ray\]'"), cluster.session():
        pass
    with pytest.raises(ValueError, match="--engine ray, only roar-kar does"):
        reproduce("claims", out=small, engine="ray")
    with pytest.raises(ValueError, match="local, ray"):
        reproduce("roar-kar", out=small, engine="spark")
