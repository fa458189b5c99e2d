"""rectgrad: what a neural network looked at, without the noise.

The public list, nothing else. Names are imported when they are first used, so that the command line can
answer `--help` without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rectgrad import data as data
    from rectgrad import image as image
    from rectgrad import metrics as metrics
    from rectgrad import models as models
    from rectgrad.averages import IntegratedGradients as IntegratedGradients
    from rectgrad.averages import SmoothGrad as SmoothGrad
    from rectgrad.catalog import METHODS as METHODS
    from rectgrad.methods import Deconv as Deconv
    from rectgrad.methods import DeepLift as DeepLift
    from rectgrad.methods import EpsilonLRP as EpsilonLRP
    from rectgrad.methods import GradientXInput as GradientXInput
    from rectgrad.methods import GuidedBackprop as GuidedBackprop
    from rectgrad.methods import RandomMap as RandomMap
    from rectgrad.methods import RectGrad as RectGrad
    from rectgrad.methods import Saliency as Saliency
    from rectgrad.passes import UnsupportedModelError as UnsupportedModelError
    from rectgrad.records import Record as Record
    from rectgrad.records import attribute as attribute
    from rectgrad.records import layer_attributions as layer_attributions
    from rectgrad.records import record as record
    from rectgrad.tape import propagate as propagate
    from rectgrad.target import contrast as contrast

__version__ = "0.1.0"

_HOME = {
    "averages": ("IntegratedGradients", "SmoothGrad"),
    "catalog": ("METHODS",),
    "methods": (
        "Deconv",
        "DeepLift",
        "EpsilonLRP",
        "GradientXInput",
        "GuidedBackprop",
        "RandomMap",
        "RectGrad",
        "Saliency",
    ),
    "passes": ("UnsupportedModelError",),
    "records": ("Record", "attribute", "layer_attributions", "record"),
    "tape": ("propagate",),
    "target": ("contrast",),
}
_MODULES = ("data", "image", "metrics", "models")
__all__ = [*_MODULES, *(name for names in _HOME.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rectgrad.{name}")
    for home, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"rectgrad.{home}"), name)
    raise AttributeError(f"module 'rectgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
