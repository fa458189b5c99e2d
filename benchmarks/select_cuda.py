"""Times the selection of tau and the rectified rule on a CUDA device, next to torch's own selections.

    python benchmarks/select_cuda.py [--json FILE]

floor    lower bound: reading the scores once, at the speed of a large copy
tau      the 98th percentile of each row by kernels.cuda.smallest, then by topk and (if fast enough) kthvalue
relu     the backward pass of a plain ReLU, which reads two tensors and writes one
rule     kernels.cuda.rectify, which replaces it; ratio: rule / relu
host     time until a call returns, without waiting for the device

The rows are the samples of a batch, d is their number of units. a is the ReLU of normal numbers, R is normal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rectgrad.kernels import cuda

# The stem of Inception V4, its three types of blocks (two sizes each), and layers of ResNet-50 for one photo.
SIZES = [(64, 710_432), (64, 235_200), (64, 117_600), (64, 78_400), (64, 55_488), (64, 36_992), (64, 16_384)]
SIZES += [(1, 802_816), (1, 200_704), (1, 100_352), (1, 25_088)]


def microseconds(run: Callable[[int], object], calls: int = 20) -> float:
    """Time of a call on the device, median of five. The device waits until all calls are queued."""
    for i in range(3):
        run(i)
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)
        begin.record()
        for i in range(calls):
            run(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1000)
    return statistics.median(times)


def host_microseconds(run: Callable[[int], object], calls: int = 300) -> float:
    """Time until a call returns, median of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            run(i)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes that a large copy reads and writes per microsecond."""
    x, y = torch.empty(2, 2**29, dtype=torch.uint8, device="cuda")
    return 2 * 2**29 / microseconds(lambda i: y.copy_(x))


def measure(rows: int, d: int, speed: float) -> dict[str, float | None]:
    """One row of the table. Calls alternate between pairs, so that the inputs are not in the cache."""
    pairs = [_pair(rows, d) for _ in range(2 if rows * d > 2**24 else 4)]
    scores = [a * R for a, R in pairs]
    above = round((d - 1) * 0.02)
    k = d - above
    n = len(pairs)
    tau = microseconds(lambda i: cuda.smallest(scores[i % n], k))
    relu = microseconds(lambda i: torch.ops.aten.threshold_backward(pairs[i % n][1], pairs[i % n][0], 0))
    rule = microseconds(lambda i: cuda.rectify(*pairs[i % n], rows, k))
    fast = rows * d <= 2**22  # kthvalue takes a second for the largest sizes
    return {
        "rows": rows,
        "d": d,
        "floor": rows * d * 4 / speed,
        "tau": tau,
        "topk": microseconds(lambda i: scores[i % n].topk(above + 1, dim=1, sorted=False), 3),
        "kthvalue": microseconds(lambda i: scores[i % n].kthvalue(k, dim=1), 1) if fast else None,
        "relu": relu,
        "rule": rule,
        "ratio": rule / relu,
        "host": host_microseconds(lambda i: cuda.rectify(*pairs[i % n], rows, k)) if rows == 1 else None,
    }


def _pair(rows: int, d: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, d, device="cuda").relu_(), torch.randn(rows, d, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    file = parser.parse_args().json
    if not cuda.available():
        raise SystemExit("select_cuda.py needs a CUDA device and Triton")
    torch.manual_seed(0)
    speed = bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copies at {speed / 1e6:.2f} TB/s; microseconds")
    table = [measure(rows, d, speed) for rows, d in SIZES]
    print("".join(f"{name:>10}" for name in table[0]))
    for line in table:
        cells = ("-" if v is None else f"{v:.2f}" if k == "ratio" else f"{v:.0f}" for k, v in line.items())
        print("".join(f"{cell:>10}" for cell in cells))
    if file:
        report = {
            "device": device,
            "torch": torch.__version__,
            "bytes_per_microsecond": speed,
            "table": table,
        }
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
