"""Serves the page: access checks, limits, and temporary files that are always removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import webbrowser
from pathlib import Path
from typing import Any

from rectgrad.app.connections import limited_protocol
from rectgrad.app.guard import Guard, Login
from rectgrad.photos import files

MINUTES = 15  # lifetime of a temporary file
AUTH = "RECTGRAD_AUTH"  # environment variable with user:password
LOCAL = ("127.0.0.1", "localhost", "::1")
FIRST_PORT = 7860
PORTS = 100  # ports to try


def check_access(host: str, auth: Path | None, insecure: bool) -> Login | None:
    """User name and password, from a file or the environment. Access from other machines requires them, or
    `insecure`."""
    if auth is not None and ":" in str(auth) and not auth.exists():
        raise ValueError(
            "--auth expects a file that contains user:password, as other users can see the command line; "
            f"or set {AUTH} in the environment"
        )
    given = os.environ.get(AUTH) if auth is None else _first_line(auth)
    if given is not None:
        user, colon, password = given.partition(":")
        if not (user and colon and password):
            raise ValueError(f"{auth or AUTH} must have the form user:password")
        return Login(user, password)
    if host not in LOCAL and not insecure:
        raise ValueError(
            f"--host {host} makes the page reachable from other machines: use --auth FILE, a file with "
            "user:password, or --insecure for access without a password"
        )
    return None


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--auth {path}: {getattr(error, 'strerror', None) or error}") from None


def accepted_names(host: str, more: list[str]) -> frozenset[str]:
    """The names that a request may give as its host."""
    own = () if host in LOCAL else (host, socket.gethostname(), socket.getfqdn())
    return frozenset(name.lower() for name in (*LOCAL, *own, *more))


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens on this address; without a port, on the first free one from 7860 on."""
    candidates = [port] if port else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    for i, candidate in enumerate(candidates):
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
            opened = socket.socket(family, kind)
            try:
                if os.name != "nt":
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                opened.bind(address)
                opened.listen(128)
            except BaseException:
                opened.close()
                raise
            return opened
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and not isinstance(error, socket.gaierror)
            if taken and i + 1 < len(candidates):
                continue
            where = f"--host {host}" + (f" --port {port}" if port else "")
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot listen on {where}: {reason}") from None
    raise AssertionError


class TemporaryFolder:
    """A folder for uploads. Old files are removed regularly, the whole folder on exit.

    Folders left by servers that were killed are removed at the next start.
    """

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob("rectgrad-app-*"):
            owner = folder.name.split("-")[2]
            if files.ended(owner):  # other names are not ours
                shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"rectgrad-app-{os.getpid()}-"))
        self._stop = threading.Event()

    def new_file(self) -> Path:
        """A new path with a random name that cannot be guessed."""
        return self.path / secrets.token_hex(16)

    def start(self) -> None:
        threading.Thread(target=self._clean_up, daemon=True).start()

    def _clean_up(self) -> None:
        while not self._stop.wait(30):
            self.remove_old(time.time() - 60 * MINUTES)

    def remove_old(self, before: float) -> None:
        """Removes files and empty folders older than `before`. Sessions, or the system, may delete some at
        the same time."""
        for folder, folders, names in os.walk(self.path, topdown=False):
            for name in (*names, *folders):
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    if path.lstat().st_mtime < before:
                        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def close(self) -> None:
        self._stop.set()
        shutil.rmtree(self.path, ignore_errors=True)


def url_of(opened: socket.socket, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{opened.getsockname()[1]}"


def serve(app: Guard, opened: socket.socket, url: str, browser: bool, proxied: bool = False) -> None:
    """Serves until Ctrl-C or SIGTERM. `proxied`: a proxy on this machine reports the addresses of visitors.
    Without one, anybody on this machine could invent addresses, to guess passwords or to get more time."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print(f"rectgrad: {url}  (Ctrl-C to stop)", flush=True)
            if browser:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    config = uvicorn.Config(
        app,
        http=limited_protocol(),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        proxy_headers=proxied,
        ws="none",
    )
    with opened:
        Server(config).run(sockets=[opened])
