"""Captum's counterparts of our methods. Captum is imported here alone, and only where it is asked for.

Each gets a copy of the network's modules, since some of them write on modules; the tensors are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rectgrad.bench.case import Case
from rectgrad.bench.naive import sharing_copy

PEERS = {
    "saliency": "Saliency",
    "gradient_x_input": "InputXGradient",
    "guided_backprop": "GuidedBackprop",
    "deconv": "Deconvolution",
    "smoothgrad": "NoiseTunnel",
    "integrated_gradients": "IntegratedGradients",
    "epsilon_lrp": "LRP",
    "deeplift": "DeepLift",
}


def peer(case: Case, method: str) -> Callable[[], Tensor]:
    """Captum's counterpart of a method, with as many passes of as many pictures where it averages."""
    attr: Any = importlib.import_module("captum.attr")
    module, n = sharing_copy(case.module), len(case.inputs)
    options: dict[str, dict[str, Any]] = {
        "saliency": {"abs": False},
        "smoothgrad": {"nt_samples": 50, "nt_samples_batch_size": 1, "abs": False},
        "integrated_gradients": {"n_steps": 50, "internal_batch_size": n},
    }

    def run() -> Tensor:
        if method == "smoothgrad":
            explainer: Any = attr.NoiseTunnel(attr.Saliency(module))
        else:
            explainer = getattr(attr, PEERS[method])(module)
        x = case.inputs.detach().requires_grad_()
        return explainer.attribute(x, target=case.target, **options.get(method, {})).detach()

    return run


def idle(name: str, run: Callable[[], Tensor], inputs: Tensor, gradient: Tensor) -> bool:
    """Whether a peer that changes the backward pass at activations changed it nowhere, without a word."""
    if name not in ("GuidedBackprop", "Deconvolution", "DeepLift"):
        return False
    untouched = gradient * inputs if name == "DeepLift" else gradient
    return bool((run() - untouched).abs().max() <= 1e-5 * untouched.abs().max())
