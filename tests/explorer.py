"""Helpers to test the explorer: a server process, a client without a browser, and a real browser."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
MAP = ".panel:not([data-method=photo])"


class Served:
    def __init__(self, process: subprocess.Popen, url: str, log: list[str]) -> None:
        self.process, self.url, self.log = process, url, log

    def resident(self) -> float:
        """Megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@contextlib.contextmanager
def served(
    *arguments: str, code: str = "from rectgrad.cli import main; main()", **environment: str
) -> Iterator[Served]:
    """Runs `rectgrad app` in a subprocess and ends it with Ctrl-C. `code` is run instead of the command."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", code, "app", *arguments, "--no-browser", "--port", str(port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stdout), daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    while not any("Ctrl-C" in line for line in log):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            reader.join(10)
            process.stdout.close()
            raise RuntimeError("the explorer did not start:\n" + "".join(log))
        time.sleep(0.1)
    try:
        yield Served(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            reader.join(10)
            process.stdout.close()


class Client:
    """A client without a browser, which uploads photos and requests maps."""

    def __init__(self, url: str, model: str = "cifar10_cnn") -> None:
        # Without TLS, certificates need not be loaded.
        self.http = httpx.Client(base_url=url, timeout=120, verify=False)
        self.model, self.photo = model, ""
        self.http.headers["session"] = self.http.post("/api/session").json()["session"]

    def upload(self, content: bytes, name: str = "photo.png") -> httpx.Response:
        answer = self.http.post("/api/upload", params={"name": name}, content=content)
        if answer.is_success:
            self.photo = answer.json()["photo"]
        return answer

    def view(self, *methods: str, **more: Any) -> dict[str, Any]:
        return {"photo": self.photo, "model": self.model, "methods": list(methods), **more}

    def open(self, photo: str | None = None) -> httpx.Response:
        self.photo = photo or self.photo
        return self.http.post("/api/open", json={"photo": self.photo, "model": self.model})

    def maps(self, *methods: str, **more: Any) -> list[dict[str, Any]]:
        """The messages about some maps; `values` of a map are its capped values from -1 to 1."""
        answer = self.http.post("/api/maps", json=self.view(*methods, **more))
        assert answer.is_success, answer.text
        return list(messages(answer.content))

    def arrays(self, *methods: str, **more: Any) -> dict[str, np.ndarray]:
        """The photo as the network saw it and the raw maps, as they are downloaded."""
        answer = self.http.post("/api/download/npz", json=self.view(*methods, **more))
        assert answer.is_success, answer.text
        with np.load(io.BytesIO(answer.content)) as found:
            return dict(found)

    def close(self) -> None:
        """Sends what a page sends when it is closed."""
        self.http.post("/api/pause", content=self.http.headers["session"])
        self.http.close()


def messages(content: bytes) -> Iterator[dict[str, Any]]:
    """The messages of a stream: their JSON, and the values of a map."""
    while content:
        text, data = struct.unpack("<II", content[:8])
        message = json.loads(content[8 : 8 + text])
        if data:
            values = np.frombuffer(content[8 + text : 8 + text + data], "<i2") / 32767
            message["values"] = values.reshape(message["height"], message["width"])
        content = content[8 + text + data :]
        yield message


@contextlib.contextmanager
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield opened
        opened.close()


def page_of(opened, url: str, width: int = 1440, height: int = 900, dark: bool = False, link: str = ""):
    """A page, with the sample photo or what the link says.

    The policy against foreign scripts is off: playwright evaluates its conditions as strings.
    """
    scheme = "dark" if dark else "light"
    context = opened.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        bypass_csp=True,
        permissions=["clipboard-read", "clipboard-write"],
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{url}/{link}")
    return page


def ready(page, maps: int = 1) -> None:
    """Waits until all maps and their specificities are shown."""
    page.wait_for_function(
        """([selector, maps]) => { const found = document.querySelectorAll(`${selector} .trust:not(.old) p`);
        return found.length === maps && !document.querySelector('.waiting'); }""",
        arg=[MAP, maps],
    )


def be_patient(page) -> None:
    """Stops the page's clock: it waits for a map, on a slow machine too, before it asks for a newer one."""
    page.evaluate("() => { performance.now = () => 0; }")


def changed(page, act, method: str = "rectgrad") -> float:
    """Runs an action that redraws a map. Returns the milliseconds until it is shown, measured in the page."""
    page.evaluate(
        """method => { const panel = document.querySelector(`.panel[data-method=${method}]`);
        window.drawn = null; window.began = performance.now();
        new MutationObserver((_, self) => { window.drawn = performance.now(); self.disconnect(); })
          .observe(panel, { attributeFilter: ['data-map'] });
        }""",
        method,
    )
    act()
    page.wait_for_function("window.drawn !== null")
    return page.evaluate("window.drawn - window.began")


def set_q(page, q: float) -> None:
    page.evaluate(
        """q => { window.began = performance.now();
        const slider = document.querySelector('#q');
        slider.value = q; slider.dispatchEvent(new Event('input', { bubbles: true })); }""",
        q,
    )


def choose(page, control: str, text: str) -> None:
    """Types into a searchable list and chooses the first match."""
    page.click(control)
    page.fill(control, text)
    page.wait_for_function(
        """([list, text]) => document.querySelector(list + ' .active')?.innerText.toLowerCase()
        .includes(text)""",
        arg=[f"{control}-list", text.lower()],
    )
    page.keyboard.press("Enter")


def pixels(page, selector: str) -> np.ndarray:
    """What a canvas shows, (height, width, 4)."""
    found = page.evaluate(
        """selector => { const canvas = document.querySelector(selector);
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return [canvas.height, canvas.width, Array.from(data)]; }""",
        selector,
    )
    return np.array(found[2], np.uint8).reshape(found[0], found[1], 4)
