"""Attacks the explorer on this machine and records what other visitors notice.

    python benchmarks/explorer_attacks.py [--rounds 3] [--seconds 40] [--visitors 5000] [--out FILE]

crowd: twenty visitors, of whom two ask for the most that is allowed, all at once: the largest photo, every
method with the most samples, steps and masks, downloads. Ratio: the median answer of the other eighteen, to
that in rounds without the two. Rounds alternate.
visitors: each opens a page, uploads a photo, asks for a map and vanishes without closing anything. Resident
memory, files and bytes in the temporary folder.
ends: SIGTERM while all lanes are busy: seconds until the process has ended, and what remains of its files.
connections: clients that connect and send nothing, or half a request, while another visitor asks for maps.

Writes results/bench/explorer-attacks.json by default.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from rectgrad.app.controls import EVALUATIONS
from rectgrad.bench.environment import commit, environment
from rectgrad.methods.catalog import METHODS
from rectgrad.photos import MAX_PIXELS, files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import explorer

MODEL = "efficientnet_lite0"
MOST = {  # some methods evaluate a few inputs more
    "SmoothGrad": {"samples": EVALUATIONS - 100},
    "IntegratedGradients": {"steps": EVALUATIONS - 100},
    "ExpectedGradients": {"samples": EVALUATIONS - 100},
    "RISE": {"masks": EVALUATIONS - 100},
}
PAUSE = 8.0  # mean seconds between two requests of a visitor


def photo(seed: int, size: int = 300) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def largest() -> bytes:
    side = int(MAX_PIXELS**0.5)
    stream = io.BytesIO()
    Image.new("RGB", (side, side), "gray").save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


class Visitor(threading.Thread):
    """Moves the slider now and then. `times`: seconds until the new map has come."""

    def __init__(self, url: str, seed: int, until: float) -> None:
        super().__init__(daemon=True)
        self.url, self.seed, self.until = url, seed, until
        self.times: list[float] = []
        self.errors: list[str] = []

    def run(self) -> None:
        choose = random.Random(self.seed)
        try:
            client = explorer.Client(self.url, MODEL)
            client.upload(photo(self.seed))
            client.open()
            while time.monotonic() < self.until:
                time.sleep(choose.uniform(0, 2 * PAUSE))
                options = {"RectGrad": {"q": choose.randint(500, 999) / 10}}
                started = time.monotonic()
                found = client.maps("rectgrad", options=options, known=["rectgrad"])
                self.times.append(time.monotonic() - started)
                if [each["kind"] for each in found if each["kind"] in ("map", "error")] != ["map"]:
                    self.errors.append(str(found))
            client.close()
        except Exception as error:
            self.errors.append(repr(error))


class Greedy:
    """Asks for everything at once, until told to stop."""

    def __init__(self, url: str, big: bytes) -> None:
        self.stop = threading.Event()
        self.requests: dict[str, int] = {}
        self.client = explorer.Client(url, MODEL)
        self.client.http.timeout = httpx.Timeout(20)
        self.client.upload(photo(99))
        self.client.open()
        self.small = self.client.photo
        self.client.upload(big)
        jobs = ["api/open", "api/maps", "api/layers", "api/sparsity", "api/download/png", "api/download/npz"]
        self.threads = [threading.Thread(target=self._ask, args=(job,), daemon=True) for job in jobs]

    def start(self) -> None:
        [each.start() for each in self.threads]

    def _ask(self, route: str) -> None:
        for i in itertools.count():
            if self.stop.is_set():
                return
            view = {"photo": self.client.photo, "model": MODEL}
            if route != "api/open":
                options = {**MOST, "RectGrad": {"q": 50 + i % 49}}
                methods = [name for name, method in METHODS.items() if method.ready]
                view = {"photo": self.small, "model": MODEL, "methods": methods, "options": options}
            try:
                with self.client.http.stream("POST", f"/{route}", json=view) as answer:
                    for _ in answer.iter_bytes():
                        if self.stop.is_set():
                            return
                    said = answer.status_code
            except httpx.HTTPError as error:
                said = type(error).__name__
            self.requests[f"{route} {said}"] = self.requests.get(f"{route} {said}", 0) + 1
            time.sleep(0.05)


def crowd(url: str, seconds: float, greedy: int, big: bytes) -> dict[str, Any]:
    asking = [Greedy(url, big) for _ in range(greedy)]
    [each.start() for each in asking]
    time.sleep(3 if greedy else 0)
    others = [Visitor(url, i, time.monotonic() + seconds) for i in range(18)]
    [each.start() for each in others]
    [each.join(600) for each in others]
    [each.stop.set() for each in asking]
    [thread.join(60) for each in asking for thread in each.threads]
    times = sorted(time for each in others for time in each.times)
    return {
        "greedy": greedy,
        "answers": len(times),
        "median": statistics.median(times),
        "most": times[-1],
        "errors": [said for each in others for said in each.errors],
        "greedy_requests": [each.requests for each in asking],
    }


def crowds(rounds: int, seconds: float) -> dict[str, Any]:
    big, found = largest(), []
    with explorer.served("--model", MODEL) as served:
        crowd(served.url, 5, 0, big)  # warm-up
        for _ in range(rounds):
            for greedy in (0, 2):
                found.append(crowd(served.url, seconds, greedy, big))
                print(found[-1], flush=True)
        resident = served.resident()
    ratios = [b["median"] / a["median"] for a, b in zip(found[::2], found[1::2], strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "resident_mb": resident, "rounds": found}


def visitors(count: int) -> dict[str, Any]:
    """Visitors who vanish: their connections stay open until this process closes them, many at a time."""
    sizes: list[float] = []
    bytes_stored: list[int] = []
    with explorer.served("--model", "cifar10_cnn") as served:
        folder = temporary_folder(served.process.pid)
        errors: list[str] = []
        kept: deque[explorer.Client] = deque()

        def visit(i: int) -> None:
            try:
                client = explorer.Client(served.url)
                client.upload(photo(i, 100 + i % 50))
                client.open()
                client.maps("rectgrad", known=["rectgrad"])
                kept.append(client)
                if len(kept) > 30:
                    kept.popleft().http.close()  # the connection breaks; no message is sent
            except Exception as error:
                errors.append(repr(error))

        for i, _ in enumerate(ThreadPoolExecutor(4).map(visit, range(count))):
            if i % 50 == 49:
                sizes.append(served.resident())
                bytes_stored.append(sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()))
            if i % 500 == 499:
                print(i + 1, f"{sizes[-1]:.0f} MB, {bytes_stored[-1] / 2**20:.1f} MB stored", flush=True)
        stored = len(list(folder.rglob("*")))
    tenth = max(len(sizes) // 10, 1)
    return {
        "visitors": count,
        "errors": errors[:20],
        "resident_mb": {
            "first_tenth": max(sizes[:tenth]),
            "most": max(sizes),
            "last_tenth": max(sizes[-tenth:]),
        },
        "stored_mb": {"most": max(bytes_stored) / 2**20, "files_at_end": stored},
        "left": folder.exists(),
    }


def temporary_folder(pid: int) -> Path:
    return next(Path(tempfile.gettempdir()).glob(f"rectgrad-app-{pid}-*"))


def ends(times: int) -> dict[str, Any]:
    """SIGTERM at a random moment of a busy server."""
    big, seconds, left, states = largest(), [], 0, []
    for i in range(times):
        with explorer.served("--model", MODEL) as served:
            folder = temporary_folder(served.process.pid)
            asking = [Greedy(served.url, big) for _ in range(2)]
            [each.start() for each in asking]
            time.sleep(random.Random(i).uniform(1, 6))
            started = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(120)
            seconds.append(time.monotonic() - started)
            states.append(served.process.returncode)
            left += folder.exists()
            [each.stop.set() for each in asking]
            [thread.join(30) for each in asking for thread in each.threads]
        print(f"ended after {seconds[-1]:.1f} s, status {states[-1]}", flush=True)
    return {
        "times": times,
        "most_seconds": max(seconds),
        "seconds": seconds,
        "folders_left": left,
        "status": states,
    }


def connections(count: int) -> dict[str, Any]:
    """Idle and half-sent requests. The visitor comes from another address of this machine."""
    with explorer.served("--model", "cifar10_cnn") as served:
        port = int(served.url.rpartition(":")[2])
        held, refused = [], 0
        for i in range(count):
            try:
                opened = socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.2", 0))
                if i % 2:
                    opened.sendall(b"POST /api/upload HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n")
                held.append(opened)
            except OSError:
                refused += 1
        visitor = Visitor(served.url, 1, time.monotonic() + 20)
        visitor.start()
        visitor.join(120)
        open_files = len(os.listdir(f"/proc/{served.process.pid}/fd"))
        [each.close() for each in held]
    return {
        "connections": count,
        "refused": refused,
        "open_files": open_files,
        "answers": len(visitor.times),
        "errors": visitor.errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--visitors", type=int, default=5000)
    parser.add_argument("--ends", type=int, default=10)
    parser.add_argument("--connections", type=int, default=1200)
    parser.add_argument("--only", help="one of crowd, visitors, ends, connections")
    parser.add_argument("--out", type=Path, default=Path("results/bench/explorer-attacks.json"))
    given = parser.parse_args()
    parts = {
        "crowd": lambda: crowds(given.rounds, given.seconds),
        "visitors": lambda: visitors(given.visitors),
        "ends": lambda: ends(given.ends),
        "connections": lambda: connections(given.connections),
    }
    record: dict[str, Any] = files.load_record(given.out)
    for name, attack in parts.items():
        if given.only in (None, name):
            record[name] = attack()
            record[name] |= {"commit": commit(), "environment": environment("cpu")}
            print(name, {key: v for key, v in record[name].items() if key != "rounds"}, flush=True)
            files.save_json(record, given.out)


if __name__ == "__main__":
    main()
