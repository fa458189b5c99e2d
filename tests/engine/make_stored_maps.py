"""Write `stored_maps.npz`: the maps of every network in `stored_networks`, by every method.

The stored file was written by commit 09e2835, the last one with the former engine, and shows that the present
engine computes the same maps. To write it again, check out that commit elsewhere and run, from this
repository:

    PYTHONPATH=FORMER/src python tests/engine/make_stored_maps.py

The file has one flat float32 array for each network and `about`, JSON that says how the maps were made and
which shapes each array holds; `read` unpacks it.
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rectgrad
from stored_networks import NETWORKS, Inputs, normal

FILE = Path(__file__).with_name("stored_maps.npz")
COMMIT = "09e2835"

# Tiny layers pass nothing at the default of q = 98. A baseline is a scale here: see `options_of`.
OPTIONS: dict[str, dict[str, Any]] = {
    "rectgrad": {"q": 80},
    "rectgrad_prr": {"q": 80},
    "rectgrad_mod": {"q": 80},
    "saliency": {},
    "gradient_x_input": {},
    "guided_backprop": {},
    "deconv": {},
    "smoothgrad": {"samples": 4},
    "integrated_gradients": {"steps": 6, "baseline": 0.3},
    "epsilon_lrp": {},
    "deeplift": {"baseline": 0.3},
    "random": {},
}
# Stored for the record. The noise of each sample depends on its values now; it used to be the same for all.
NOT_COMPARED = {"smoothgrad"}
# Where the former engine was wrong. It had no exact DeepLIFT rule for a vector's norm. DeepLIFT and
# epsilon-LRP used the plain derivative of a ReLU6 that is a gate. `layer_attributions` listed such gates.
# Epsilon-LRP stabilised a batch norm or an added constant that is one with the layer after it, and passed
# relevance through elementary functions by their derivative, and shared it with what is added to a product.
LEFT_OUT = {
    ("batch_norm_before", "epsilon_lrp"),
    ("batch_norm_after_relu", "epsilon_lrp"),
    ("stopped_gradient", "epsilon_lrp"),
    ("elementary_functions", "epsilon_lrp"),
    ("batched_products", "epsilon_lrp"),
    ("normalised_vectors", "deeplift"),
    ("hard_sigmoid_gates", "deeplift"),
    ("hard_sigmoid_gates", "epsilon_lrp"),
    ("hard_sigmoid_gates", "layers"),
    ("squeeze_excite_hard", "layers"),
}


def options_of(name: str, method: str, inputs: Inputs) -> dict[str, Any]:
    """The options of a method, with a random baseline of the given scale.

    On a constant baseline all windows of a max pooling layer hold ties, which rounding would break.
    """
    options = dict(OPTIONS[method])
    if "baseline" in options:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        baselines = tuple(
            torch.from_numpy(options["baseline"] * normal(x.shape, f"{name} baseline {i}")).to(x)
            for i, x in enumerate(tensors)
        )
        options["baseline"] = baselines if isinstance(inputs, tuple) else baselines[0]
    return options


def maps_of(name: str, method: str) -> tuple[Tensor, ...]:
    """The maps of a network's inputs, one for each."""
    model, inputs = NETWORKS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        maps = rectgrad.attribute(model, inputs, method, **options_of(name, method, inputs))
    return maps if isinstance(maps, tuple) else (maps,)


def layers_of(name: str) -> list[tuple[str, Tensor]]:
    """What arrives at each rectified activation of a network."""
    model, inputs = NETWORKS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return rectgrad.layer_attributions(model, inputs, "rectgrad", **OPTIONS["rectgrad"])


Found = list[np.ndarray] | str  # arrays, or the class name of the exception


def found(name: str, key: str) -> Found:
    """The maps of a network by the method `key`, or its layer attributions where that is "layers"."""
    try:
        values = [value for _, value in layers_of(name)] if key == "layers" else maps_of(name, key)
    except Exception as error:
        return type(error).__name__
    return [value.float().numpy() for value in values]


def read() -> tuple[dict[str, Any], dict[str, dict[str, Found]]]:
    """What the file says about itself, and for each network the maps by method and `layers`."""
    with np.load(FILE) as file:
        about = json.loads(str(file["about"]))
        return about, {name: unpacked(file[name], about["contents"][name]) for name in about["contents"]}


def unpacked(flat: np.ndarray, contents: dict[str, Any]) -> dict[str, Found]:
    maps: dict[str, Found] = {}
    start = 0
    for key, shapes in contents.items():
        if isinstance(shapes, str):
            maps[key] = shapes
            continue
        ends = start + np.cumsum([math.prod(shape) for shape in shapes], dtype=int)
        parts = np.split(flat[start : ends[-1]], ends[:-1] - start)
        maps[key] = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        start = ends[-1]
    return maps


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    contents: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for name in NETWORKS:
        maps = {key: found(name, key) for key in (*OPTIONS, "layers") if (name, key) not in LEFT_OUT}
        names[name] = []
        if not isinstance(maps.get("layers", ""), str):
            names[name] = [layer for layer, _ in layers_of(name)]
        contents[name] = {k: v if isinstance(v, str) else [x.shape for x in v] for k, v in maps.items()}
        arrays[name] = np.concatenate([x.ravel() for v in maps.values() if not isinstance(v, str) for x in v])
    about = {
        "commit": COMMIT,
        "torch": torch.__version__,
        "options": OPTIONS,
        "not_compared": sorted(NOT_COMPARED),
        "contents": contents,
        "layers": names,
    }
    np.savez_compressed(FILE, about=np.array(json.dumps(about)), **arrays)
    print(f"{FILE.name}: {len(arrays)} networks, {FILE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
