"""Where `rectgrad judge --preset full` spends its time: milliseconds of its parts, on one chunk of photos.

    python benchmarks/judge_profile.py [--model efficientnet_lite0] [--device cuda] [--photos 50]

Photos are noise: times do not depend on them. It also says which methods cannot be captured, and why.
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch

import rectgrad
from rectgrad import metrics
from rectgrad.methods import METHODS
from rectgrad.metrics.curves import pixel_order
from rectgrad.metrics.draws import Draws
from rectgrad.metrics.imputation import linear_imputation
from rectgrad.models import load


def milliseconds(name: str, work: Callable[[], object], rounds: int = 3) -> None:
    """Prints the shortest of some rounds, after a warm-up."""
    work()
    found = []
    for _ in range(rounds):
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        found.append(1000 * (time.perf_counter() - started))
    print(f"{name:42} {min(found):9.2f} ms", flush=True)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def network(model: torch.nn.Module, x: torch.Tensor) -> None:
    last = x.contiguous(memory_format=torch.channels_last)
    double = torch.cat([x, x])
    copied = load_channels_last(model)
    with torch.no_grad():
        milliseconds("forward pass", lambda: model(x), 10)
        milliseconds("forward pass, twice the batch", lambda: model(double), 10)
        milliseconds("forward pass, channels last", lambda: model(last), 10)
        milliseconds("forward pass, weights channels last too", lambda: copied(last), 10)
        milliseconds("ten forward passes in a row", lambda: [model(x) for _ in range(10)])


def load_channels_last(model: torch.nn.Module) -> torch.nn.Module:
    import copy

    return copy.deepcopy(model).to(memory_format=torch.channels_last)


def measures(x: torch.Tensor) -> None:
    maps, draws = torch.randn_like(x), Draws(x, 0)
    rank, pixels = pixel_order("profile", x, maps), x.shape[-2] * x.shape[-1]
    masks = torch.cat([rank < int(f * pixels) for f in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)])
    milliseconds("hash of the photos", lambda: Draws(x, 0))
    milliseconds("normal noise", lambda: draws.normal(*x.shape[1:]))
    milliseconds("random subset of pixels", lambda: draws.subset(pixels, pixels // 2))
    milliseconds("order of the pixels", lambda: pixel_order("profile", x, maps))
    milliseconds("imputation, one mask", lambda: linear_imputation(x, masks[: len(x)]))
    milliseconds("imputation, seven masks", lambda: linear_imputation(x.repeat(7, 1, 1, 1), masks))
    milliseconds("rank correlation", lambda: metrics.rank_correlation(maps, x, absolute=True))
    milliseconds("specificity", lambda: metrics.specificity(maps, x))
    milliseconds("Gini index", lambda: metrics.gini(maps))


def methods(model: torch.nn.Module, x: torch.Tensor) -> None:
    for name, method in METHODS.items():
        if not (method.ready and method.one_backward and method.runs_model):
            continue
        try:
            milliseconds(f"{name}, ordinary call", lambda m=method: rectgrad.attribute(model, x, m, 0))
            started = time.perf_counter()
            captured = rectgrad.capture(model, x, method)
            print(f"{name + ', capturing':42} {1000 * (time.perf_counter() - started):9.2f} ms", flush=True)
            milliseconds(f"{name}, captured call", lambda c=captured: c(x, 0))
            captured.release()
        except (RuntimeError, ValueError) as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="efficientnet_lite0")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--photos", type=int, default=50)
    given = parser.parse_args()
    loaded = load(given.model, weights=given.weights)
    model = loaded.module.to(given.device).requires_grad_(False)
    x = torch.randn(given.photos, 3, *loaded.size, device=given.device)
    warnings.simplefilter("default")
    network(model, x)
    measures(x)
    methods(model, x)


if __name__ == "__main__":
    main()
