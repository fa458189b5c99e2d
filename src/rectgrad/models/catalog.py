"""Every model by name, and `load`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rectgrad.models import builtin, classes, factory, hubs
from rectgrad.models.image_model import ImageModel


@dataclass(frozen=True)
class Source:
    """Where a model comes from. how: what a person does to get it; extra: rectgrad's extra that it needs."""

    description: str
    how: str
    extra: str | None
    open: Callable[[str, Path | None], ImageModel] = field(repr=False)


MODELS: dict[str, Source] = {
    "efficientnet_lite0": Source(
        "EfficientNet-Lite0 on ImageNet: 1000 classes, 224×224 pixels, small and quick",
        builtin.INSTALL,
        "imagenet",
        builtin.efficientnet_lite0,
    ),
    "inception_v4": Source(
        "Inception-v4 on ImageNet, the network of the paper's photographs: 1000 classes, 299×299 pixels",
        "downloaded on first use (171 MB), or weights=FILE",
        "imagenet",
        builtin.inception_v4,
    ),
    "cifar10_cnn": Source(
        "the paper's CNN on CIFAR-10: 10 classes, 32×32 pixels",
        "comes with rectgrad",
        None,
        builtin.cifar10_cnn,
    ),
    "cifar10_cnn_patch": Source(
        "the same, trained on pictures with a patch of noise over their upper left corner",
        "comes with rectgrad",
        None,
        builtin.cifar10_cnn,
    ),
    "timm:NAME": Source("any classifier of timm", "pip install 'rectgrad[timm]'", "timm", hubs.timm),
    "torchvision:NAME": Source(
        "any classifier of torchvision", "pip install torchvision", None, hubs.torchvision
    ),
    "hf:NAME": Source(
        "any image classifier of the Hugging Face hub, or in a local folder",
        "pip install transformers",
        None,
        hubs.hugging_face,
    ),
    "FILE.py:FACTORY": Source(
        "your own: a function in a Python file that returns an nn.Module or an ImageModel",
        "weights=FILE and labels=FILE where it needs them",
        None,
        factory.from_file,
    ),
}


def load(
    name: str = "efficientnet_lite0", *, weights: str | Path | None = None, labels: str | Path | None = None
) -> ImageModel:
    """The model called `name` in MODELS, in evaluation mode.

    weights: a .safetensors, .pt or .pth file in place of the published weights. labels: a text file with one
    class a line, its names separated by commas.

        model = rectgrad.models.load("path/to/net.py:make", weights="net.safetensors", labels="names.txt")
    """
    model = _source(name).open(name, None if weights is None else Path(weights))
    model.module.eval()
    if labels is None:
        return model
    return replace(model, **classes.fields(classes.read(labels)))


def _source(name: str) -> Source:
    prefix = name.partition(":")[0]
    if ".py" in name and (name.endswith(".py") or ".py:" in name):
        return MODELS["FILE.py:FACTORY"]
    if name not in MODELS and f"{prefix}:NAME" not in MODELS:
        raise ValueError(f"unknown model {name!r}; models are {', '.join(MODELS)}")
    return MODELS[name if ":" not in name else f"{prefix}:NAME"]
