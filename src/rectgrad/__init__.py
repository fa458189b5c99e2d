"""rectgrad: what a neural network looked at, without the noise."""

from rectgrad import metrics
from rectgrad.averages import IntegratedGradients, SmoothGrad
from rectgrad.catalog import METHODS
from rectgrad.methods import (
    Deconv,
    DeepLift,
    EpsilonLRP,
    GradientXInput,
    GuidedBackprop,
    RandomMap,
    RectGrad,
    Saliency,
)
from rectgrad.propagate import propagate
from rectgrad.records import Record, attribute, layer_attributions, record
from rectgrad.run import UnsupportedModelError
from rectgrad.target import contrast

__all__ = [
    "METHODS",
    "Deconv",
    "DeepLift",
    "EpsilonLRP",
    "GradientXInput",
    "GuidedBackprop",
    "IntegratedGradients",
    "RandomMap",
    "Record",
    "RectGrad",
    "Saliency",
    "SmoothGrad",
    "UnsupportedModelError",
    "attribute",
    "contrast",
    "layer_attributions",
    "metrics",
    "propagate",
    "record",
]
__version__ = "0.1.0"
