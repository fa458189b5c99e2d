"""Ray: tasks that keep failing, an object store that is full, and a head node that is restarted.

Each test starts a Ray of its own in another process."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rectgrad[ray]'")

# A network that cannot stand white pictures, and waits at bright ones while there is a file named `wait`.
MODEL = """
import time
from pathlib import Path
import torch
from torch import nn
from rectgrad.models import ImageModel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))

    def forward(self, x):
        if (x.mean((1, 2, 3)) > 0.99).any():
            raise ArithmeticError("too bright\\nfor this network")
        while (x.mean((1, 2, 3)) > 0.6).any() and Path("wait").exists():
            time.sleep(0.05)
        return self.layers(x)

def make():
    labels = ["a", "b", "c", "d"]
    return ImageModel("net", Net().eval(), labels, (16, 16), (0.0,) * 3, (1.0,) * 3, crop_fraction=1.0)
"""
COMMAND = """
import sys
from rectgrad.cli import explain_ray, main
explain_ray.CHUNK = 3
main()
"""
START = """
import ray
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
"""
FAILING = """
from rectgrad.photos import cluster

def work(i):
    if i % 3 == 1:
        raise KeyError(f"number {i}")
    return i * i

with cluster.session() as ray:
    tasks = lambda: {ray.remote(work).remote(i): i for i in range(6)}
    found = dict(cluster.as_completed(ray, tasks()))
    assert {i: value for i, value in found.items() if i % 3 != 1} == {0: 0, 2: 4, 3: 9, 5: 25}, found
    assert str(found[1]) == "KeyError: 'number 1'", found[1]
    kept = {}
    try:
        for item, value in cluster.completed(ray, tasks(), lambda i: f"task {i}"):
            kept[item] = value
    except RuntimeError as error:
        assert kept == {0: 0, 2: 4, 3: 9, 5: 25}, kept
        said = str(error)
        assert said.startswith("2 failed on Ray: "), said
        assert said.endswith("The others are finished and kept."), said
        assert "task 1 (KeyError: 'number 1')" in said and "task 4 (KeyError: 'number 4')" in said, said
        print("named")
"""
FULL = """
import numpy

def large(i):
    return numpy.full(30 * 2**20, i, numpy.uint8)

with cluster.session() as ray:
    shared = [ray.put(numpy.zeros(30 * 2**20, numpy.uint8)) for _ in range(2)]
    tasks = {ray.remote(large).remote(i): i for i in range(5)}
    refs = list(tasks)  # none is released
    found = dict(cluster.as_completed(ray, tasks))
    assert all(int(found[i].max()) == i for i in range(5)), found
print("complete")
"""


def python(code: str, *arguments: str, folder: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.fixture(autouse=True)
def own_folder(monkeypatch):
    """Ray keeps its sockets here, whose paths must be short, and the address of the last head node. That of
    this machine is not overwritten. The one in here has been killed."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield Path(folder)


def test_the_rest_completes(tmp_path):
    """Of tasks of which some fail, then of tasks whose results exceed the object store; both on one Ray."""
    status, out, err = finish(python(START + FAILING + FULL + "ray.shutdown()\n", folder=tmp_path))
    assert (status, out.split()) == (0, ["named", "complete"]), err


def photos(folder: Path, dark: int, bright: int) -> None:
    (folder / "photos").mkdir()
    (folder / "net.py").write_text(MODEL)
    for i in range(dark + bright):
        low, high = (0, 200) if i < dark else (150, 250)
        pixels = np.random.default_rng(i).integers(low, high, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{i:02}.png")


def explain(folder: Path, **environment: str) -> subprocess.Popen:
    options = ["--model", "net.py:make", "--q", "60", "--device", "cpu", "--out", "out", "--engine", "ray"]
    return python(COMMAND, "explain", "photos", *options, folder=folder, **environment)


def finished(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "out").glob("[!.]*.json")}


class Head:
    """A head node of its own. Only the processes that it started are killed, by their numbers."""

    def __init__(self, port: int, folder: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=1"]
        command += [f"--port={port}", "--include-dashboard=false", "--disable-usage-stats"]
        self._log = open(folder / f"head-{time.time_ns()}.log", "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in Path(self._log.name).read_text() and time.monotonic() < deadline:
            assert self._process.poll() is None, Path(self._log.name).read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        for number in [*self._below(self._process.pid), self._process.pid]:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(30)
        self._log.close()

    def _below(self, number: int) -> list[int]:
        """The processes that a process has started, and those that they have started."""
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        return [each for child in map(int, children) for each in (*self._below(child), child)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for Ray's processes in /proc")
def test_what_is_finished_is_kept_when_the_head_node_is_restarted(tmp_path):
    """Three tasks finish, and the fourth is running when the head node is killed. One photo of the fifth
    keeps failing: it is named, and the rest is explained."""
    photos(tmp_path, dark=9, bright=5)
    Image.new("RGB", (16, 16), "white").save(tmp_path / "photos" / "white.png")
    (tmp_path / "wait").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    (tmp_path / "token").write_text(secrets.token_hex(32))  # Ray may ask for one; never the user's own
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    address = {"RAY_ADDRESS": f"127.0.0.1:{port}", **token}
    head = Head(port, tmp_path, token)
    try:
        command = explain(tmp_path, **address)
        while len(finished(tmp_path)) < 9 and command.poll() is None:
            time.sleep(0.05)
    finally:
        head.kill()
    command.kill()  # Ray would try to reconnect for a minute
    said = command.communicate()
    before = finished(tmp_path)
    assert len(before) == 9, said
    assert all(json.loads((tmp_path / "out" / name).read_text())["photo"] for name in before)
    (tmp_path / "wait").unlink()
    head = Head(port, tmp_path, token)
    try:
        status, out, err = finish(explain(tmp_path, **address))
    finally:
        head.kill()
    assert status == 1, err
    assert [line for line in err.splitlines() if "white" in line] == [
        "rectgrad: photos/white.png: ArithmeticError: too bright"
    ]
    after = finished(tmp_path)
    assert set(after) == {f"{i:02}.json" for i in range(14)}
    assert {name: after[name] for name in before} == before
    assert "14 photos explained, 9 of them in an earlier run" in out
    assert not list((tmp_path / "out").rglob(".*"))
