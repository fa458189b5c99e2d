"""Serves the page: access checks, limits, and temporary files that are always removed."""

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
MINUTES = 15  # lifetime of a temporary file
MEGABYTES = 1000  # total size of temporary files
LOCAL = ("127.0.0.1", "localhost", "::1")


def check_access(host: str, auth: str | None, insecure: bool) -> tuple[str, str] | None:
    """Returns user and password, if given. Serving other machines needs them, or `insecure`."""
    if auth is not None:
        user, colon, password = auth.partition(":")
        if not (user and colon and password):
            raise ValueError("--auth takes user:password")
        return user, password
    if host not in LOCAL and not insecure:
        raise ValueError(
            f"--host {host} makes the page reachable from other machines: use --auth user:password, or "
            "--insecure for access without a password"
        )
    return None


def check_address(host: str, port: int | None) -> None:
    """Checks that the address belongs to this machine and that the port is free."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (OSError, OverflowError) as error:
        where = f"--host {host}" + (f" --port {port}" if port else "")
        raise ValueError(f"{where} cannot be served: {getattr(error, 'strerror', None) or error}") from None


class TemporaryFolder:
    """A folder for uploads and downloads. Old files are removed regularly, and the whole folder at the end.

    Folders of servers that were killed are removed at the next start.
    """

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob("rectgrad-app-*"):
            owner = folder.name.split("-")[2]
            if owner.isdigit() and not files.alive(int(owner)):  # not a number: not our folder
                shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"rectgrad-app-{os.getpid()}-"))
        self._stop = threading.Event()
        os.environ["GRADIO_TEMP_DIR"] = str(self.path)  # read by gradio

    def start(self) -> None:
        threading.Thread(target=self._clean_up, daemon=True).start()

    def _clean_up(self) -> None:
        while not self._stop.wait(30):
            self.remove_old(time.time() - 60 * MINUTES)

    def remove_old(self, before: float) -> None:
        """Removes files older than `before`, and the oldest ones beyond the total size."""
        entries = [(path.stat().st_mtime, path.stat().st_size, path) for path in self._files()]
        available = MEGABYTES * 2**20
        for changed, size, path in sorted(entries, reverse=True):
            available -= size
            if changed < before or available < 0:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file()]

    def close(self) -> None:
        self._stop.set()
        shutil.rmtree(self.path, ignore_errors=True)


def launch(page: Any, temporary: TemporaryFolder, host: str, port: int | None, **options: Any) -> Any:
    """Serves the page; returns gradio's server once it is ready."""
    import gradio as gr

    temporary.start()
    fonts = ["system-ui", "sans-serif"]  # no fonts are downloaded
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
