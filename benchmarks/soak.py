"""Runs many attributions in one process: memory must not grow, and results must be identical to the last bit.

    OMP_NUM_THREADS=1 python benchmarks/soak.py [--attributions 20000] [--out FILE]

Cycles through small networks, including the paper's CNN: all methods one by one (gated, Grad-CAM, LRP and
perturbation methods too), all from one recorded pass, all by captures, all from four threads at once, and
calls that must fail. Every call must return the same map each time.
Resident memory is measured every thousand attributions. The exit status is 1 if it ends more than 50 MB above
the first measurement, if a map differs, or if a call that must fail does not. Takes a few minutes on one
core. Linux only. Writes results/bench/soak.json by default.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad.bench.environment import commit, environment
from rectgrad.bench.memory import status
from rectgrad.photos import files

THREADS = 4
ALLOWED = 50e6  # bytes above the first measurement
EVERY = 1000
BATCHES = (1, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2},
    "rectgrad": {"q": 80.0},
    "expected_gradients": {"samples": 2},
    "occlusion": {"window": 8, "stride": 8},
    "rise": {"masks": 4},
}


class Residual(nn.Module):
    """A ReLU module that is used three times, sums, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.relu, self.head = nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        x = self.relu(self.norm(self.second(x)) + x)
        return self.head(self.relu(self.second(x)).mean((2, 3)))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks in evaluation mode and the shape of one sample."""
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(150, 4))
    signal = nn.Sequential(nn.Conv1d(2, 8, 5), nn.GELU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(80, 3))
    dense = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64), nn.SiLU())
    made: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "cifar10_cnn": (rectgrad.models.load("cifar10_cnn").module, (3, 32, 32)),
        "residual": (Residual(), (3, 12, 12)),
        "pooled": (pooled, (3, 12, 12)),
        "signal": (signal, (2, 24)),
        "dense": (nn.Sequential(dense, nn.Linear(64, 4)), (20,)),
    }
    return {name: (module.eval(), shape) for name, (module, shape) in made.items()}


def explained(module: nn.Module, x: Tensor) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The options of each method that explains a network, and the methods that refuse it."""
    found, refused = dict[str, dict[str, Any]](), []
    for method in rectgrad.METHODS:
        options = OPTIONS.get(method, {"baselines": x[:1]} if method == "deeplift_shap" else {})
        try:
            rectgrad.attribute(module, x, method, 1, **options)
            found[method] = options
        except rectgrad.UnsupportedModelError:
            refused.append(method)
    return found, refused


class Soak:
    """Counts the calls, stores the expected maps, and collects faults."""

    def __init__(self) -> None:
        self.expected: dict[tuple, Tensor] = {}
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []

    def check(self, way: str, maps: Tensor, *case: Any) -> None:
        """Compares maps with the first ones for this case; threads must agree with single calls."""
        kept = self.expected.setdefault(("record" if way == "record" else "alone", *case), maps.clone())
        if not torch.equal(maps, kept):
            self.faults.append(f"{way} {case}: the map differs from the first one")
        self.done[way] += 1

    def must_fail(self, call: Callable[[], Any], what: str) -> None:
        try:
            call()
            self.faults.append(f"{what}: no error")
        except (rectgrad.UnsupportedModelError, rectgrad.StaleCaptureError, ValueError, FaultError):
            self.done["errors"] += 1


class FaultError(Exception):
    """Raised by a model."""


def failing(x: Tensor) -> Tensor:
    F.relu(x)
    raise FaultError


def steps(soak: Soak) -> Iterator[None]:
    """Runs calls endlessly; memory can be measured after each step."""
    made = networks()
    inputs = {
        (name, n): torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))
        for (name, (_, shape)), n in itertools.product(made.items(), BATCHES)
    }
    scripted = torch.jit.script(made["pooled"][0])
    methods = {name: explained(made[name][0], inputs[name, 1]) for name in made}
    for name, n in itertools.cycle(inputs):
        module, x = made[name][0], inputs[name, n]
        known, refused = methods[name]
        for method, options in known.items():
            soak.check("alone", rectgrad.attribute(module, x, method, 1, **options), name, n, method)
        yield
        kept = rectgrad.record(module, x)
        for method, options in known.items():
            soak.check("record", kept.attribute(method, 1, **options), name, n, method)
        yield
        for method, options in known.items():
            replay = rectgrad.capture(module, x, method, **options)
            soak.check("capture", replay(x, 1), name, n, method)
            soak.must_fail(lambda replay=replay, x=x: replay(x[..., 1:]), "a capture with another shape")
            replay.release()
        yield
        at_once(soak, module, x, known, name, n)
        yield
        for method in refused:
            call = functools.partial(rectgrad.attribute, module, x, method, 1)
            soak.must_fail(call, f"{method} on {name}")
        soak.must_fail(lambda module=module, x=x: rectgrad.attribute(module, x, target=99), "no such class")
        soak.must_fail(lambda module=module, x=x: rectgrad.attribute(module, x / 0, target=1), "infinities")
        soak.must_fail(
            lambda module=module, x=x: rectgrad.attribute(module, x, "gradcam", layer="x"), "no layer"
        )
        soak.must_fail(lambda x=x: rectgrad.attribute(failing, x), "a model that fails")
        soak.must_fail(lambda x=x: rectgrad.record(failing, x), "a model that fails in a record")
        pixels = inputs["pooled", n]
        soak.must_fail(lambda x=pixels: rectgrad.attribute(scripted, x), "a scripted model")


def at_once(
    soak: Soak, module: nn.Module, x: Tensor, known: dict[str, dict[str, Any]], name: str, n: int
) -> None:
    """Runs all methods on one network from new threads."""

    def one(method: str) -> Tensor:
        return rectgrad.attribute(module, x, method, 1, **known[method])

    with ThreadPoolExecutor(THREADS) as pool:
        for method, maps in zip(known, pool.map(one, known), strict=True):
            soak.check("threads", maps, name, n, method)


def resident() -> int:
    gc.collect()
    return status("VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attributions", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("results/bench/soak.json"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    soak, levels, started = Soak(), dict[int, int](), time.perf_counter()
    for _ in steps(soak):
        count = soak.done.total() - soak.done["errors"]
        last = count >= given.attributions or len(soak.faults) > 20
        if count // EVERY > len(levels) or last:
            levels[count] = resident()
            spent = time.perf_counter() - started
            print(f"{count} attributions  {levels[count] / 1e6:.1f} MB  {spent:.0f} s", flush=True)
        if last:
            break
    growth = levels[count] - next(iter(levels.values()))
    record = {
        "environment": environment("cpu"),
        "commit": commit(),
        "attributions": count,
        "ways": dict(soak.done),
        "networks": sorted({key[1] for key in soak.expected}),
        "methods": sorted({key[-1] for key in soak.expected}),
        "seconds": time.perf_counter() - started,
        "resident_bytes": levels,
        "growth_bytes": growth,
        "allowed_bytes": ALLOWED,
        "faults": soak.faults,
    }
    files.save_json(record, given.out)
    for fault in soak.faults[:20]:
        print(fault)
    print(f"{growth / 1e6:+.1f} MB from the first measurement to the last, {ALLOWED / 1e6:.0f} allowed")
    sys.exit(1 if soak.faults or growth > ALLOWED else 0)


if __name__ == "__main__":
    main()
