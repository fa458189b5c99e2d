"""Named image classifiers: a network with its weights, its class names and the inputs it expects."""

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
