"""Image classifiers by name: networks with their weights, class names and preprocessing."""

from rectgrad.models.catalog import MODELS, Source, load
from rectgrad.models.cifar import CifarCNN
from rectgrad.models.efficientnet import EfficientNetLite0, EfficientNetLite1, EfficientNetLite2
from rectgrad.models.errors import ModelUnavailableError
from rectgrad.models.image_model import Guess, ImageModel
from rectgrad.models.inception import InceptionV4
from rectgrad.models.resnet import CifarResNet
from rectgrad.models.vit import CifarViT

__all__ = [
    "MODELS",
    "CifarCNN",
    "CifarResNet",
    "CifarViT",
    "EfficientNetLite0",
    "EfficientNetLite1",
    "EfficientNetLite2",
    "Guess",
    "ImageModel",
    "InceptionV4",
    "ModelUnavailableError",
    "Source",
    "load",
]
