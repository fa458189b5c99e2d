"""Measures ordinary and captured calls on a GPU relative to a plain gradient, and writes a record.

    python benchmarks/engine_cuda.py --out results/bench/h200-engine.json

A plain gradient is `torch.autograd.grad` of the class scores with respect to the input, eager, in the same
process, with the same type, memory format and TF32 setting. Contenders are interleaved; a ratio is the median
over the rounds of the ratios within a round. A time is that of one call, including synchronisation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import rectgrad
from rectgrad.bench import environment, networks

CASES = [
    (model, batch, channels_last)
    for model in ("resnet50", "inception_v4", "vgg16", "efficientnet_lite0", "vit_b_16")
    for batch in (1, 64)
    for channels_last in (False, True)
    if model == "resnet50" or not channels_last
]


def contenders(model: Any, x: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    def plain() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf).gather(1, target.unsqueeze(1)).sum(), leaf)

    found = {"plain": plain, "attribute": lambda: rectgrad.attribute(model, x, "rectgrad", target)}
    found["saliency"] = lambda: rectgrad.attribute(model, x, "saliency", target)
    found["record"] = lambda: rectgrad.record(model, x).attribute("rectgrad", target)
    captured = rectgrad.capture(model, x)
    found["capture"] = lambda: captured(x, target)
    return found


def measure(name: str, batch: int, channels_last: bool, rounds: int) -> dict[str, Any]:
    pixels = networks.NETWORKS[name].pixels
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = networks.build(name, pixels).cuda().to(memory_format=layout)
    x = torch.randn(batch, 3, pixels, pixels, device="cuda").to(memory_format=layout)
    runs = contenders(model, x, torch.zeros(batch, dtype=torch.long, device="cuda"))
    times: dict[str, list[float]] = {key: [] for key in runs}
    for i in range(rounds + 3):
        for key, run in runs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if i >= 3:
                times[key].append(time.perf_counter() - begin)
    found: dict[str, Any] = {"plain_ms": 1000 * statistics.median(times["plain"])}
    for key in times.keys() - {"plain"}:
        ratios = [a / b for a, b in zip(times[key], times["plain"], strict=True)]
        found[key] = statistics.quantiles(ratios, n=4)
    return {"model": name, "batch": batch, "channels_last": channels_last, "ratios": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--models", default="resnet50")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    results = []
    for name, batch, channels_last in CASES:
        if name in given.models.split(","):
            results.append(measure(name, batch, channels_last, given.rounds))
            print(json.dumps(results[-1]), flush=True)
            record = {"tf32": True, "rounds": given.rounds, "environment": environment.environment("cuda")}
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps({**record, "results": results}, indent=1))


if __name__ == "__main__":
    main()
