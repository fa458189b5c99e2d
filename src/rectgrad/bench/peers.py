"""Captum's counterparts of our methods. Captum is imported here, when it is used.

Each counterpart gets its own copy of the modules, because some modify them; the tensors are shared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
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
    "expected_gradients": "GradientShap",
    "occlusion": "Occlusion",
}


def peer(case: Case, method: str) -> Callable[[], Tensor]:
    """Captum's counterpart of a method, with the same number of passes for averages."""
    attr: Any = importlib.import_module("captum.attr")
    module, n = sharing_copy(case.module), len(case.inputs)
    channels, *sides = case.inputs.shape[1:]
    options: dict[str, dict[str, Any]] = {
        "saliency": {"abs": False},
        "smoothgrad": {"nt_samples": 50, "nt_samples_batch_size": 1, "abs": False},
        "integrated_gradients": {"n_steps": 50, "internal_batch_size": n},
        "expected_gradients": {"n_samples": 50, "baselines": torch.zeros_like(case.inputs[:5])},
        "occlusion": {
            "sliding_window_shapes": (channels, *(side // 8 for side in sides)),
            "strides": (channels, *(side // 16 for side in sides)),
        },
    }

    def run() -> Tensor:
        if method == "smoothgrad":
            explainer: Any = attr.NoiseTunnel(attr.Saliency(module))
        else:
            explainer = getattr(attr, PEERS[method])(module)
        x = case.inputs.detach().requires_grad_()
        return explainer.attribute(x, target=case.target, **options.get(method, {})).detach()

    return run


def has_no_effect(name: str, run: Callable[[], Tensor], inputs: Tensor, gradient: Tensor) -> bool:
    """Whether a method that should change the backward pass at activations silently changed nothing."""
    if name not in ("GuidedBackprop", "Deconvolution", "DeepLift"):
        return False
    untouched = gradient * inputs if name == "DeepLift" else gradient
    return bool((run() - untouched).abs().max() <= 1e-5 * untouched.abs().max())
