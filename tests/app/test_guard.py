"""What a request has to pass before a route sees it: host name, origin, password, size, number and time."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace
from typing import Any

import pytest

from rectgrad.app import guard
from rectgrad.app.connections import network_of
from rectgrad.app.guard import Guard, Login

LOCAL = frozenset(["127.0.0.1", "localhost", "::1"])
RIGHT = ("authorization", f"Basic {base64.b64encode(b'me:secret').decode()}")
WRONG = ("authorization", f"Basic {base64.b64encode(b'me:guess').decode()}")


class App:
    """Reads the body and answers 200, once it is released. Remembers what happened to its requests."""

    def __init__(self, waits: bool = False) -> None:
        self.released, self.begun = asyncio.Event(), asyncio.Event()
        if not waits:
            self.released.set()
        self.received: list[int] = []
        self.cancelled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            size, more = 0, True
            while more:
                message = await receive()
                size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            self.received.append(size)
            self.begun.set()
            await self.released.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"answer"})
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def ask(
    app: Any,
    *headers: tuple[str, str],
    host: str = "localhost",
    path: str = "/",
    body: tuple[bytes, ...] = (b"",),
    client: str = "10.0.0.1",
    gone: asyncio.Event | None = None,
) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer; 0 if there is none. The client leaves when `gone` is set."""
    parts = list(body)
    answer: dict[str, Any] = {"status": 0, "headers": []}

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.update(message)

    listed = [(k.encode(), v.encode()) for k, v in (("host", host), *headers)]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": listed}
    await app({**scope, "client": (client, 1), "asgi": {"version": "3.0"}}, receive, send)
    return answer["status"], {k.decode().lower(): v.decode() for k, v in answer["headers"]}


def guarded(app: App, addresses: bool = False, login: Login | None = None) -> Guard:
    return Guard(app, LOCAL, addresses, login)


def run(test: Any) -> None:
    """Fails after 30 s. Not by cancelling the test: the guard answers that, as if the server stopped."""

    async def bounded() -> None:
        task = asyncio.ensure_future(test())
        done, _ = await asyncio.wait([task], timeout=30)
        task.cancel()
        await asyncio.wait([task])
        assert done, "no answer within 30 s"
        task.result()

    asyncio.run(bounded())


# --- names ---


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost", "LocalHost:1", "[::1]:7860"])
def test_the_names_of_the_server_are_accepted(host):
    async def test() -> None:
        assert (await ask(guarded(App()), host=host))[0] == 200
        assert (await ask(guarded(App(), addresses=True), host=host))[0] == 200

    run(test)


NAMES = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example:7860",
    "",
    "[::1",
    "localhost:1:2x]",
]
NAMES += ["localhost@evil.example", "evil.example#localhost", "127.1", "0"]


@pytest.mark.parametrize("addresses", [False, True])
@pytest.mark.parametrize("host", NAMES)
def test_other_names_are_not(host, addresses):
    """DNS rebinding: the page of another site reaches this machine under that site's name."""

    async def test() -> None:
        app = App()
        assert (await ask(guarded(app, addresses), host=host))[0] == 403
        assert app.received == []

    run(test)


@pytest.mark.parametrize("host", ["192.168.0.7:7860", "169.254.169.254", "[fe80::1]:7860"])
def test_addresses_are_accepted_where_others_can_connect(host):
    async def test() -> None:
        assert (await ask(guarded(App(), addresses=True), host=host))[0] == 200
        assert (await ask(guarded(App()), host=host))[0] == 403

    run(test)


@pytest.mark.parametrize(
    ("origin", "accepted"),
    [
        ("http://localhost:7860", True),
        ("https://localhost:7860", True),  # a proxy that encrypts
        ("http://localhost:8000", False),
        ("http://localhost", False),
        ("http://evil.example", False),
        ("http://127.0.0.1:7860", False),
        ("null", False),
        ("", False),
    ],
)
def test_pages_of_other_sites_cannot_upload(origin, accepted):
    async def test() -> None:
        app = App()
        status, _ = await ask(guarded(app), ("origin", origin), host="localhost:7860", path="/api/upload")
        assert (status, len(app.received)) == ((200, 1) if accepted else (403, 0))

    run(test)


# --- passwords ---


def test_nothing_is_answered_without_the_password():
    async def test() -> None:
        app = App()
        own = guarded(app, login=Login("me", "secret"))
        for path in ("/", "/page/main.js", "/api/session", "/api/pause", "/api/upload", "/nonsense"):
            for headers in ((), (WRONG,), (("authorization", RIGHT[1].replace("Basic", "Bearer")),)):
                status, said = await ask(own, *headers, path=path, client=f"10.0.{len(headers)}.{len(path)}")
                assert status == 401
                assert "set-cookie" not in said
        for nonsense in ("Basic", "Basic ???", "Basic bWU=", "Basic é", "Basic " + "A" * 5000):
            status, _ = await ask(own, ("authorization", nonsense), client=f"10.1.0.{len(nonsense)}")
            assert status == 401
        assert app.received == []
        assert (await ask(own, RIGHT))[0] == 200

    run(test)


def test_guesses_are_slowed_down(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now))

    async def test() -> None:
        nonlocal now
        own = guarded(App(), login=Login("me", "secret"))
        cookie = ("cookie", (await ask(own, RIGHT))[1]["set-cookie"].partition(";")[0])
        assert [(await ask(own))[0] for _ in range(30)] == [401] * 30  # a first visit is no guess
        assert [(await ask(own, WRONG))[0] for _ in range(15)] == [401] * guard.GUESSES + [429] * 5
        assert (await ask(own, RIGHT))[0] == 429  # not even looked at: no answer says whether it was right
        assert (await ask(own, cookie))[0] == 200  # who has logged in is not affected
        assert (await ask(own, RIGHT, client="10.0.0.2"))[0] == 200
        assert (await ask(own, ("cookie", cookie[1][:-1]), client="10.0.0.3"))[0] == 401
        now += 59
        assert (await ask(own, RIGHT))[0] == 429
        now += 2
        assert (await ask(own, RIGHT))[0] == 200

    run(test)


def test_all_addresses_of_an_ipv6_network_guess_together():
    async def test() -> None:
        own = guarded(App(), login=Login("me", "secret"))
        found = [(await ask(own, WRONG, client=f"2001:db8::{i}:1"))[0] for i in range(1, 15)]
        assert found == [401] * guard.GUESSES + [429] * 4
        assert (await ask(own, RIGHT, client="2001:db8:0:1::1"))[0] == 200

    run(test)


def test_the_network_of_an_address():
    assert network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"  # IPv4 visitors of an IPv6 socket
    assert network_of("2001:db8::1:2") == network_of("2001:db8::ffff") == "2001:db8::/64"
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("") == ""


# --- size, number and time ---


@pytest.mark.parametrize(("path", "limit"), [("/api/maps", guard.BODY), ("/api/upload", guard.UPLOAD)])
def test_a_request_is_bounded_whatever_length_it_declares(path, limit):
    async def test() -> None:
        app, part = App(), b"0" * (limit // 8)
        assert (await ask(guarded(app), path=path, body=(part,) * 8))[0] == 200
        assert app.received == [limit]
        status, said = await ask(guarded(app), path=path, body=(*(part,) * 8, b"0", b"more"))
        assert (status, said["connection"]) == (413, "close")
        assert app.received == [limit]

    run(test)


def test_a_session_has_a_limited_number_of_requests_at_a_time():
    async def test() -> None:
        app = App(waits=True)
        own = guarded(app)
        waiting = [asyncio.create_task(ask(own, ("session", "a"))) for _ in range(guard.REQUESTS)]
        while len(app.received) < guard.REQUESTS:
            await asyncio.sleep(0)
        assert (await ask(own, ("session", "a")))[0] == 429
        other = asyncio.create_task(ask(own, ("session", "b")))
        app.released.set()
        assert [status for status, _ in await asyncio.gather(*waiting, other)] == [200] * (guard.REQUESTS + 1)
        assert (await ask(own, ("session", "a")))[0] == 200
        assert not own._open  # nothing is kept of sessions without requests

    run(test)


def test_an_answer_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(guard, "SECONDS", 0.05)

    async def test() -> None:
        app = App(waits=True)
        assert (await ask(guarded(app)))[0] == 503
        assert app.cancelled == 1

    run(test)


def test_a_request_whose_client_is_gone_is_cancelled():
    async def test() -> None:
        app, gone = App(waits=True), asyncio.Event()
        asked = asyncio.create_task(ask(guarded(app), gone=gone))
        await app.begun.wait()
        assert not asked.done()
        gone.set()
        await asked
        assert app.cancelled == 1

    run(test)


def test_a_server_that_stops_says_so():
    async def test() -> None:
        app = App(waits=True)
        asked = asyncio.create_task(ask(guarded(app)))
        await app.begun.wait()
        asked.cancel()
        assert (await asked)[0] == 503
        assert app.cancelled == 1

    run(test)


def test_an_error_of_the_application_is_not_hidden():
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async def test() -> None:
        with pytest.raises(ZeroDivisionError):
            await ask(Guard(broken, LOCAL, False, None))

    run(test)


def test_every_answer_forbids_other_sites_to_use_it():
    async def test() -> None:
        for host in ("localhost", "evil.example"):
            _, said = await ask(guarded(App()), host=host)
            assert said["content-security-policy"].startswith("default-src 'self'")
            assert said["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in said

    run(test)
