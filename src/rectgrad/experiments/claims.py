"""Claims 1 and 2: with tau = 0, RectGrad equals Guided Backprop times the input, and Deconv times the input
if a small constant is added to the activations (positive parts of all maps).

We report the largest difference on random networks and on the trained network.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rectgrad import rules
from rectgrad.api import attribute, propagate
from rectgrad.experiments.findings import Finding, Table
from rectgrad.experiments.lab import Lab
from rectgrad.models.cifar import CifarCNN

TITLE = "RectGrad generalises Guided Backprop and Deconv (Claims 1 and 2)"
PRESETS = {"quick": {"networks": 3, "images": 20}, "paper": {"networks": 10, "images": 1_000}}
PAPER = "Both equalities are exact."
CAPTIONS: dict[str, str] = {}


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    metrics = {}
    for i in range(lab.numbers["networks"]):
        make = partial(_differences_of_random, i, x, lab.device)
        metrics[f"random {i}"] = lab.parts.part(f"random {i}", make)
    for seed, module in zip(lab.seeds, lab.networks(), strict=True):
        name = f"trained {seed}"
        metrics[name] = lab.parts.part(name, partial(_differences, module, x.to(lab.device)))
    return metrics


def _differences_of_random(seed: int, x: Tensor, device: str) -> dict[str, float]:
    return _differences(_random(seed, device), x.to(device))


def _random(seed: int, device: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CifarCNN().eval().requires_grad_(False).to(device)


def _differences(module: nn.Module, x: Tensor) -> dict[str, float]:
    ours = attribute(module, x, "rectgrad", tau=0.0, padding_trick=False, batch_size=100)
    guided = (attribute(module, x, "guided_backprop", batch_size=100) * x).clamp(min=0)
    deconv = (attribute(module, x, "deconv", batch_size=100) * x).clamp(min=0)
    shifted = torch.cat([_with_eps(module, rows) for rows in x.split(100)])
    return {
        "claim 1": float((shifted - deconv).abs().max()),
        "claim 2": float((ours - guided).abs().max()),
        "largest map value": float(max(guided.max(), deconv.max())),
    }


def _with_eps(module: nn.Module, x: Tensor, eps: float = 1e-6) -> Tensor:
    """The positive part of the input times the gradient of the rule with tau = 0 on activations plus eps."""
    x = x.clone().requires_grad_()
    with propagate({"relu": rules.rectified(tau=0.0, eps=eps)}):
        (grad,) = torch.autograd.grad(module(x).amax(1).sum(), x)
    return (grad * x.detach()).clamp(min=0)


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Any]:
    return {}


def tables(metrics: dict[str, Any]) -> list[Table]:
    keys = list(next(iter(metrics.values())))
    rows = [[name, *(f"{found[key]:.3g}" for key in keys)] for name, found in metrics.items()]
    head = ["network", "claim 1, largest difference", "claim 2, largest difference", "largest map value"]
    return [Table(head, rows)]


def findings(metrics: dict[str, Any]) -> list[Finding]:
    claims = {
        "claim 1": "With tau = 0 and a small constant added to activations, RectGrad equals Deconv times the "
        "input.",
        "claim 2": "With tau = 0, RectGrad equals Guided Backprop times the input.",
    }
    return [Finding(claim, *_worst(metrics, key)) for key, claim in claims.items()]


def _worst(metrics: dict[str, Any], key: str) -> tuple[bool, str]:
    worst = max(found[key] / found["largest map value"] for found in metrics.values())
    return worst < 1e-5, f"largest difference {worst:.2g} of the map's largest value, {len(metrics)} networks"
