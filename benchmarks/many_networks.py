"""Compares ways to train the paper's CNN many times on one GPU, and checks that networks trained together
equal networks trained alone.

    python benchmarks/many_networks.py [--steps 200] [--networks 24] [--out FILE]

Speed, in seconds per CNN (20 epochs, 500 batches of 100): one network in a plain loop; one in a CUDA graph;
several graphs on separate streams; grouped convolutions; our kernels. The lower bound is the time to move the
bytes of a step at the measured bandwidth, and the time of its arithmetic at the measured matmul speed.
Equality: the first losses compared with those of a network trained alone, in float64 and float32; for scale,
how much torch's own losses change if the inputs are scaled by 1 + 1e-7; and the test accuracy of networks
trained together and alone. Needs CIFAR-10 and a GPU. Writes results/bench/h200-many-networks.json by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectgrad import many, training
from rectgrad.bench.environment import commit, environment
from rectgrad.data import cifar10, scaled
from rectgrad.many.networks import Networks
from rectgrad.models import CifarCNN
from rectgrad.photos import files
from rectgrad.training import Plan

STEPS = 20 * 500  # of a training run
PLAN = Plan(device="cuda")
MEGABYTES = 197.0  # moved by one step of one network, each tensor once per kernel: see docs/experiments.md
TERAFLOPS = 0.0153  # of one step: 25.5 million products per image, once forward and twice backward


def seconds(step: Callable[[], Any], steps: int, networks: int = 1) -> float:
    """Seconds of a training run, per network."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps * STEPS / networks


def adam(module: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(module.parameters(), lr=1e-3, capturable=True)


def plain_step(
    module: nn.Module, x: Tensor, y: Tensor, half: bool, optimiser: torch.optim.Adam | None = None
) -> Callable[[], None]:
    optimiser = optimiser or adam(module)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = F.cross_entropy(module(x).float(), y)
        optimiser.zero_grad(set_to_none=False)
        loss.backward()
        optimiser.step()

    return step


class Captured:
    """A step as a CUDA graph. Keeps the step alive, because a graph does not own the tensors it writes to."""

    def __init__(self, step: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.step, self.graph = step, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def replay(self) -> None:
        self.graph.replay()


class Grouped(nn.Module):
    """n networks as one with grouped convolutions."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        sizes = ((3, 32), (32, 32), (32, 64), (64, 64))
        self.convs = nn.ModuleList(nn.Conv2d(n * a, n * b, 3, padding=1, groups=n) for a, b in sizes)
        self.dense1 = nn.Parameter(torch.randn(n, 4096, 256) * 0.02)
        self.dense2 = nn.Parameter(torch.randn(n, 256, 10) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.convs[1](self.convs[0](x).relu()).relu(), 2)
        x = F.max_pool2d(self.convs[3](self.convs[2](x).relu()).relu(), 2)
        x = x.reshape(len(x), self.n, 4096).transpose(0, 1)
        return ((x @ self.dense1).relu() @ self.dense2).flatten(0, 1)


def speeds(seen: Any, steps: int) -> Iterator[tuple[str, float]]:
    """Yields each approach with its seconds per CNN."""
    x = torch.randn(100, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (100,), device="cuda")
    make = lambda: CifarCNN().cuda().to(memory_format=torch.channels_last)  # noqa: E731
    for n in (8, 16, 32, 45, 64):
        together, data = Networks([CifarCNN() for _ in range(n)], "cuda"), seen(n)
        yield f"{n} by our kernels, bfloat16", seconds(lambda t=together, d=data: t.learn(d, 0, 100), 40, n)
    for half, kind in ((False, "float32"), (True, "bfloat16")):
        yield f"alone, {kind}", seconds(plain_step(make(), x, y, half), steps // 2)
        yield f"a CUDA graph, {kind}", seconds(Captured(plain_step(make(), x, y, half)).replay, steps)
    for n in (4, 8):
        graphs = [Captured(plain_step(make(), x, y, True)) for _ in range(n)]
        yield f"{n} graphs on streams, bfloat16", seconds(side_by_side(graphs), steps, n)
    grouped = Grouped(8).cuda().to(memory_format=torch.channels_last)
    wide = x.repeat(1, 8, 1, 1).to(memory_format=torch.channels_last)
    yield "8 as groups of one, bfloat16", seconds(plain_step(grouped, wide, y.repeat(8), True), 3, 8)


def side_by_side(graphs: Sequence[Captured]) -> Callable[[], None]:
    """Replays each graph on its own stream."""
    streams = [torch.cuda.Stream() for _ in graphs]

    def step() -> None:
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    return step


def floor() -> dict[str, float]:
    """Lower bounds from the measured speed of copies and of matrix products."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copied = seconds(lambda: b.copy_(a), 20) / STEPS
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = seconds(lambda: m @ m, 20) / STEPS
    bandwidth, rate = 2 * (1 << 30) / copied / 1e12, 2 * 8192**3 / product / 1e12
    return {
        "bandwidth_tb_s": bandwidth,
        "products_tflop_s": rate,
        "seconds_by_traffic": MEGABYTES / 1e6 / bandwidth * STEPS,
        "seconds_by_arithmetic": TERAFLOPS / rate * STEPS,
    }


def first_losses(seen: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The largest differences among the first 10, 30 and 100 losses, for two seeds."""
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        modules = [training.fresh(replace(PLAN, seed=seed, device="cpu")).module for seed in range(2)]
        together = Networks(modules, "cuda", dtype)  # type: ignore[arg-type]
        data = seen(2)
        ours = torch.stack([together.learn(data, 100 * i, 100) for i in range(100)]).double().cpu()
        alone = torch.stack([losses(seed, x, y, dtype) for seed in range(2)], dim=1)
        nudged = torch.stack([losses(seed, x * (1 + 1e-7), y, dtype) for seed in range(2)], dim=1)
        kind = str(dtype).removeprefix("torch.")
        found[kind] = {
            "at once and alone": apart(ours, alone),
            "alone, and alone with inputs moved by 1e-7": apart(nudged, alone),
        }
    return found


def losses(seed: int, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    module = training.fresh(replace(PLAN, seed=seed)).module.to(dtype)
    optimiser = torch.optim.Adam(module.parameters(), lr=PLAN.rate)
    found = []
    for i in range(100):
        rows = slice(100 * i, 100 * i + 100)
        seen = x[rows].to(dtype).to(memory_format=torch.channels_last)
        loss = F.cross_entropy(module(seen), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


def apart(a: Tensor, b: Tensor) -> dict[str, float]:
    return {f"first {k}": float((a[:k] - b[:k]).abs().max()) for k in (10, 30, 100)}


def alone(seed: int, x: Tensor, y: Tensor, test: Tensor, answers: Tensor) -> float:
    """The test accuracy of one network in float32, trained in a CUDA graph."""
    module = training.fresh(replace(PLAN, seed=seed)).module
    first = {name: value.clone() for name, value in module.state_dict().items()}
    bx, by = x[:100].to(memory_format=torch.channels_last).clone(), y[:100].clone()
    optimiser = adam(module)
    graph = Captured(plain_step(module, bx, by, False, optimiser))
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(first[name])
        for state in optimiser.state.values():
            for value in state.values():
                value.zero_()
    for _ in range(PLAN.epochs):
        for start in range(0, len(x), 100):
            bx.copy_(x[start : start + 100])
            by.copy_(y[start : start + 100])
            graph.replay()
    with torch.no_grad():
        found = torch.cat([module(rows).argmax(1) for rows in test.split(1000)])
    return float((found == answers).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--networks", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("results/bench/h200-many-networks.json"))
    given = parser.parse_args()
    dataset = cifar10.load()
    ranks = torch.zeros(1, len(dataset.train), many.occlusion.PIXELS, dtype=torch.int16)

    def seen(n: int, images: Any = dataset.train) -> many.Occluded:
        nothing = [many.Hidden(0, 1, 1)] * n
        return many.Occluded(images, ranks[:, : len(images)], nothing, torch.zeros(3), "cuda")

    x, y = scaled(dataset.train.pixels).cuda(), torch.from_numpy(dataset.train.labels).cuda()
    test, answers = scaled(dataset.test.pixels).cuda(), torch.from_numpy(dataset.test.labels).cuda()
    record: dict[str, Any] = {"environment": environment("cuda"), "commit": commit()}

    def keep(**found: Any) -> None:
        record.update(found)
        files.save_json(record, given.out)
        print(found, flush=True)

    with training.deterministic():
        for kind, n in ((torch.bfloat16, given.networks), (torch.float32, min(8, given.networks))):
            name = f"accuracy_at_once_{str(kind).removeprefix('torch.')}"
            keep(**{name: many.train(seen(n), seen(n, dataset.test), range(n), PLAN, kind)})
        keep(losses_apart=first_losses(seen, x, y))
    keep(floor=floor())
    found: dict[str, float] = {}
    for name, value in speeds(seen, given.steps):
        found[name] = value
        keep(seconds_a_cnn=found)
    accuracies: list[float] = []
    with training.deterministic():
        for seed in range(given.networks):
            accuracies.append(alone(seed, x, y, test, answers))
            keep(accuracy_alone_float32=accuracies)


if __name__ == "__main__":
    main()
