"""Every method as an explanation for Quantus. Quantus itself is not needed here.

from rectgrad.interop.quantus import explain
quantus.Sparseness()(model, x, y, None, explain_func=explain,
                     explain_func_kwargs={"method": "rectgrad", "q": 95})
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rectgrad.api import attribute
from rectgrad.methods import Method
from rectgrad.methods.catalog import as_method


def explain(
    model: torch.nn.Module,
    inputs: Any,
    targets: Any,
    method: str | Method = "rectgrad",
    *,
    device: str | torch.device | None = None,
    reduce_axes: Sequence[int] = (1,),
    keepdims: bool = True,
    batch_size: int | None = None,
    **options: Any,
) -> np.ndarray:
    """Maps of a batch, summed over `reduce_axes` as Quantus's own functions do; () keeps the inputs' shape.

    device: where to compute; None: where the model is. Further keywords are the method's options.
    """
    chosen = as_method(method, options)
    place = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    kind = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.as_tensor(np.asarray(inputs)).to(place, kind)
    wanted = None if targets is None else torch.as_tensor(np.asarray(targets)).to(place).long()
    maps = attribute(model, x, chosen, wanted, batch_size=batch_size).float().cpu().numpy()
    axes = tuple(reduce_axes)
    return maps if not axes or maps.ndim < 3 else maps.sum(axis=axes, keepdims=keepdims)


def explain_func(method: str | Method = "rectgrad", **options: Any) -> partial[np.ndarray]:
    """`explain` with a method and its options settled: `explain_func=explain_func("rectgrad", q=95)`."""
    as_method(method, {k: v for k, v in options.items() if k not in _OWN})  # a mistake is said now
    return partial(explain, method=method, **options)


_OWN = ("device", "reduce_axes", "keepdims", "batch_size")
