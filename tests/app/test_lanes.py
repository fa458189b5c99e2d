"""Fair shares of computing time, and limits of connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rectgrad.app import connections, lanes
from rectgrad.app.lanes import Lane, Owner, Usage


class Item:
    """A computation of several passes. `clock` counts them; each takes a second of the patched clock."""

    def __init__(self, lane: Lane, owner: Owner, passes: int, log: list[Owner], clock: list[float]) -> None:
        self.owners, self.seconds = [owner], 0.0
        self.lane, self.passes, self.log, self.clock = lane, passes, log, clock
        self.ended = threading.Event()

    def work(self) -> None:
        for _ in range(self.passes):
            self.lane.checkpoint(self)
            self.clock[0] += 1
            self.log.append(self.owners[0])
        self.ended.set()


class Gate(Item):
    """Keeps its lane busy until it is opened, so that what follows waits in the queue together."""

    def work(self) -> None:
        self.ended.wait()


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def run(clock: list[float], wanted: list[tuple[Owner, int]], threads: int = 4) -> list[Owner]:
    """Whose passes ran, in order. All computations are queued before the first one starts."""
    lane, log = Lane(threads), []
    gates = [Gate(lane, ("", ""), 0, log, clock) for _ in range(threads)]
    items = [Item(lane, owner, passes, log, clock) for owner, passes in wanted]
    for item in (*gates, *items):
        lane.submit(item)
    [gate.ended.set() for gate in gates]
    assert all(item.ended.wait(30) for item in items)
    assert lane.idle.wait(30)
    return log


def test_visitors_get_equal_shares_however_much_they_ask_for(clock):
    greedy, modest = ("10.0.0.1", "a"), ("10.0.0.2", "b")
    log = run(clock, [*[(greedy, 100)] * 3, (modest, 20)])
    end = len(log) - log[::-1].index(modest)
    assert log.count(modest) == 20
    assert log[:end].count(greedy) <= 30  # it had finished after 20 of 100 passes of one of the others


def test_many_sessions_of_one_address_do_not_get_more(clock):
    several = [(("10.0.0.1", f"{i}"), 60) for i in range(3)]
    log = run(clock, [*several, (("10.0.0.2", "b"), 20)])
    addresses = [owner[0] for owner in log]
    end = len(log) - addresses[::-1].index("10.0.0.2")
    assert addresses[:end].count("10.0.0.1") <= 30


def test_sessions_of_one_address_share_it_equally(clock):
    log = run(clock, [(("10.0.0.1", "a"), 100), (("10.0.0.1", "b"), 20)])
    end = len(log) - [owner[1] for owner in log][::-1].index("b")
    assert [owner[1] for owner in log[:end]].count("a") <= 30


def test_who_comes_later_does_not_wait_for_a_whole_queue(clock):
    """One thread, as for fast maps: forty requests of one visitor, then one of another."""
    log = run(clock, [*[(("10.0.0.1", f"{i}"), 1) for i in range(40)], (("10.0.0.2", "b"), 1)], threads=1)
    assert [owner[0] for owner in log].index("10.0.0.2") <= 1


def test_use_is_forgotten(clock):
    usage = Usage()
    usage.add(("10.0.0.1", "a"), 8.0)
    item: Any = SimpleNamespace(owners=[("10.0.0.1", "a")])
    clock[0] += 3 * lanes.HALF_LIFE
    usage.add(("10.0.0.2", "b"), 1.0)
    assert usage.of(item) == (1.0, 1.0)
    clock[0] += 30 * lanes.HALF_LIFE
    usage.add(("10.0.0.3", "c"), 1.0)
    assert set(usage._used) == {"10.0.0.3", "c"}  # memory stays level over many visitors


def test_what_was_discarded_does_not_run_and_leaves_the_lane_idle(clock):
    lane, log = Lane(), []
    gate, item = Gate(lane, ("", ""), 0, log, clock), Item(lane, ("", ""), 1, log, clock)
    lane.submit(gate)
    lane.submit(item)
    lane.discard(item)
    assert not lane.idle.is_set()
    gate.ended.set()
    assert lane.idle.wait(30)
    assert log == []


# --- connections ---


async def listening() -> tuple[asyncio.Server, int, list[Any]]:
    """A server with our protocol, its port, and the paths that it was asked for."""
    import uvicorn

    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=connections.limited_protocol(), ws="none", log_level="critical")
    config.load()
    state = uvicorn.Server(config).server_state
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    return server, server.sockets[0].getsockname()[1], asked


class Connection:
    """A client's connection from an address of this machine."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self._opened = socket.create_connection(("127.0.0.1", port), 20, (address, 0))

    def answer(self, sent: bytes) -> bytes:
        """Sends some bytes and returns the first ones of the answer; empty if the connection was closed."""
        try:
            self._opened.sendall(sent)
            return self._opened.recv(15)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._opened.close()


def request(path: str) -> bytes:
    return f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def with_a_server(test: Any) -> None:
    """Runs test(port, paths that the server was asked for) in a thread."""

    async def run() -> None:
        server, port, asked = await listening()
        await asyncio.wait_for(asyncio.to_thread(test, port, asked), 60)
        server.close()

    asyncio.run(run())


def test_an_address_has_a_limited_number_of_connections(monkeypatch):
    monkeypatch.setattr(connections, "CONNECTIONS", 5)

    def test(port: int, asked: list[Any]) -> None:
        held = [Connection(port) for _ in range(5)]
        assert all(each.answer(request("held")) for each in held)
        refused = Connection(port)
        assert refused.answer(request("refused")) == b""
        other = Connection(port, "127.0.0.2")
        assert other.answer(request("other")) == b"HTTP/1.1 200 OK"
        held.pop().close()
        for _ in range(1000):  # the place is free once the server has noticed
            again = Connection(port)
            if found := again.answer(request("again")):
                break
            again.close()
        assert found == b"HTTP/1.1 200 OK"
        assert set(asked) == {"/held", "/other", "/again"}
        [each.close() for each in (*held, refused, other, again)]

    with_a_server(test)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc"], ids=["nothing", "half a request"])
def test_a_connection_that_sends_no_request_is_closed(sent, monkeypatch):
    monkeypatch.setattr(connections, "SILENCE", 0.1)

    def test(port: int, asked: list[Any]) -> None:
        silent = Connection(port)
        assert silent.answer(sent) == b""
        silent.close()
        assert asked == []

    with_a_server(test)
