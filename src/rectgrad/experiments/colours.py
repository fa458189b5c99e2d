"""One colour per method in every figure, and layer names in words."""

from __future__ import annotations

import re

METHOD_COLOURS = {
    "rectgrad": "#d9480f",
    "rectgrad_prr": "#f0a030",
    "rectgrad_mod": "#8c2d04",
    "rectgrad_gated": "#c2185b",
    "saliency": "#3b6fb6",
    "gradient_x_input": "#79b4e0",
    "smoothgrad": "#159a9c",
    "integrated_gradients": "#4c8c4a",
    "guided_backprop": "#7b4fa3",
    "deconv": "#b79fd6",
    "deeplift": "#2f3e46",
    "epsilon_lrp": "#8d6e63",
    "random": "#9a9ca6",
}
OTHER = "#1c1d21"
GREY = "#85878f"
_LAYERS = {"conv": "convolution", "dense": "dense layer"}
_ACTIVATIONS = {f"relu{i}": f"convolution {i}" for i in range(1, 5)} | {"relu5": "dense layer 1"}


def colour(method: str) -> str:
    return METHOD_COLOURS.get(method, OTHER)


def layer_name(name: str) -> str:
    """A layer of the CNN in words: conv1 is convolution 1, and so is its activation, relu1."""
    match = re.fullmatch(r"(conv|dense)(\d)", name)
    return f"{_LAYERS[match[1]]} {match[2]}" if match else _ACTIVATIONS.get(name, name)
