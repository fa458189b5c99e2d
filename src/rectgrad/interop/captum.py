"""Makes every method a Captum attribution, for use with NoiseTunnel, Captum's metrics and visualisation.

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
from rectgrad.methods import (
    DeepLift,
    DeepLiftShap,
    ExcitationBackprop,
    ExpectedGradients,
    GradientXInput,
    IntegratedGradients,
    Method,
)
from rectgrad.methods.catalog import as_method
from rectgrad.methods.lrp import Relevance

_RELEVANCE = (Relevance, ExcitationBackprop, DeepLift, DeepLiftShap)
_MULTIPLYING = (GradientXInput, IntegratedGradients, ExpectedGradients, *_RELEVANCE)


class MethodAttribution(Attribution):
    """A method of rectgrad with Captum's interface.

    `method` is a name in METHODS, with its options as keyword arguments, or an instance.
    """

    def __init__(self, forward_func: Callable[..., Any], method: str | Method = "rectgrad", **options: Any):
        super().__init__(forward_func)
        self.method = as_method(method, options)

    @log_usage()  # NoiseTunnel requires a decorated method
    def attribute(
        self, inputs: Any, target: Any = None, additional_forward_args: Any = None, **_: Any
    ) -> Any:
        """Returns maps shaped like the inputs. `target` follows Captum: an int, a tensor or list with one
        class per sample, or tuples for outputs with more dimensions. None: the only or the largest output."""
        args = additional_forward_args
        forward_args = () if args is None else args if isinstance(args, tuple) else (args,)
        return attribute(self.forward_func, inputs, self.method, score(target), forward_args=forward_args)

    @property
    def multiplies_by_inputs(self) -> bool:
        """Whether the map contains the factor `input`."""
        always = isinstance(self.method, _MULTIPLYING)
        return always or bool(getattr(self.method, "multiply_by_input", False))


def score(target: Any) -> Any:
    """Converts Captum's target to ours: tuples become a function that indexes the outputs."""
    if isinstance(target, tuple):
        return OutputIndex([target])
    if isinstance(target, list) and target and isinstance(target[0], tuple):
        return OutputIndex(target)
    if isinstance(target, Tensor) and target.numel() == 1:
        return int(target)
    return target


class OutputIndex:
    """A target that indexes the output of each sample, with one index for all or one per sample."""

    def __init__(self, indices: list[tuple[int, ...]]) -> None:
        self.indices = indices

    def __call__(self, outputs: Any) -> Tensor:
        values = logits(outputs)
        indices = self.indices * len(values) if len(self.indices) == 1 else self.indices
        return torch.stack([sample[index] for sample, index in zip(values, indices, strict=True)])
