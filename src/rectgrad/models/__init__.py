"""Image classifiers by name: networks with their weights, class names and preprocessing."""

from rectgrad.models.catalog import MODELS, Source, load
from rectgrad.models.cifar import CifarCNN
from rectgrad.models.efficientnet import EfficientNetLite0
from rectgrad.models.errors import ModelUnavailableError
from rectgrad.models.image_model import Guess, ImageModel
from rectgrad.models.inception import InceptionV4

__all__ = [
    "MODELS",
    "CifarCNN",
    "EfficientNetLite0",
    "Guess",
    "ImageModel",
    "InceptionV4",
    "ModelUnavailableError",
    "Source",
    "load",
]
