"""Every method as a Captum attribution: NoiseTunnel, Captum's metrics and its visualisation take it.

from rectgrad.interop.captum import MethodAttribution
rectified = MethodAttribution(model, "rectgrad", q=95)
maps = rectified.attribute(images, target=281)
smooth = NoiseTunnel(rectified).attribute(images, nt_samples=10, target=281)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from captum.attr import Attribution
    from captum.log import log_usage
except ImportError as error:
    raise ImportError("rectgrad.interop.captum needs captum: pip install captum") from error

from rectgrad.api import attribute
from rectgrad.engine.target import logits
from rectgrad.methods import DeepLift, EpsilonLRP, GradientXInput, Method
from rectgrad.methods.averages import IntegratedGradients
from rectgrad.methods.catalog import as_method


class MethodAttribution(Attribution):
    """A method of rectgrad with Captum's interface. method: a name in METHODS with its options as keywords,
    or an instance."""

    def __init__(self, forward_func: Callable[..., Any], method: str | Method = "rectgrad", **options: Any):
        super().__init__(forward_func)
        self.method = as_method(method, options)

    @log_usage()  # NoiseTunnel looks for what this wraps
    def attribute(
        self, inputs: Any, target: Any = None, additional_forward_args: Any = None, **_: Any
    ) -> Any:
        """A map like the inputs. target: as Captum has it: an int, a tensor or list with one for each sample,
        or tuples, for outputs of more dimensions. None: the only output, or each sample's largest."""
        args = additional_forward_args
        further = () if args is None else args if isinstance(args, tuple) else (args,)
        return attribute(self.forward_func, inputs, self.method, score(target), forward_args=further)

    @property
    def multiplies_by_inputs(self) -> bool:
        """Whether the map is an amount of the score rather than a slope."""
        always = isinstance(self.method, (GradientXInput, IntegratedGradients, EpsilonLRP, DeepLift))
        return always or bool(getattr(self.method, "multiply_by_input", False))


def score(target: Any) -> Any:
    """Captum's target as ours: places in an output of more dimensions become a function of the outputs."""
    if isinstance(target, tuple):
        return Place([target])
    if isinstance(target, list) and target and isinstance(target[0], tuple):
        return Place(target)
    if isinstance(target, Tensor) and target.numel() == 1:
        return int(target)
    return target


class Place:
    """A target: one number of each sample's output, at the same place for all or each at its own."""

    def __init__(self, places: list[tuple[int, ...]]) -> None:
        self.places = places

    def __call__(self, outputs: Any) -> Tensor:
        values = logits(outputs)
        places = self.places * len(values) if len(self.places) == 1 else self.places
        return torch.stack([sample[place] for sample, place in zip(values, places, strict=True)])
