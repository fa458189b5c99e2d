"""Claims 1 and 2: RectGrad at tau = 0 is Guided Backprop times the input; with a small number added to the
activation it is Deconv times the input. The largest difference, on random networks and on the trained one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from rectgrad import rules
from rectgrad.experiments.lab import Lab
from rectgrad.models.cifar import CifarCNN
from rectgrad.records import attribute
from rectgrad.tape import propagate

TITLE = "RectGrad generalises Guided Backprop and Deconv (Claims 1 and 2)"
PRESETS = {"quick": {"networks": 3, "images": 20}, "paper": {"networks": 10, "images": 1_000}}


def run(lab: Lab) -> dict[str, Any]:
    x, _ = lab.test()
    metrics = {}
    for i in range(lab.numbers["networks"]):
        make = partial(_differences_of_random, i, x, lab.device)
        metrics[f"random {i}"] = lab.parts.part(f"random {i}", make)
    metrics["trained"] = lab.parts.part("trained", lambda: _differences(lab.network, x.to(lab.device)))
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
        "claim 1": float((ours - guided).abs().max()),
        "claim 2": float((shifted - deconv).abs().max()),
        "largest map value": float(max(guided.max(), deconv.max())),
    }


def _with_eps(module: nn.Module, x: Tensor, eps: float = 1e-6) -> Tensor:
    """The rule with tau = 0 on activations a little above what they are, times the input, positive part."""
    x = x.clone().requires_grad_()
    with propagate({"relu": rules.rectified(tau=0.0, eps=eps)}):
        (grad,) = torch.autograd.grad(module(x).amax(1).sum(), x)
    return (grad * x.detach()).clamp(min=0)


def draw(lab: Lab, metrics: dict[str, Any]) -> dict[str, Figure]:
    page = Figure(figsize=(7, 0.5 * len(metrics) + 1), layout="constrained")
    axis = page.subplots()
    axis.axis("off")
    rows = [[name, *(f"{found[key]:.3g}" for key in found)] for name, found in metrics.items()]
    axis.table(rows, colLabels=["network", *next(iter(metrics.values()))], loc="center").scale(1, 1.5)
    return {"": page}
