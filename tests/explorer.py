"""The explorer as a person meets it: a server of its own and a real browser."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class Served:
    def __init__(self, process: subprocess.Popen, url: str, log: list[str]) -> None:
        self.process, self.url, self.log = process, url, log

    def resident(self) -> float:
        """Megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """`rectgrad app` in a process of its own, ended by Ctrl-C."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "rectgrad", "app", *arguments, "--no-browser", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stdout), daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    while not any("Ctrl-C" in line for line in log):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
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


@contextlib.contextmanager
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield opened
        opened.close()


def page_of(opened, url: str, width: int = 1440, dark: bool = False):
    """A page with nothing in it yet, its size and its theme."""
    scheme = "dark" if dark else "light"
    context = opened.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(url + ("/?__theme=dark" if dark else "/?__theme=light"))
    page.wait_for_selector("#photo")
    return page


def sample(page, name: str = "chelsea", panels: int = 4) -> None:
    page.click(f"#sample-{name}")
    page.wait_for_selector(f"#maps figure:nth-child({panels})")
    page.wait_for_selector("#curve svg")
    page.wait_for_selector("#layers figure")


def changed(page, act, selector: str = "#maps figure:nth-child(2) img") -> float:
    """Do something that draws anew; milliseconds until it shows, as the page's own clock has it."""
    page.evaluate(
        """selector => { const before = document.querySelector(selector)?.src;
        window.drawn = null; window.began = performance.now();
        new MutationObserver((_, self) => {
          const now = document.querySelector(selector)?.src;
          if (now && now !== before) { window.drawn = performance.now(); self.disconnect(); }
        }).observe(document.querySelector('#maps'), { subtree: true, childList: true, attributes: true });
        }""",
        selector,
    )
    act()
    page.wait_for_function("window.drawn !== null")
    return page.evaluate("window.drawn - window.began")


def set_q(page, q: float) -> None:
    page.evaluate(
        """q => { window.began = performance.now();
        const slider = document.querySelector('#q input[type=range]');
        slider.value = q; slider.dispatchEvent(new Event('input', { bubbles: true })); }""",
        q,
    )


def choose(page, control: str, text: str) -> None:
    """Type into a list and take the first match."""
    page.click(f"{control} input")
    page.fill(f"{control} input", text)
    page.wait_for_selector("ul[role=listbox] li")
    page.keyboard.press("Enter")


def pictures(html: str) -> list[np.ndarray]:
    """The pictures inside a piece of HTML."""
    found = re.findall(r"data:image/png;base64,([^\"]+)", html)
    return [np.array(Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]


class Client:
    """A visitor without a browser: uploads a photo of his own and asks for its maps."""

    def __init__(self, url: str, photo: Path, model: str = "cifar10_cnn") -> None:
        from gradio_client import Client as Connection
        from gradio_client import handle_file

        self.connection, self.photo, self.model = Connection(url, verbose=False), photo, model
        self._file = handle_file(str(photo))

    def look(self) -> None:
        self._top = self.connection.predict(self._file, self.model, api_name="/look")[1]["value"]

    def draw(self) -> list[np.ndarray]:
        found = self.connection.predict(["rectgrad", "saliency"], self._top, api_name="/draw")
        return pictures(found[0])

    def close(self) -> None:
        self.connection.close()
