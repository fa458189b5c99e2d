"""Metrics against Quantus' on the CIFAR CNN: 256 images, saliency maps given, the same parameters.

    python benchmarks/metrics_speed.py [--device cuda] [--images 256] [--rounds 3] [--json FILE]

Every contender runs once per round; the shortest time counts, and the ratio is Quantus' time over ours. The
ratio of processor times is less affected by other processes. On a CPU, both run the model on 64 images at a
time, the default of Quantus. "model" is the time of the model alone for the number of evaluations that our
metric needs: without a faster model, no implementation can take less.

Maps of noisy inputs and of randomised networks are given too: the explanation function returns stored maps,
so that only the metric is measured. Quantus' ROAD fails on colour images; see tests/interop for the maps that
make it work. Quantus' Infidelity repeats its ten samples without anything random in them; ours runs once.
"deletion" removes 64 pixels in a step and "deletion 48" a third of that: Quantus removes the channels of a
pixel one by one, so that 64 features in a step are 48 steps. The second has as many steps.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import rectgrad
from rectgrad import data, metrics
from rectgrad.bench.environment import commit, environment
from rectgrad.metrics.random_weights import stages
from rectgrad.models import load

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import quantus

QUIET = {"disable_warnings": True, "normalise": False}
SHARES = (10, 20, 30, 40, 50, 70, 90)  # per cent, of ROAD
LAYERS = 6


class Times(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


class Case(NamedTuple):
    """ours and theirs: what is measured. evaluations: how often our metric runs the model on all images."""

    ours: Callable[[], object]
    theirs: Callable[[], object]
    evaluations: int = 0


class Bench:
    """The images, maps and masks on a device, and how to call Quantus with them."""

    def __init__(self, device: str, images: int) -> None:
        self.device, self.model = device, load("cifar10_cnn").module.to(device)
        shown = data.shapes.generate(images, seed=1)
        self.inputs = data.scaled(shown.pixels).to(device)
        self.masks = torch.as_tensor(shown.masks).reshape(-1, 1, 32, 32).bool().to(device)
        self.classes = self.model(self.inputs).argmax(1)
        self.maps = rectgrad.attribute(self.model, self.inputs, "saliency", self.classes)
        self.pixels = self.maps.sum(1, keepdim=True)
        self.batch_size = 64 if device == "cpu" else None
        self.stored = self.maps.cpu().numpy()

    def quantus(self, metric: object, maps: torch.Tensor, **options: object) -> Callable[[], object]:
        x, y, a = (each.cpu().numpy() for each in (self.inputs, self.classes, maps))
        given = {"model": self.model, "x_batch": x, "y_batch": y, "device": self.device, "batch_size": 64}
        return lambda: metric(**given, a_batch=a.copy(), **options)

    def cases(self) -> dict[str, Case]:
        model, x, y, maps = self.model, self.inputs, self.classes, self.maps
        options = {"batch_size": self.batch_size}
        lowest = self.pixels.amin().expand_as(self.pixels) - 1
        looked_up = {"explain_func": lambda model, inputs, targets, **_: self.stored[: len(inputs)]}
        masks = {"s_batch": self.masks.cpu().numpy()}
        black = x.flatten(1).amin(1)[:, None, None, None]
        number = torch.arange(32, device=x.device)[:, None] // 8 * 4 + torch.arange(32, device=x.device) // 8
        flipping = self.quantus(quantus.PixelFlipping(features_in_step=64, **QUIET), maps, softmax=False)
        return {
            "deletion": Case(
                lambda: metrics.deletion(model, x, maps, y, steps=16, baseline=black, **options), flipping, 17
            ),
            "deletion 48": Case(
                lambda: metrics.deletion(model, x, maps, y, steps=48, baseline=black, **options), flipping, 49
            ),
            "road": Case(
                lambda: metrics.road(model, x, maps, y, fractions=[p / 100 for p in SHARES], **options),
                self.quantus(
                    quantus.ROAD(percentages=[p / 3 for p in SHARES], **QUIET),
                    torch.cat([self.pixels, lowest, lowest], 1),
                ),
                len(SHARES),
            ),
            "sensitivity_n": Case(
                lambda: metrics.sensitivity_n(
                    model, x, maps, y, fractions=(224 / 1024,), subsets=50, baseline=black, **options
                ),
                self.quantus(
                    quantus.FaithfulnessCorrelation(subset_size=224, nr_runs=50, **QUIET), maps, softmax=False
                ),
                51,
            ),
            "infidelity": Case(
                lambda: metrics.infidelity(
                    model,
                    x,
                    maps,
                    y,
                    perturbation=lambda x, j: torch.where(number <= j, x - black, 0),
                    draws=16,
                    **options,
                ),
                self.quantus(
                    quantus.Infidelity(perturb_patch_sizes=[8], n_perturb_samples=10, **QUIET),
                    maps,
                    softmax=False,
                ),
                17,
            ),
            "max_sensitivity": Case(
                lambda: metrics.max_sensitivity(
                    x, maps, y, attribute=lambda x, t: maps, radius=0.2, draws=10
                ),
                self.quantus(
                    quantus.MaxSensitivity(nr_samples=10, lower_bound=0.2, **QUIET), maps, **looked_up
                ),
            ),
            "randomisation": Case(
                lambda: metrics.randomisation(maps, [maps for _ in stages(model, LAYERS)]),
                self.quantus(quantus.MPRT(**QUIET), maps, **looked_up),
            ),
            "gini": Case(lambda: metrics.gini(maps), self.quantus(quantus.Sparseness(**QUIET), maps)),
            "inside": Case(
                lambda: metrics.inside(self.pixels, self.masks, share=True),
                self.quantus(quantus.RelevanceMassAccuracy(**QUIET), self.pixels, **masks),
            ),
            "pointing_game": Case(
                lambda: metrics.pointing_game(self.pixels, self.masks),
                self.quantus(quantus.PointingGame(**QUIET), self.pixels, **masks),
            ),
        }

    def forward(self) -> Times:
        size = self.batch_size or len(self.inputs)
        with torch.no_grad():
            return self.times(lambda: [self.model(part) for part in self.inputs.split(size)])

    def times(self, run: Callable[[], object]) -> Times:
        self._wait()
        start, cpu = time.perf_counter(), time.process_time()
        run()
        self._wait()
        return Times(time.perf_counter() - start, time.process_time() - cpu)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def measured(bench: Bench, rounds: int) -> dict[str, dict[str, Times]]:
    """Shortest times, by metric and contender."""
    found = {}
    for name, case in bench.cases().items():
        bench.times(case.ours)  # warm-up
        rows = [(bench.times(case.ours), bench.times(case.theirs), bench.forward()) for _ in range(rounds)]
        ours, theirs, one = (
            Times(*map(min, zip(*column, strict=True))) for column in zip(*rows, strict=True)
        )
        model = Times(*(case.evaluations * seconds for seconds in one))
        found[name] = {"ours": ours, "quantus": theirs, "model": model}
        print(
            f"{name:16} ours {ours.wall:8.4f} s (model {model.wall:7.3f})  Quantus {theirs.wall:8.3f} s  "
            f"ratio {theirs.wall / ours.wall:6.1f}  processor {theirs.cpu / ours.cpu:6.1f}",
            flush=True,
        )
    return found


def summary(found: dict[str, dict[str, Times]], kind: int) -> dict[str, object]:
    """Ratios of wall (0) or processor (1) time."""
    ratios = {name: row["quantus"][kind] / row["ours"][kind] for name, row in found.items()}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    return {"ratios": ratios, "lowest": min(ratios.values()), "geometric_mean": mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    np.random.seed(0)
    found = measured(Bench(given.device, given.images), given.rounds)
    wall, processor = summary(found, 0), summary(found, 1)
    for kind, each in (("wall", wall), ("processor", processor)):
        print(f"{kind} time: lowest ratio {each['lowest']:.1f}, geometric mean {each['geometric_mean']:.1f}")
    if given.json:
        record = {
            "environment": environment(given.device) | {"quantus": quantus.__version__},
            "commit": commit(),
            "images": given.images,
            "rounds": given.rounds,
            "seconds": {name: {who: t._asdict() for who, t in row.items()} for name, row in found.items()},
            "wall": wall,
            "processor": processor,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
