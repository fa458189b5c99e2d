"""The methods: one file a family, and the catalogue of their names."""

from rectgrad.methods.averages import IntegratedGradients, SmoothGrad
from rectgrad.methods.catalog import METHODS
from rectgrad.methods.control import RandomMap
from rectgrad.methods.deeplift import DeepLift
from rectgrad.methods.gradients import Deconv, GradientXInput, GuidedBackprop, Saliency
from rectgrad.methods.lrp import EpsilonLRP
from rectgrad.methods.method import Method
from rectgrad.methods.rectgrad import RectGrad

__all__ = [
    "METHODS",
    "Deconv",
    "DeepLift",
    "EpsilonLRP",
    "GradientXInput",
    "GuidedBackprop",
    "IntegratedGradients",
    "Method",
    "RandomMap",
    "RectGrad",
    "Saliency",
    "SmoothGrad",
]
