"""Class activation maps: Grad-CAM, its variants and Guided Grad-CAM. Formulas: kernels/class_maps.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rectgrad import rules
from rectgrad.engine.backward import Pass
from rectgrad.engine.bridge import unsupported
from rectgrad.engine.facts import Finder, find_gates
from rectgrad.engine.op import Rules
from rectgrad.engine.request import Request
from rectgrad.kernels.class_maps import VARIANTS, class_map, placed
from rectgrad.methods.gradients import GuidedBackprop
from rectgrad.methods.method import Maps, Method
from rectgrad.methods.options import option

_LAYER = "Name of the module whose output is used; default: the last activation with positions."
_FORMULA = f"Formula: {', '.join(VARIANTS)}."


@dataclass(frozen=True)
class GradCAM(Method):
    """A coarse map of the regions that are evidence for the class."""

    layer: str | None = option(None, _LAYER)
    variant: str = option("gradcam", _FORMULA, choices=tuple(VARIANTS))
    per_sample: ClassVar[bool] = True
    facts: ClassVar[tuple[Finder, ...]] = (find_gates,)
    title: ClassVar[str] = "Grad-CAM"
    everything = property(lambda self: self.layer is not None)

    def rules(self) -> Rules:
        return rules.class_layer_rules()

    def result(self, request: Request, passed: Pass, scores: Tensor) -> Maps:
        maps = tuple(torch.zeros_like(x) for x in request.inputs)
        for found in rules.class_layers(self, request, passed, scores, self.layer, request.passed is None):
            cam = class_map(found.a, found.R, self.variant)
            maps = tuple(placed(cam, found.rows, each) for each in maps)
        return maps


@dataclass(frozen=True)
class GuidedGradCAM(Method):
    """Another method's map times Grad-CAM's, which keeps only regions with evidence for the class."""

    over: Method = option(GuidedBackprop(), "Method whose map is multiplied.")
    layer: str | None = option(None, _LAYER)
    variant: str = option("gradcam", _FORMULA, choices=tuple(VARIANTS))
    per_sample: ClassVar[bool] = True
    title: ClassVar[str] = "guided Grad-CAM"
    everything = property(lambda self: self.layer is not None)
    one_backward = property(lambda self: self.over.one_backward)
    decompose = property(lambda self: self.over.decompose)

    def rules(self) -> Rules:
        return rules.class_layer_rules(self.over.rules())

    def raw(self, request: Request) -> Maps:
        if request.replay is not None:
            raise unsupported("capture", f"guided Grad-CAM over {type(self.over).__name__}, not one pass")
        # A pass that was recorded for an average lacks the class layer.
        alone = replace(request, observe=None) if self.one_backward else request.at(request.inputs)
        cams, request.target = GradCAM(self.layer, self.variant).maps(alone), alone.target
        marked = [op for op in alone.last.ops if op.rule != "plain"] if alone.last is not None else []
        maps = self.over.maps(request)
        for op in marked:
            op.rule = op.rule.removesuffix(", class layer") + ", class layer"
        return tuple(m * c * m.shape[1:2].numel() for m, c in zip(maps, cams, strict=True))

    def rows(self, start: int, stop: int, inputs: Maps) -> Method:
        return replace(self, over=self.over.rows(start, stop, inputs))
