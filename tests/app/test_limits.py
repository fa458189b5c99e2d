"""What no visitor can do: use up the disk, keep others waiting, learn about folders, or ask for too much.

The application runs in this process, without a server."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import rectgrad
from rectgrad.app import controls, drawing, routes, server, sessions, work
from rectgrad.app.folder import Folder
from rectgrad.app.guard import Guard
from rectgrad.app.routes import Explorer, create
from rectgrad.app.service import Service
from rectgrad.app.streams import message_of
from rectgrad.models import load


@pytest.fixture(scope="module")
def service():
    return Service(load("cifar10_cnn"))


@pytest.fixture
def explorer(service, monkeypatch, tmp_path):
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    found = Explorer(service, server.TemporaryFolder())
    yield found
    assert found.close()


def png_of(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


class Visitor:
    """A client of the application in this process."""

    def __init__(self, explorer: Explorer, address: str = "10.0.0.1") -> None:
        self.app = Guard(create(explorer), frozenset(["localhost"]), False, None)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(address, 1))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self.photo = ""

    async def enter(self) -> Visitor:
        self.http.headers["session"] = (await self.http.post("/api/session")).json()["session"]
        return self

    async def upload(self, content: Any) -> httpx.Response:
        answer = await self.http.post("/api/upload", content=content, params={"name": "photo.png"})
        self.photo = answer.json().get("photo", "")
        return answer

    async def ask(self, route: str, **more: Any) -> httpx.Response:
        view = {"photo": self.photo, "model": "cifar10_cnn", **more}
        return await self.http.post(f"/api/{route}", json=view)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def stored(explorer: Explorer) -> int:
    return sum(each.stat().st_size for each in explorer.temporary.path.iterdir())


# --- the disk ---


def test_uploads_of_many_visitors_at_a_time_stay_within_the_quota(explorer, monkeypatch):
    for module in (sessions, routes):
        monkeypatch.setattr(module, "STORED", 4000)
    most = 0

    async def parts() -> Any:
        nonlocal most
        for _ in range(10):
            yield b"0" * 100
            await asyncio.sleep(0)
            most = max(most, stored(explorer))

    async def test() -> None:
        visitors = [await Visitor(explorer, f"10.0.0.{i}").enter() for i in range(12)]
        statuses: list[int] = []
        for _ in range(3):
            found = await asyncio.gather(*(each.upload(parts()) for each in visitors))
            statuses += [each.status_code for each in found]
        assert set(statuses) == {200, 503}  # some have to try again
        assert statuses.count(200) >= 6
        one = await visitors[0].upload(parts())
        assert one.status_code == 200  # nothing that was refused is still counted
        assert explorer._arriving == 0

    run(test)
    assert 2000 < most <= 4000
    assert stored(explorer) <= 4000


def test_an_upload_into_a_session_that_ended_meanwhile_is_not_kept(explorer):
    async def test() -> None:
        visitor = await Visitor(explorer).enter()

        async def parts() -> Any:
            yield b"0" * 100
            explorer.sessions.end(visitor.http.headers["session"])
            yield b"0" * 100

        assert (await visitor.upload(parts())).status_code == 401

    run(test)
    assert list(explorer.temporary.path.iterdir()) == []


def test_an_upload_whose_client_vanishes_leaves_nothing(explorer):
    async def test() -> None:
        visitor = await Visitor(explorer).enter()
        messages = [{"type": "http.request", "body": b"0" * 100, "more_body": True}]

        async def receive() -> Any:
            while not messages and not stored(explorer) and not explorer._arriving:
                await asyncio.sleep(0)
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(_: Any) -> None: ...

        token = visitor.http.headers["session"].encode()
        scope = {"type": "http", "method": "POST", "path": "/api/upload", "query_string": b"", "client": None}
        await visitor.app({**scope, "headers": [(b"host", b"localhost"), (b"session", token)]}, receive, send)
        assert explorer._arriving == 0
        assert not explorer.sessions.get(token.decode()).uploads

    run(test)
    assert list(explorer.temporary.path.iterdir()) == []


def test_a_full_disk_is_an_error_message_and_leaves_nothing(explorer, monkeypatch):
    class Full(io.FileIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device", self.name)

    monkeypatch.setattr(routes, "open", Full, raising=False)

    async def test() -> None:
        answer = await (await Visitor(explorer).enter()).upload(b"0" * 100)
        assert (answer.status_code, answer.json()["error"]) == (507, "The server cannot store the photo.")

    run(test)
    assert list(explorer.temporary.path.iterdir()) == []


# --- what may be asked for ---


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("smoothgrad", {"samples": 10_001}, "at most 10000 inputs for one map, not 10001"),
        ("integrated_gradients", {"steps": 10**30}, "at most 10000 inputs"),
        ("expected_gradients", {"samples": 10**9}, "at most 10000 inputs"),
        ("rise", {"masks": 10_001}, "at most 10000 inputs"),
        ("rise", {"cells": 33}, "at most 32 cells, not 33"),
        ("smoothgrad", {"over": "rise"}, "does not combine smoothgrad with rise"),
        ("guided_gradcam", {"over": "rise"}, "does not combine guided_gradcam with rise"),
        ("integrated_gradients", {"over": "smoothgrad"}, "does not combine integrated_gradients with smooth"),
    ],
)
def test_a_request_for_too_much_is_refused(explorer, method, options, sentence):
    async def test() -> None:
        visitor = await Visitor(explorer).enter()
        await visitor.upload(png_of(0))
        kind = type(rectgrad.METHODS[method]).__name__
        for route in ("maps", "layers", "sparsity", "script", "download/npz"):
            answer = await visitor.ask(route, methods=[method], options={kind: options})
            assert answer.status_code == 400, route
            assert sentence in answer.json()["error"]

    run(test)


def test_every_choice_that_the_page_offers_is_allowed():
    for kind, own in controls.options().items():
        names = [name for name, method in rectgrad.METHODS.items() if type(method).__name__ == kind]
        for option in own:
            for choice in option["choices"]:
                given = {kind: {option["name"]: choice["value"]}}
                view = routes.View(photo="", model="", methods=names[:1], options=given)
                view.query()


# --- what others notice ---


class Blocking:
    """Replaces a function by one that reports which thread runs it."""

    def __init__(self, function: Any) -> None:
        self.function, self.threads = function, []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.threads.append(threading.current_thread())
        return self.function(*arguments, **named)


def test_files_are_not_written_on_the_event_loop(explorer, monkeypatch):
    """It answers all visitors, and a sheet or an archive of many maps takes a while."""
    drawn, packed = Blocking(drawing.sheet), Blocking(np.savez_compressed)
    monkeypatch.setattr(drawing, "sheet", drawn)
    monkeypatch.setattr(routes.np, "savez_compressed", packed)

    async def test() -> None:
        visitor = await Visitor(explorer).enter()
        await visitor.upload(png_of(0))
        for kind in ("png", "npz"):
            assert (await visitor.ask(f"download/{kind}", methods=["saliency"])).status_code == 200

    run(test)
    assert len(drawn.threads) == len(packed.threads) == 1
    assert threading.main_thread() not in (*drawn.threads, *packed.threads)


def test_a_map_that_one_visitor_sees_and_another_downloads(explorer, service, monkeypatch):
    """Both wait for one computation, and both get it."""

    async def test() -> None:
        visitors = [await Visitor(explorer, f"10.0.0.{i}").enter() for i in range(3)]
        for each in visitors:
            await each.upload(png_of(1))
            assert (await each.ask("open")).is_success
        asked = {"methods": ["smoothgrad"], "options": {"SmoothGrad": {"samples": 300}}}
        first = asyncio.create_task(visitors[0].ask("maps", **asked))
        while not any(task.done > 0 for task in explorer.work._tasks.values()):
            await asyncio.sleep(0.01)
        others = [
            visitors[1].ask("download/npz", **asked),
            visitors[2].ask("maps", **asked, measure=["smoothgrad"]),
        ]
        answers = await asyncio.gather(first, *others)
        assert [each.status_code for each in answers] == [200] * 3

    run(test)


def test_what_a_client_that_is_gone_asked_for_is_stopped(explorer, monkeypatch):
    """Its computation ends, and a queued one never runs, whatever route was asked."""
    ended: list[type] = []
    original = work.Task.run

    def watched(self: work.Task, compute: Any) -> Any:
        try:
            return original(self, compute)
        except BaseException as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(work.Task, "run", watched)

    async def test() -> None:
        visitor = await Visitor(explorer).enter()
        await visitor.upload(png_of(2))
        assert (await visitor.ask("open")).is_success
        for i, route in enumerate(("maps", "download/npz", "download/png")):
            options = {"IntegratedGradients": {"steps": 9990 + i}}
            asked = asyncio.create_task(visitor.ask(route, methods=["integrated_gradients"], options=options))
            while not any(task.done > 1 for task in explorer.work._tasks.values()):
                await asyncio.sleep(0.01)
            asked.cancel()
            while len(ended) <= i:
                await asyncio.sleep(0.01)
        assert ended == [work.Stopped] * 3
        assert not explorer.work._tasks

    run(test)


# --- what is told ---


WITHOUT_SESSION = {"/", "/page/{name}", "/api/session", "/api/pause"}


def test_only_these_endpoints_answer_without_a_session(explorer, tmp_path):
    """The page, its scripts, a new session with the names of methods, and the end of a session that has to be
    named."""
    app = create(explorer)
    assert {route.path for route in app.routes} >= WITHOUT_SESSION

    async def test() -> None:
        visitor = Visitor(explorer)
        view = {"photo": "sample:chelsea", "model": "cifar10_cnn", "methods": ["saliency"]}
        for route in app.routes:
            for token in ({}, {"session": "guessed"}):
                path = route.path.format(name="main.js", kind="npz")
                (method,) = route.methods - {"HEAD"}
                sent = (
                    view if route.path not in ("/api/open", "/api/classes") else dict(list(view.items())[:2])
                )
                answer = await visitor.http.request(method, path, json=sent, headers=token)
                answered = answer.status_code == 200
                assert answered == (route.path in WITHOUT_SESSION), (route.path, answer.text)
        assert (await visitor.http.post("/api/pause", content=b"guessed")).text == "null"

    run(test)
    assert explorer.work._tasks == {}  # and nothing was computed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "/home/me/x.png"), "directory: 'x.png'"),
        (ValueError("cannot read /srv/models/w.pt: empty"), "cannot read w.pt: empty"),
        (RuntimeError("in '/opt/my app/lib/x.py', line 3"), "in 'x.py', line 3"),
        (ValueError(r"C:\Users\me\w.pt is missing"), "w.pt is missing"),
        (PermissionError(13, "Permission denied", "/home/me/x.png"), ""),
        (KeyError("/home/me/x.png"), ""),
        (MemoryError("/home/me"), "Not enough memory."),
    ],
)
def test_errors_say_nothing_of_folders(explorer, monkeypatch, error, said):
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(explorer.service, "open", failing)

    async def test() -> None:
        visitor = await Visitor(explorer).enter()
        await visitor.upload(png_of(3))
        answer = await visitor.ask("open")
        assert answer.status_code in (400, 500)
        assert said in answer.text
        for folder in ("home", "me/", "srv", "models", "opt", "my app", "Users", "/tmp", "Traceback"):
            assert folder not in answer.text

    run(test)


def test_messages_keep_what_is_no_folder():
    for text in ("q must be from 0 to 100, not 1/2", "see https://example.org/a/b", "a/b is not a class"):
        assert message_of(ValueError(text)) == text
    assert message_of(ValueError("")) == "ValueError"


def test_the_temporary_folder_is_for_its_owner_alone(explorer):
    assert explorer.temporary.path.stat().st_mode & 0o077 == 0
    names = {explorer.temporary.new_file().name for _ in range(100)}
    assert len(names) == 100
    assert all(len(Path(name).name) == 32 for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_photos_of_the_folder_with_strange_names_can_be_opened(service, monkeypatch, tmp_path):
    names = [b"-x.png", b"caf\xe9.png", b"n\n.png", b"a" * 251 + b".png", b"con.png"]
    folder = tmp_path / "photos"
    (folder / "deep.png").mkdir(parents=True)
    for i, name in enumerate([*names, b"deep.png/in.png"]):
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(png_of(i))
    Path(os.fsdecode(os.path.join(os.fsencode(folder), b"bad\xe9.png"))).write_bytes(b"no photo")
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pipe")
    (folder / "pipe.png").symlink_to(tmp_path / "pipe")
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    browsed = Folder(Path("photos"), service)
    explorer = Explorer(service, server.TemporaryFolder(), browsed)
    browsed.start()
    assert browsed.finished.wait(60)
    assert len(browsed.classes) == 6  # the others are reported when they are opened

    async def test() -> None:
        visitor = await Visitor(explorer).enter()
        answers = []
        for id in browsed.ids:
            visitor.photo = f"folder:{id}"
            answers.append(await visitor.ask("open"))
        assert sorted(each.status_code for each in answers) == [200] * 6 + [400] * 3
        errors = [each.json()["error"] for each in answers if each.status_code == 400]
        assert sorted(each.partition(":")[0] for each in errors) == ["bad\ufffd.png", "loop.png", "pipe.png"]
        assert not any("photos/" in each for each in errors)

    run(test)
    assert explorer.close()
