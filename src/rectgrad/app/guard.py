"""The checks that every request passes before a route sees it: host name, origin, password, size, number and
time. Also cancels requests whose client has disconnected.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rectgrad.app.connections import network_of

UPLOAD = 20 * 2**20  # bytes of a photo
BODY = 2**17  # bytes of any other request
REQUESTS = 12  # at a time, for each session
SECONDS = 900  # limit for an answer; a single map has its own
GUESSES = 10  # wrong passwords that an address can try in a minute
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Login:
    """Checks user name and password.

    Wrong guesses are counted for each address. Beyond the limit, no guess from there is checked for up to a
    minute. A browser that has logged in has a cookie, so the guesses of others do not affect it.
    """

    def __init__(self, user: str, password: str) -> None:
        self._expected = f"{user}:{password}".encode()
        self._cookie = secrets.token_urlsafe(32)
        self._wrong: list[tuple[float, str]] = []  # time and address

    def refusal(self, request: Request) -> Response | None:
        """The response to a request that may not pass; None if it may."""
        if secrets.compare_digest(request.cookies.get("rectgrad", "").encode(), self._cookie.encode()):
            return None
        address, now = address_of(request), time.monotonic()
        self._wrong = [(at, who) for at, who in self._wrong if at > now - 60]
        if sum(who == address for _, who in self._wrong) >= GUESSES:
            return JSONResponse({"error": "Too many wrong passwords. Try again in a minute."}, 429)
        header = request.headers.get("authorization", "")
        if self._is_right(header):
            return None
        if header:  # a browser's first request has none
            self._wrong.append((now, address))
        return Response(status_code=401, headers={"WWW-Authenticate": 'Basic realm="rectgrad"'})

    def cookie(self) -> str:
        return f"rectgrad={self._cookie}; HttpOnly; SameSite=Strict; Path=/"

    def _is_right(self, header: str) -> bool:
        """The comparison takes constant time."""
        scheme, _, encoded = header.partition(" ")
        try:
            given = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return False
        return scheme.lower() == "basic" and secrets.compare_digest(given, self._expected)


def address_of(request: Request) -> str:
    return network_of(request.client.host) if request.client is not None else ""


class Guard:
    """Wraps the application.

    `names` are the accepted host names; with `addresses`, any IP address is accepted too. This prevents DNS
    rebinding: a page of another site cannot reach the server under that site's name. What such a page sends
    to an accepted name has a foreign origin.
    """

    def __init__(self, app: Any, names: frozenset[str], addresses: bool, login: Login | None) -> None:
        self._app, self._names, self._addresses, self._login = app, names, addresses, login
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        session = request.headers.get("session", "")
        refused = self._refusal(request, session)
        reply = self._with_headers(send, cookie=refused is None)
        if refused is not None:
            await refused(scope, receive, reply)
            return
        self._open[session] += 1
        try:
            await self._answer(scope, receive, reply)
        finally:
            self._open[session] -= 1
            self._open += Counter()  # removes zeros

    def _refusal(self, request: Request, session: str) -> Response | None:
        host = request.headers.get("host", "")
        if not self._serves(host):
            return JSONResponse({"error": "This server does not accept requests for this host name."}, 403)
        if request.headers.get("origin", f"http://{host}").partition("://")[2] != host:
            return JSONResponse({"error": "This server does not accept requests from other sites."}, 403)
        if self._login is not None and (refused := self._login.refusal(request)) is not None:
            return refused
        if session and self._open[session] >= REQUESTS:
            return JSONResponse({"error": "Too many requests at a time."}, 429)
        return None

    def _serves(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or (self._addresses and _is_address(name))

    def _with_headers(self, send: Send, cookie: bool) -> Send:
        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if cookie and self._login is not None:
                    headers["Set-Cookie"] = self._login.cookie()
            await send(message)

        return reply

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        """Runs the application until it has answered, the client is gone, or the time is up."""
        limit = UPLOAD if scope["path"] == "/api/upload" else BODY
        incoming: asyncio.Queue[Message] = asyncio.Queue(1)
        started = too_large = False

        async def listen() -> None:
            """Passes the body on. Returns if the client is gone, or if the body is too large."""
            nonlocal too_large
            size = 0
            while True:
                message = await receive()
                size += len(message.get("body", b""))
                too_large = size > limit
                if message["type"] == "http.disconnect" or too_large:
                    return
                await incoming.put(message)

        async def reply(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, incoming.get, reply))
        tasks, stopping = [answering, asyncio.ensure_future(listen())], False
        try:
            await asyncio.wait(tasks, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            stopping = True  # the server stops; it would print a traceback for each request
        await _end(tasks)
        if answering.cancelled() and not started:
            await _unanswered(too_large, stopping, limit)(scope, receive, send)
        elif answering.cancelled() and stopping:
            await send({"type": "http.response.body", "body": b""})
        elif not answering.cancelled():
            answering.result()  # raises the application's error


async def _end(tasks: list[asyncio.Future[None]]) -> None:
    """Cancels the tasks and waits for them. A server that stops cancels every request twice."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
    for task in tasks:
        task.cancelled() or task.exception()  # otherwise asyncio reports it


def _unanswered(too_large: bool, stopping: bool, limit: int) -> Response:
    if too_large:
        said = f"The request is larger than the limit of {limit / 2**20:g} MB."
        return JSONResponse({"error": said}, 413, {"Connection": "close"})
    return JSONResponse({"error": "The server is stopping." if stopping else "This takes too long."}, 503)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
