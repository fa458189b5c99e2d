"""Measures the explorer: the delay of the slider, and memory with ten visitors at once.

    python benchmarks/explorer.py [--seconds 60] [--clients 10] [--out FILE]

Redraw: time in Chromium on this machine from moving the slider to the new map, measured in the page.
Visitors: each repeatedly uploads its own photo, requests two maps and downloads them; the returned photo must
be its own. Reports the resident memory of the server before, during and after the visits. Writes
results/bench/explorer.json by default.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rectgrad.bench.environment import commit, environment
from rectgrad.models import load
from rectgrad.photos import files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import explorer

MODEL = "efficientnet_lite0"


def redraws(url: str) -> list[float]:
    """Delays in milliseconds for 19 values of q."""
    with explorer.browser() as opened:
        page = explorer.page_of(opened, url)
        found = []
        for q in np.linspace(99, 80, 20):
            explorer.ready(page)  # the last map and its specificity are shown
            page.wait_for_timeout(500)
            if q != 98:  # where the slider starts
                found.append(explorer.changed(page, lambda q=q: explorer.set_q(page, float(round(q)))))
        return found


class Visitor(threading.Thread):
    def __init__(self, url: str, photo: Path, expected: np.ndarray, until: float) -> None:
        super().__init__()
        self.url, self.photo, self.expected, self.until = url, photo, expected, until
        self.answers, self.wrong = 0, []  # type: ignore[var-annotated]

    def run(self) -> None:
        try:
            client = explorer.Client(self.url, MODEL)
            while time.monotonic() < self.until:
                client.upload(self.photo.read_bytes())
                client.open()
                client.maps("rectgrad", "saliency")
                if not np.array_equal(client.arrays("rectgrad", "saliency")["photo"], self.expected):
                    self.wrong.append("another photo")
                self.answers += 1
            client.close()
        except Exception as error:
            self.wrong.append(repr(error))


def visitors(served: explorer.Served, folder: Path, count: int, seconds: float) -> dict[str, Any]:
    model = load(MODEL)
    crowd = []
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (300, 300, 3), dtype=np.uint8)
        path = folder / f"{i}.png"
        Image.fromarray(pixels).save(path)
        expected = np.asarray(model.crop(Image.fromarray(pixels)))
        crowd.append(Visitor(served.url, path, expected, time.monotonic() + seconds))
    warm = Visitor(served.url, crowd[0].photo, crowd[0].expected, time.monotonic() + 5)
    warm.start()
    warm.join()
    time.sleep(5)
    before = most = served.resident()
    [each.start() for each in crowd]
    while any(each.is_alive() for each in crowd):
        most = max(most, served.resident())
        time.sleep(0.5)
    time.sleep(15)
    return {
        "clients": count,
        "seconds": seconds,
        "answers": sum(each.answers for each in crowd),
        "wrong": [said for each in crowd for said in each.wrong],
        "resident_mb": {"before": before, "most": most, "after": served.resident()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/bench/explorer.json"))
    given = parser.parse_args()
    record: dict[str, Any] = {"environment": environment("cpu"), "commit": commit(), "model": MODEL}
    with explorer.served() as served, tempfile.TemporaryDirectory() as folder:
        times = redraws(served.url)
        record["redraw_ms"] = {"median": statistics.median(times), "most": max(times), "each": times}
        print(record["redraw_ms"], flush=True)
        record["visitors"] = visitors(served, Path(folder), given.clients, given.seconds)
        print(record["visitors"], flush=True)
    files.save_json(record, given.out)


if __name__ == "__main__":
    main()
