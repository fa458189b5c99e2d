"""The arguments of a recorded call: placeholders for data tensors, and the `inplace` flag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rectgrad.ops.table import Spec


class Slot(int):
    """A placeholder for the i-th data tensor among a call's arguments."""


NESTED = (Slot, tuple, list)  # types that may contain a slot


def fill(value: Any, data: Sequence[Tensor]) -> Any:
    """`value` with slots replaced by data tensors."""
    kind = type(value)
    if kind is Slot:
        return data[value]
    if kind is tuple or kind is list:
        return kind([fill(v, data) if type(v) in NESTED else v for v in value])
    return value


def out_of_place(spec: Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
    """The arguments without the `inplace` flag, and the value of the flag."""
    if "inplace" in kwargs:
        return args, {k: v for k, v in kwargs.items() if k != "inplace"}, bool(kwargs["inplace"])
    at = spec.at.get("inplace")
    if at is not None and at < len(args):
        rest = dict(zip(list(spec.at)[at + 1 :], args[at + 1 :], strict=False))
        return args[:at], {**rest, **kwargs}, bool(args[at])
    return args, kwargs, False


def updates_statistics(spec: Spec, args: tuple, kwargs: dict) -> bool:
    """Whether a call may write running statistics: `batch_norm` does so in training mode only."""
    trains = spec.family == "batch_norm" and bool(spec.argument("training", args, kwargs))
    return trains or spec.name == "instance_norm"


def with_own_statistics(spec: Spec, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with copies of running statistics, which would be updated in training mode."""
    if not updates_statistics(spec, args, kwargs):
        return args, kwargs
    own = spec.arguments(("running_mean", "running_var"), args, kwargs)
    copies = {id(x): x.clone() for x in own if x is not None}
    return tuple([copies.get(id(x), x) for x in args]), {k: copies.get(id(x), x) for k, x in kwargs.items()}
