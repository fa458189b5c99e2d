"""Serving the page: to whom, within which bounds, and leaving nothing behind."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from rectgrad.photos import files

UPLOAD = "20mb"
MINUTES = 15  # that a temporary file is kept
MEGABYTES = 1000  # of temporary files, together
LOCAL = ("127.0.0.1", "localhost", "::1")


def check_open(host: str, auth: str | None, insecure: bool) -> tuple[str, str] | None:
    """User and password, where given. Others can reach a page that is not served to this machine alone."""
    if auth is not None:
        user, colon, password = auth.partition(":")
        if not (user and colon and password):
            raise ValueError("--auth takes user:password")
        return user, password
    if host not in LOCAL and not insecure:
        raise ValueError(
            f"--host {host} lets others reach this page: give --auth user:password, or --insecure to let "
            "everybody in"
        )
    return None


def check_place(host: str, port: int | None) -> None:
    """Whether it can be served there: an address of this machine, and a port that is free."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (OSError, OverflowError) as error:
        where = f"--host {host}" + (f" --port {port}" if port else "")
        raise ValueError(f"{where} cannot be served: {getattr(error, 'strerror', None) or error}") from None


class Temporary:
    """A folder of our own for uploads and downloads: old files go, and all of it at the end. What a server
    that was killed has left goes with the next start."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob("rectgrad-app-*"):
            owner = left.name.split("-")[2]
            if owner.isdigit() and not files.alive(int(owner)):  # another's folder of such a name stays
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"rectgrad-app-{os.getpid()}-"))
        self._stop = threading.Event()
        os.environ["GRADIO_TEMP_DIR"] = str(self.path)  # where gradio puts them

    def start(self) -> None:
        threading.Thread(target=self._keep_short, daemon=True).start()

    def _keep_short(self) -> None:
        while not self._stop.wait(30):
            self.sweep(time.time() - 60 * MINUTES)

    def sweep(self, before: float) -> None:
        """Remove files from before a time, and the oldest where all of them are too much."""
        found = [(path.stat().st_mtime, path.stat().st_size, path) for path in self._files()]
        room = MEGABYTES * 2**20
        for changed, size, path in sorted(found, reverse=True):
            room -= size
            if changed < before or room < 0:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file()]

    def close(self) -> None:
        self._stop.set()
        shutil.rmtree(self.path, ignore_errors=True)


def launch(page: Any, temporary: Temporary, host: str, port: int | None, **options: Any) -> Any:
    """Serve the page; returns gradio's server once it answers."""
    import gradio as gr

    temporary.start()
    fonts = ["system-ui", "sans-serif"]  # nothing is fetched from elsewhere
    theme = gr.themes.Base(primary_hue="red", neutral_hue="slate", font=fonts, font_mono=["monospace"])
    return page.blocks.launch(
        server_name=host,
        server_port=port,
        theme=theme,
        css=resources("rectgrad.app").joinpath("style.css").read_text(encoding="utf-8"),
        max_file_size=UPLOAD,
        allowed_paths=[],
        footer_links=[],
        quiet=True,
        share=False,
        show_error=True,
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        strict_cors=True,
        state_session_capacity=200,
        max_threads=8,
        **options,
    )
