"""Torch calls as a tape meets them: their arguments, and what they need around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def out_of_place(spec: ops.Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The call without its `inplace` flag, and whether it was set."""
    if "inplace" in kwargs:
        inplace = bool(kwargs["inplace"])
        if len(kwargs) == 1:
            return args, {}, inplace
        return args, {k: v for k, v in kwargs.items() if k != "inplace"}, inplace
    if "inplace" in spec.names and spec.names.index("inplace") < len(args):
        at = spec.names.index("inplace")
        rest = dict(zip(spec.names[at + 1 :], args[at + 1 :], strict=False))
        return args[:at], {**rest, **kwargs}, bool(args[at])
    return args, kwargs, False


def differentiable(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        result = result[0] if result else None
    return isinstance(result, Tensor) and result.requires_grad


def asked(tape: Any, spec: ops.Spec, func: Any, args: tuple, kwargs: dict) -> Any:
    """A question about a tensor: nothing to see."""
    return func(*args, **kwargs)


def undisturbed() -> bool:
    """Whether a call does no more than it says: gradients are on, and neither hooks nor autocast are."""
    return _enabled() and not autocasts() and _hooks(False) is None


def _autocasts() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "mps"))


autocasts: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _autocasts)


def unsurrounded() -> bool:
    """Whether nothing is to be kept from what is saved for the backward pass: see identity_hooks."""
    return _hooks(False) is None


# Asked at every call, so looked up once.
_enabled: Callable[[], bool] = torch.is_grad_enabled
_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def surroundings(name: str, args: tuple, data: list[Tensor]) -> Any:
    """What a call needs around it. Nearly always nothing."""
    needed = [writable(args), identity_hooks()]
    if name in RECURRENT and data and data[0].is_cuda:
        # cuDNN's recurrent networks have a backward pass in training mode alone.
        needed.append(torch.backends.cudnn.flags(enabled=False))
    if needed == [NOTHING, NOTHING]:
        return NOTHING
    together = contextlib.ExitStack()
    for each in needed:
        together.enter_context(each)
    return together


NOTHING = contextlib.nullcontext()


def writable(args: tuple) -> Any:
    """Tensors made in inference mode are written in inference mode alone."""
    made_there = args and isinstance(args[0], Tensor) and args[0].is_inference()
    return torch.inference_mode() if made_there else NOTHING


def updates(spec: ops.Spec, args: tuple, kwargs: dict) -> bool:
    """Whether a normalisation may write its running statistics: `batch_norm` only in training mode."""
    if spec.name != "batch_norm" or "training" not in spec.names:
        return True
    at = spec.names.index("training")
    return bool(kwargs.get("training", args[at] if at < len(args) else False))


def same(x: Any) -> Any:
    return x


def cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def identity_hooks() -> Any:
    """Checkpointing saves nothing and runs its function again in the backward pass, out of our sight:
    what is saved under its hooks is saved as it is instead."""
    if unsurrounded():
        return NOTHING
    return torch.autograd.graph.saved_tensors_hooks(same, same)
