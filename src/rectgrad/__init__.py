"""rectgrad: shows what a neural network looked at, without the noise.

This file contains only the list of public names. Names are imported when they are first used, so that the
command line can answer `--help` without loading torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rectgrad import data as data
    from rectgrad import image as image
    from rectgrad import metrics as metrics
    from rectgrad import models as models
    from rectgrad.api import Capture as Capture
    from rectgrad.api import Record as Record
    from rectgrad.api import attribute as attribute
    from rectgrad.api import capture as capture
    from rectgrad.api import layer_attributions as layer_attributions
    from rectgrad.api import propagate as propagate
    from rectgrad.api import record as record
    from rectgrad.engine.capture import StaleCaptureError as StaleCaptureError
    from rectgrad.engine.op import UnsupportedModelError as UnsupportedModelError
    from rectgrad.engine.target import contrast as contrast
    from rectgrad.explanation import Explanation as Explanation
    from rectgrad.explanation import explain as explain
    from rectgrad.explanation import recommended as recommended
    from rectgrad.methods import LRP as LRP
    from rectgrad.methods import METHODS as METHODS
    from rectgrad.methods import RISE as RISE
    from rectgrad.methods import AttnLRP as AttnLRP
    from rectgrad.methods import Deconv as Deconv
    from rectgrad.methods import DeepLift as DeepLift
    from rectgrad.methods import DeepLiftShap as DeepLiftShap
    from rectgrad.methods import EpsilonLRP as EpsilonLRP
    from rectgrad.methods import ExcitationBackprop as ExcitationBackprop
    from rectgrad.methods import ExpectedGradients as ExpectedGradients
    from rectgrad.methods import GradCAM as GradCAM
    from rectgrad.methods import GradientXInput as GradientXInput
    from rectgrad.methods import GuidedBackprop as GuidedBackprop
    from rectgrad.methods import GuidedGradCAM as GuidedGradCAM
    from rectgrad.methods import IntegratedGradients as IntegratedGradients
    from rectgrad.methods import Occlusion as Occlusion
    from rectgrad.methods import RandomMap as RandomMap
    from rectgrad.methods import RectGrad as RectGrad
    from rectgrad.methods import Saliency as Saliency
    from rectgrad.methods import SmoothGrad as SmoothGrad
    from rectgrad.verdict import Verdict as Verdict
    from rectgrad.verdict import judge as judge

__version__ = "0.1.0"

_HOME = {
    "api": ("Capture", "Record", "attribute", "capture", "layer_attributions", "propagate", "record"),
    "engine.capture": ("StaleCaptureError",),
    "engine.op": ("UnsupportedModelError",),
    "engine.target": ("contrast",),
    "explanation": ("Explanation", "explain", "recommended"),
    "methods": (
        "LRP",
        "METHODS",
        "AttnLRP",
        "Deconv",
        "DeepLift",
        "DeepLiftShap",
        "EpsilonLRP",
        "ExpectedGradients",
        "GradCAM",
        "ExcitationBackprop",
        "GradientXInput",
        "GuidedBackprop",
        "GuidedGradCAM",
        "IntegratedGradients",
        "Occlusion",
        "RISE",
        "RandomMap",
        "RectGrad",
        "Saliency",
        "SmoothGrad",
    ),
    "verdict": ("Verdict", "judge"),
}
_MODULES = ("data", "image", "metrics", "models")
__all__ = [*_MODULES, *(name for names in _HOME.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rectgrad.{name}")
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"rectgrad.{home}"), name)
    this = sys.modules[__name__]  # Python suggests a similar name of it
    raise AttributeError(f"module 'rectgrad' has no attribute {name!r}", name=name, obj=this)


def __dir__() -> list[str]:
    return [*__all__]
