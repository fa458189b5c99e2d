"""Small deterministic networks, one for each way of writing a model that the engine has to follow.

`NETWORKS[name]()` returns a model in evaluation mode and its inputs, a tensor or a tuple of them. Neither a
torch version nor another network affects their numbers. Most networks are float64, so that rounding cannot
move a unit across a threshold. Nothing here knows about attributions.
"""

import torch

from stored_networks import (
    activations,
    arithmetic,
    branches,
    convolutions,
    gates,
    interfaces,
    norms,
    pooling,
    sharing,
    tokens,
)
from stored_networks.registry import NETWORKS, Inputs, also_in, normal

__all__ = ["NETWORKS", "THEMES", "Inputs", "normal"]

# Each adds its networks to NETWORKS.
THEMES = (
    *(convolutions, norms, activations, gates, branches),
    *(pooling, tokens, sharing, arithmetic, interfaces),
)

for _name in (
    "plain_cnn",
    "resnet",
    "inception",
    "mobilenet",
    "densenet",
    "mixer",
    "multihead_attention",
    "mlp",
):
    also_in(torch.float32, _name)
for _name in ("mlp", "one_score"):
    also_in(torch.bfloat16, _name)
