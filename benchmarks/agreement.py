"""Checks that the maps of the experiments agree with implementations that share no code with the engine.

    python benchmarks/agreement.py [--dataset cifar10] [--per-class 10]

Uses the images with masks (100 on CIFAR-10). Compares every method with the slow versions of
tests/reference/, written from the paper; SmoothGrad and integrated gradients with plain autograd in a loop;
epsilon-LRP with Captum. In float64, both must agree to rounding. Our float32 maps, as used in the
experiments, are compared with float64 maps; a unit whose score is close to tau may end up on either side.
Takes about ten minutes. Writes results/DATASET/agreement.json, which the report shows.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from captum.attr import LRP
from captum.attr._utils.lrp_rules import EpsilonRule
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rectgrad.api import attribute
from rectgrad.bench.environment import commit, environment
from rectgrad.experiments.lab import Lab
from rectgrad.experiments.maps import COMPARED
from rectgrad.metrics import outside
from rectgrad.photos import files
from reference import quadrature_points, reference_attribute
from reference.noise import noise_of


def gradient(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(module(x).gather(1, target[:, None]).sum(), x)[0]


def integrated(module: nn.Module, x: Tensor) -> Tensor:
    target = module(x).argmax(1)
    points = quadrature_points(50, "trapezoid")
    return x * sum(weight * gradient(module, alpha * x, target) for alpha, weight in points)


def noise(j: int, x: Tensor) -> Tensor:
    """The j-th noise of seed 0, which is different for each image. In float32, as in the library."""
    return torch.stack([noise_of((each,), 0, j)[0].float() for each in x.cpu()]).to(x)


def smoothed(module: nn.Module, x: Tensor) -> Tensor:
    target = module(x).argmax(1)
    size = 0.1 * (x.amax((1, 2, 3)) - x.amin((1, 2, 3))).reshape(-1, 1, 1, 1)
    return sum(gradient(module, x + size * noise(j, x), target) for j in range(50)) / 50


def captums_lrp(module: nn.Module, x: Tensor) -> Tensor:
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear, nn.MaxPool2d)):
            layer.rule = EpsilonRule(epsilon=1e-4)
    return LRP(module).attribute(x, target=module(x).argmax(1)).detach()


OTHERS = {
    "smoothgrad": ("plain autograd in a loop", smoothed),
    "integrated_gradients": ("plain autograd in a loop", integrated),
    "epsilon_lrp": ("Captum", captums_lrp),
}


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """The largest difference within each map, relative to the map's largest value."""
    return (ours - theirs).flatten(1).abs().amax(1) / theirs.flatten(1).abs().amax(1)


def compared(lab: Lab, method: str, x: Tensor, objects: Tensor) -> dict:
    against, theirs = OTHERS.get(method, ("tests/reference/", partial(_reference, method)))
    wide = lab.network.double()
    expected = theirs(wide, x.double())
    exact = difference(attribute(wide, x.double(), method), expected)
    ours = attribute(lab.network.float(), x, method)
    single = difference(ours.double(), expected)
    shares = [outside(maps.sum(1), objects, share=True) for maps in (ours, expected)]
    return {
        "against": against,
        "float64_largest": float(exact.max()),
        "float32_median": float(single.median()),
        "float32_largest": float(single.max()),
        "float32_within_1e-4": float((single < 1e-4).double().mean()),
        "outside_share_difference_of_means": float(shares[0].double().mean() - shares[1].mean()),
        "n": len(x),
    }


def _reference(method: str, module: nn.Module, x: Tensor) -> Tensor:
    return reference_attribute(module, x, method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--per-class", type=int, default=10)
    given = parser.parse_args()
    out = Path("results") / given.dataset
    lab = Lab("agreement", given.dataset, "paper", {"per_class": given.per_class}, out)
    x, objects, _ = lab.masked()
    found, started = {}, time.monotonic()
    for method in COMPARED:
        found[method] = lab.parts.part(method, partial(compared, lab, method, x, objects))
        print(method, found[method], flush=True)
    record = {
        "dataset": given.dataset,
        "settings": lab.settings(),
        "environment": environment("cpu"),
        "commit": commit(),
        "seconds": round(time.monotonic() - started, 1),
        "agreement": found,
    }
    files.save_json(record, out / "agreement.json")
    lab.parts.clear()


if __name__ == "__main__":
    main()
