"""A server over a longer time: memory and files over many visitors, and its end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from test_routes import png_of

import explorer
from rectgrad.app import server

# Few sessions, so that the limit is reached.
FEW = """
from rectgrad.app import sessions
sessions.SESSIONS = 8
from rectgrad.cli import main
main()
"""
# A pass that takes a minute and cannot be stopped.
STUCK = """
import time
from rectgrad.app import service
service.record = lambda *_: (print("computing", flush=True), time.sleep(60))
from rectgrad.cli import main
main()
"""


@pytest.fixture
def temporary(tmp_path):
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory from /proc")
def test_memory_and_files_stay_level(temporary):
    """Visitors who vanish without a word. A page of each stays open for a while; nobody closes it."""
    with explorer.served("--model", "cifar10_cnn", code=FEW, TMPDIR=str(temporary)) as found:
        open_pages: list[explorer.Client] = []
        sizes, files = [], []
        for i in range(50):
            client = explorer.Client(found.url)
            for j in range(4):
                client.upload(png_of(1000 + 4 * i + j, 64))
            assert client.open().is_success
            client.maps("rectgrad", "saliency")
            open_pages.append(client)
            if len(open_pages) > 12:
                open_pages.pop(0).http.close()  # breaks the connection; no message is sent
            sizes.append(found.resident())
            files.append(len(list(next(temporary.iterdir()).iterdir())))
        [client.http.close() for client in open_pages]
        assert max(files) == 8 * 3  # each session keeps three uploads
        assert max(sizes[30:]) < max(sizes[12:30]) + 20
    assert list(temporary.iterdir()) == []


def busy(url: str) -> list[threading.Thread]:
    """Asks for as much as is allowed, in several threads, and waits until a map is being computed."""
    began = threading.Event()

    def ask(method: str, options: dict) -> None:
        client = explorer.Client(url)
        with contextlib.closing(client.http), contextlib.suppress(httpx.HTTPError):  # the server will end
            client.upload(png_of(len(method), 300))
            client.open()
            view = client.view(method, options=options)
            with client.http.stream("POST", "/api/maps", json=view) as answer:
                for _ in answer.iter_bytes():
                    began.set()

    wanted = {
        "integrated_gradients": {"IntegratedGradients": {"steps": 9999}},
        "rise": {"RISE": {"masks": 9000}},
    }
    threads = [threading.Thread(target=ask, args=each, daemon=True) for each in wanted.items()]
    [thread.start() for thread in threads]
    assert began.wait(60)
    return threads


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_busy_server_ends_with_its_files(temporary, number):
    with explorer.served("--model", "cifar10_cnn", TMPDIR=str(temporary)) as found:
        threads = busy(found.url)
        assert len(list(temporary.glob("*/*"))) > 0
        found.process.send_signal(number)
        status = found.process.wait(30)
        assert list(temporary.iterdir()) == []
        assert status == 0 or number == signal.SIGINT
        assert "Traceback" not in "".join(found.log)
        [thread.join(30) for thread in threads]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signals")
def test_a_server_with_a_computation_that_cannot_be_stopped_ends_too(temporary):
    with explorer.served("--model", "cifar10_cnn", code=STUCK, TMPDIR=str(temporary)) as found:
        client = explorer.Client(found.url)
        client.upload(png_of(0))

        def ask() -> None:
            with contextlib.closing(client.http), contextlib.suppress(httpx.HTTPError):
                assert client.open().status_code == 503

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        while "computing\n" not in found.log:
            time.sleep(0.05)
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(30) == 0
        assert list(temporary.iterdir()) == []
        asking.join(30)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signals")
def test_what_a_killed_server_left_is_removed_by_the_next_one(temporary, monkeypatch):
    planted = temporary / "rectgrad-app-99999999999999999999-x"
    planted.mkdir()
    with explorer.served("--model", "cifar10_cnn", TMPDIR=str(temporary)) as found:
        client = explorer.Client(found.url)
        with contextlib.closing(client.http):
            assert client.upload(png_of(0)).is_success
        assert len(list(temporary.glob("*/*"))) == 1
        found.process.kill()
        found.process.wait(30)
    assert len(list(temporary.glob("*/*"))) == 1
    monkeypatch.setattr(server.tempfile, "tempdir", str(temporary))
    server.TemporaryFolder().close()  # what a server starts and ends with
    assert list(temporary.iterdir()) == [planted]
