"""The cost of every method, as a ratio to a plain gradient. Writes a record.

    python benchmarks/methods.py --device cpu --out results/bench/cpu-methods.json
    python benchmarks/methods.py --device cuda --out results/bench/h200-methods.json

A plain gradient is `torch.autograd.grad` of the class scores with respect to the input, eager, in the same
process. Contenders are interleaved; a ratio is the median over the rounds of the ratios within a round.
Perturbation methods are compared with the same number of bare forward passes in batches of the same size, and
Expected Gradients with Captum's GradientShap, where Captum is installed. CPU: two threads, batch 1, CPU time
of the process rather than wall time, because other processes disturb it less. CUDA: wall time, TF32, channels
last, batch 64 by ordinary calls and batch 1 by `rectgrad.capture`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rectgrad
from rectgrad.bench import environment, networks

COMPOSITES = ("epsilon", "epsilon_plus_flat", "epsilon_alpha2_beta1_flat", "zplus", "gamma")
BOX = {"composite": "epsilon_gamma_box", "low": -3.0, "high": 3.0}
ONE_PASS: dict[str, tuple[str, dict[str, Any]]] = {
    "rectgrad": ("rectgrad", {}),
    "saliency": ("saliency", {}),
    "gradcam": ("gradcam", {}),
    "guided_gradcam": ("guided_gradcam", {}),
    "excitation_backprop": ("excitation_backprop", {}),
    **{f"lrp {name}": ("lrp", {"composite": name}) for name in COMPOSITES},
    "lrp epsilon_gamma_box": ("lrp", BOX),
}
Run = Callable[[], Any]


def timed(runs: dict[str, Run], rounds: int, wait: Run, clock: Callable[[], float]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            wait()
            begin = clock()
            run()
            wait()
            if i >= 2:
                times[name].append(clock() - begin)
    return times


def ratios(times: dict[str, list[float]], base: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{base}_ms": 1000 * statistics.median(times[base])}
    for name in times.keys() - {base}:
        within = [a / b for a, b in zip(times[name], times[base], strict=True)]
        found[name] = [round(q, 4) for q in statistics.quantiles(within, n=4)]
    return found


def prepared(name: str, batch: int, device: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    pixels = networks.NETWORKS[name].pixels
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    model = networks.build(name, pixels).to(device).to(memory_format=layout)
    x = torch.randn(batch, 3, pixels, pixels, device=device).to(memory_format=layout)
    return model, x, torch.zeros(batch, dtype=torch.long, device=device)


def plain(model: Any, x: torch.Tensor, target: torch.Tensor) -> Run:
    def run() -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(model(leaf).gather(1, target.unsqueeze(1)).sum(), leaf)

    return run


def one_pass(name: str, batch: int, device: str, captured: bool, methods: dict[str, Any]) -> dict[str, Run]:
    """A plain gradient, and a call of each method."""
    model, x, target = prepared(name, batch, device)
    runs: dict[str, Run] = {"plain": plain(model, x, target)}
    for label, (method, options) in methods.items():
        if captured:
            capture = rectgrad.capture(model, x, method, **options)
            runs[label] = lambda capture=capture: capture(x, target)
        else:
            runs[label] = lambda method=method, options=options: rectgrad.attribute(
                model, x, method, target, **options
            )
    return runs


def forward_only(name: str, device: str) -> dict[str, Run]:
    """RISE and occlusion, beside as many bare forward passes in batches of the same size. With the default
    options on a GPU, with fewer masks and windows on a CPU."""
    model, x, target = prepared(name, 1, device)
    sizes: list[int] = []

    def seen(inputs: torch.Tensor) -> torch.Tensor:
        sizes.append(len(inputs))
        return model(inputs)

    runs: dict[str, Run] = {}
    few = {"rise": {"masks": 32}, "occlusion": {"window": 48, "stride": 44}}
    for method in few:
        options = few[method] if device == "cpu" else {}
        sizes.clear()
        rectgrad.attribute(seen, x, method, target, **options)
        largest = torch.cat([x] * max(sizes))
        batches = [largest[:n] for n in sizes]

        def bare(batches: list[torch.Tensor] = batches) -> None:
            with torch.no_grad():
                for inputs in batches:
                    model(inputs)

        runs[f"bare {method}"] = bare
        runs[method] = lambda method=method, options=options: rectgrad.attribute(
            model, x, method, target, **options
        )
    return runs


def expected(name: str, device: str) -> dict[str, Run]:
    from captum.attr import GradientShap

    model, x, target = prepared(name, 1, device)
    baselines = torch.zeros_like(x).expand(5, *x.shape[1:]).contiguous()
    shap = GradientShap(model)
    return {
        "GradientShap": lambda: shap.attribute(x, baselines, n_samples=50, target=target),
        "expected_gradients": lambda: rectgrad.attribute(
            model, x, "expected_gradients", target, samples=50, baselines=baselines
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of zero maps and large relevance, which random weights may give
    cuda = given.device == "cuda"
    wait: Run = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    else:
        torch.set_num_threads(2)
    clock = time.perf_counter if cuda else time.process_time
    record: dict[str, Any] = {"rounds": given.rounds, "clock": clock.__name__}
    record["environment"] = environment.environment(given.device)

    def measure(key: str, runs: dict[str, Run], base: str, rounds: int) -> None:
        record[key] = ratios(timed(runs, rounds, wait, clock), base)
        print(key, json.dumps(record[key]), flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n")

    attention = {"attn_lrp": ("attn_lrp", {})}
    if cuda:
        measure("resnet50 batch 64", one_pass("resnet50", 64, "cuda", False, ONE_PASS), "plain", given.rounds)
        measure(
            "resnet50 batch 1, captured",
            one_pass("resnet50", 1, "cuda", True, ONE_PASS),
            "plain",
            given.rounds,
        )
        measure(
            "vit_b_16 batch 64", one_pass("vit_b_16", 64, "cuda", False, attention), "plain", given.rounds
        )
    else:
        measure("resnet50 batch 1", one_pass("resnet50", 1, "cpu", False, ONE_PASS), "plain", given.rounds)
        measure(
            "vit_b_16 batch 1", one_pass("vit_b_16", 1, "cpu", False, attention), "plain", given.rounds // 2
        )
    few = max(3, given.rounds // 6)
    runs = forward_only("resnet50", given.device)
    for method in ("rise", "occlusion"):
        pair = {name: runs[name] for name in (f"bare {method}", method)}
        measure(f"resnet50 {method}", pair, f"bare {method}", few)
    if importlib.util.find_spec("captum") is not None:
        measure(
            "efficientnet_lite0 expected", expected("efficientnet_lite0", given.device), "GradientShap", few
        )


if __name__ == "__main__":
    main()
