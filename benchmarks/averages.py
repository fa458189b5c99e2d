"""Compares SmoothGrad and Integrated Gradients with Captum's, and numbers of input copies per pass.

    python benchmarks/averages.py                     # time of ours / time of Captum's
    python benchmarks/averages.py --copies 1,2,4,8    # time with this many copies per pass / default time
    python benchmarks/averages.py --json FILE

EfficientNet-Lite0 on one image of 224 x 224, float32, 50 copies, class 281. Every contender runs once per
round, after a warm-up round. Ratios are computed within a round; their median, minimum and maximum are
printed. Captum runs all copies in one pass, which is its default.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import captum.attr
import torch

import rectgrad
from rectgrad.engine import points as copies

COUNT = {"smoothgrad": "samples", "integrated_gradients": "steps"}


def ours(model: torch.nn.Module, x: torch.Tensor, name: str, n: int) -> Callable[[], None]:
    return lambda: rectgrad.attribute(model, x, name, 281, **{COUNT[name]: n})


def with_copies(k: int, run: Callable[[], None]) -> Callable[[], None]:
    """The same call with k copies per pass, without a memory limit."""

    def limited() -> None:
        kept = dict(copies.ROWS), dict(copies.BYTES)
        try:
            copies.ROWS.update(dict.fromkeys(copies.ROWS, k))
            copies.BYTES.update(dict.fromkeys(copies.BYTES, 2**62))
            run()
        finally:
            copies.ROWS.update(kept[0])
            copies.BYTES.update(kept[1])

    return limited


def captums(model: torch.nn.Module, x: torch.Tensor, name: str, n: int) -> Callable[[], None]:
    if name == "smoothgrad":
        tunnel = captum.attr.NoiseTunnel(captum.attr.Saliency(model))
        return lambda: tunnel.attribute(x.clone(), nt_type="smoothgrad", nt_samples=n, target=281)
    return lambda: captum.attr.IntegratedGradients(model).attribute(x.clone(), n_steps=n, target=281)


def rounds(contenders: dict[str, Callable[[], None]], count: int, device: str) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(count + 1):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if i:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratios(seconds: list[float], by: list[float]) -> dict[str, float]:
    each = sorted(a / b for a, b in zip(seconds, by, strict=True))
    return {"median": statistics.median(each), "smallest": each[0], "largest": each[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=50, help="number of samples and steps")
    parser.add_argument("--copies", default="", help="comma-separated numbers of copies per pass to compare")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "Input Tensor .* did not already require gradients")
    model = rectgrad.models.load("efficientnet_lite0").module.eval().to(given.device)
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(given.device)
    result: dict[str, dict] = {}
    for name in COUNT:
        run, base = ours(model, x, name, given.count), "captum"
        contenders = {"rectgrad": run, "captum": captums(model, x, name, given.count)}
        if given.copies:
            base = "rectgrad"
            contenders = {"rectgrad": run}
            contenders |= {f"{k} copies": with_copies(int(k), run) for k in given.copies.split(",")}
        seconds = rounds(contenders, given.rounds, given.device)
        result[name] = {
            who: ratios(taken, seconds[base]) | {"seconds": statistics.median(taken)}
            for who, taken in seconds.items()
        }
        for who, r in result[name].items():
            if who != base:
                spread = f"{r['smallest']:.2f} to {r['largest']:.2f}"
                print(f"{name}: {who} / {base} = {r['median']:.2f} ({spread})", flush=True)
    if given.json:
        made_by = {
            "torch": torch.__version__,
            "captum": captum.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "device": given.device,
            "rounds": given.rounds,
            "count": given.count,
        }
        given.json.write_text(json.dumps({"made by": made_by, "ratios": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
