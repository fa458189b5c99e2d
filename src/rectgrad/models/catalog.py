"""The models by name, and `load`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rectgrad.checks import unknown
from rectgrad.models import builtin, classes, factory, hubs
from rectgrad.models.image_model import ImageModel


@dataclass(frozen=True)
class Source:
    """Where a model comes from. `how` tells users how to obtain it; `extra` is the extra of rectgrad that it
    needs."""

    description: str
    how: str
    extra: str | None
    open: Callable[[str, Path | None], ImageModel] = field(repr=False)


MODELS: dict[str, Source] = {
    "efficientnet_lite0": Source(
        "EfficientNet-Lite0 on ImageNet: 1000 classes, 224×224 pixels, small and fast",
        builtin.INSTALL,
        "imagenet",
        builtin.efficientnet_lite,
    ),
    "efficientnet_lite1": Source(
        "EfficientNet-Lite1 on ImageNet: 1000 classes, 240×240 pixels",
        builtin.INSTALL_ALL,
        "imagenet-all",
        builtin.efficientnet_lite,
    ),
    "efficientnet_lite2": Source(
        "EfficientNet-Lite2 on ImageNet: 1000 classes, 260×260 pixels",
        builtin.INSTALL_ALL,
        "imagenet-all",
        builtin.efficientnet_lite,
    ),
    "inception_v4": Source(
        "Inception-v4 on ImageNet, the network of the paper's photographs: 1000 classes, 299×299 pixels",
        "downloaded on first use (171 MB), or weights=FILE",
        "imagenet",
        builtin.inception_v4,
    ),
    "cifar10_cnn": Source(
        "the paper's CNN on CIFAR-10: 10 classes, 32×32 pixels",
        "included in rectgrad",
        None,
        builtin.cifar10,
    ),
    "cifar10_cnn_patch": Source(
        "the same, trained on images with a patch of noise in their upper left corner",
        "included in rectgrad",
        None,
        builtin.cifar10,
    ),
    "cifar10_resnet": Source(
        "a small ResNet on CIFAR-10: 10 classes, 32×32 pixels", "included in rectgrad", None, builtin.cifar10
    ),
    "cifar10_vit": Source(
        "a small vision transformer on CIFAR-10: 10 classes, 32×32 pixels",
        "included in rectgrad",
        None,
        builtin.cifar10,
    ),
    "timm:NAME": Source("any classifier from timm", "pip install 'rectgrad[timm]'", "timm", hubs.timm),
    "torchvision:NAME": Source(
        "any classifier from torchvision", "pip install torchvision", None, hubs.torchvision
    ),
    "hf:NAME": Source(
        "any image classifier from the Hugging Face hub or a local folder",
        "pip install transformers",
        None,
        hubs.hugging_face,
    ),
    "FILE.py:FACTORY": Source(
        "your own model: a function in a Python file that returns an nn.Module or an ImageModel",
        "weights=FILE and labels=FILE if needed",
        None,
        factory.from_file,
    ),
}


def load(
    name: str = "efficientnet_lite0", *, weights: str | Path | None = None, labels: str | Path | None = None
) -> ImageModel:
    """Loads the model `name` of MODELS in evaluation mode.

    `weights` is a .safetensors, .pt or .pth file that replaces the published weights. `labels` is a text file
    with one class per line; alternative names are separated by commas.

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
        raise ValueError(unknown("model", name, MODELS))
    return MODELS[name if ":" not in name else f"{prefix}:NAME"]
