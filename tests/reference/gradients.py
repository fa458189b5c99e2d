"""Methods that are one backward pass: the rule of each, and what is done with the result."""

from typing import Any

import torch
from torch import Tensor

from reference.graph import plain
from reference.rectified import deconv_rule, guided_rule, rectgrad_rule

PRESETS = {
    "rectgrad_prr": ("rectgrad", {"prr": True}),
    "rectgrad_mod": ("rectgrad", {"rule": "mod"}),
    "rectgrad_gated": ("rectgrad", {"gate": "class"}),
}
Maps = tuple[Tensor, ...]
RAW = {"saliency": lambda: plain, "gradient_x_input": lambda: plain, "rectgrad": rectgrad_rule,
       "guided_backprop": lambda: guided_rule, "deconv": lambda: deconv_rule}  # fmt: skip
FINAL = {  # the method's last step: times the input, positive part
    "saliency": (False, False),
    "gradient_x_input": (True, False),
    "rectgrad": (True, True),
    "guided_backprop": (False, False),
    "deconv": (False, False),
}


def baseline_of(sample: tuple[Tensor, ...], baseline: Any = 0.0) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) + baseline for x in sample)
