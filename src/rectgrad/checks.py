"""Checks of a model and its inputs that do not need the engine. Errors say what would be valid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """An error for a name that does not exist: a similar name, if any, and all names."""
    valid = list(known)
    ratios = [difflib.SequenceMatcher(None, _plain(name), _plain(each)).ratio() for each in valid]
    best = max(ratios, default=0.0)
    similar = f"did you mean {valid[ratios.index(best)]!r}? " if best >= 0.7 else ""
    return f"unknown {kind} {name!r}; {similar}{kind}s are {', '.join(valid)}"


def _plain(name: str) -> str:
    """GradCAM, grad-cam and gradcam are the same name."""
    return re.sub("[-_ ]", "", name).lower()


def check_input(x: Any, first: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            "inputs must be a floating tensor (N, ...) or a tuple of them, not "
            f"{type(x).__name__}; {_instead_of(x)}"
        )
    if x.dtype.is_complex:
        raise TypeError(
            f"inputs of type {x.dtype} are not supported; give the real and imaginary part as channels"
        )
    if not x.dtype.is_floating_point:
        raise TypeError(
            f"inputs of type {x.dtype} have no gradient; give floating values, for images x.float() / 255 or "
            "what the model was trained on, for token ids the embeddings"
        )
    if x.dim() == 0:
        raise ValueError("inputs must have a first dimension of samples, (N, ...); got a scalar")
    if len(x) != len(first):
        raise ValueError(f"inputs differ in their number of samples: {len(first)} and {len(x)}")


def _instead_of(x: object) -> str:
    """What to pass instead of something that is not a tensor."""
    if isinstance(x, (list, tuple)):
        return "stack tensors with torch.stack(inputs), and give pictures to rectgrad.explain(inputs, model)"
    if hasattr(x, "__array__") and not hasattr(x, "getbands"):
        return "convert an array with torch.from_numpy(inputs), or give a picture to rectgrad.explain"
    return "rectgrad.explain(picture, model) takes paths and pictures, and prepares them"


def lacks_samples(model: object, inputs: Sequence[Tensor], error: BaseException) -> str | None:
    """The error if a model failed because its inputs lack the batch dimension; None otherwise."""
    if isinstance(error, ValueError) and not _SHAPE_ERROR.search(str(error)):
        return None
    layers = model.modules() if isinstance(model, nn.Module) else ()
    ranks = (rank for layer in layers for kind, rank in _RANKS.items() if isinstance(layer, kind))
    if len(inputs) > 1 or inputs[0].dim() != next(ranks, 0) - 1:
        return None
    return (
        f"the model cannot take inputs of shape {tuple(inputs[0].shape)}: they seem to lack the first "
        "dimension, that of the samples, (N, ...); for one sample, give inputs[None] "
        f"({' '.join(str(error).split())})"
    )


_RANKS = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5, nn.Linear: 2}
_SHAPE_ERROR = re.compile(r"expected \dD|the model returned shape")


def strange(kind: type, has_rules: bool) -> str | None:
    """Why modules of this class are not supported; None if they are."""
    if has_rules and issubclass(kind, torch.jit.ScriptModule):
        return "a scripted module, whose inside cannot be seen; use the original Python module"
    if "quantized" in kind.__module__:
        return "a quantised module, which has no gradient; use the model before quantisation"
    return None


_SETTLED = (Tensor, nn.Parameter)  # never lazy


def unsupported_module(module: nn.Module, has_rules: bool) -> str | None:
    tensors = (*module._parameters.values(), *module._buffers.values())
    if any(x is not None and type(x) not in _SETTLED and is_lazy(x) for x in tensors):
        return "a lazy module without weights yet; run the model once first"
    return strange(type(module), has_rules)


def are_probabilities(outputs: object) -> bool:
    """Whether a model's outputs are probabilities of two classes or more, as softmax makes them."""
    if not isinstance(outputs, Tensor) or outputs.is_complex() or outputs.dim() != 2:
        return False
    if outputs.shape[1] < 2 or not len(outputs):
        return False
    rows = outputs.detach().float()
    return bool(rows.min() >= 0) and bool(((rows.sum(1) - 1).abs() < 1e-3).all())
