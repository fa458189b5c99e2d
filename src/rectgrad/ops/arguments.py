"""The arguments of a recorded call: places of data tensors among them, and the `inplace` flag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rectgrad.ops.table import Spec


class Slot(int):
    """The place of the i-th data tensor among a call's arguments."""


NESTED = (Slot, tuple, list)  # what may hold a slot


def fill(value: Any, data: Sequence[Tensor]) -> Any:
    """`value` with the data tensors back in their slots."""
    kind = type(value)
    if kind is Slot:
        return data[value]
    if kind is tuple or kind is list:
        return kind([fill(v, data) if type(v) in NESTED else v for v in value])
    return value


def out_of_place(spec: Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The call without its `inplace` flag, and whether it was set."""
    if "inplace" in kwargs:
        return args, {k: v for k, v in kwargs.items() if k != "inplace"}, bool(kwargs["inplace"])
    at = spec.at.get("inplace")
    if at is not None and at < len(args):
        rest = dict(zip(list(spec.at)[at + 1 :], args[at + 1 :], strict=False))
        return args[:at], {**rest, **kwargs}, bool(args[at])
    return args, kwargs, False


def updates_statistics(spec: Spec, args: tuple, kwargs: dict) -> bool:
    """Whether a normalisation may write its running statistics: `batch_norm` only in training mode."""
    may = spec.family != "batch_norm" or "training" not in spec.at or spec.argument("training", args, kwargs)
    return bool(may) and spec.name != "_native_batch_norm_legit_no_training"


def with_own_statistics(spec: Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The call with running statistics as copies: in training mode it would update the model's own."""
    if spec.family not in ("batch_norm", "norm") or not updates_statistics(spec, args, kwargs):
        return args, kwargs
    own = spec.arguments(("running_mean", "running_var"), args, kwargs)
    copies = {id(x): x.clone() for x in own if x is not None}
    return tuple([copies.get(id(x), x) for x in args]), {k: copies.get(id(x), x) for k, x in kwargs.items()}
