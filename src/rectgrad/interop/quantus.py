"""Makes every method an explanation function for Quantus, which is not imported here.

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
    """Maps of a batch, summed over `reduce_axes` as in Quantus's own functions; () keeps the input shape.

    `device` defaults to that of the model. Other keyword arguments are options of the method.
    """
    chosen = as_method(method, options)
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.as_tensor(np.asarray(inputs)).to(device, dtype)
    target = None if targets is None else torch.as_tensor(np.asarray(targets)).to(device).long()
    maps = attribute(model, x, chosen, target, batch_size=batch_size).float().cpu().numpy()
    axes = tuple(reduce_axes)
    return maps if not axes or maps.ndim < 3 else maps.sum(axis=axes, keepdims=keepdims)


def explain_func(method: str | Method = "rectgrad", **options: Any) -> partial[np.ndarray]:
    """`explain` with a fixed method and options: `explain_func=explain_func("rectgrad", q=95)`."""
    as_method(method, {k: v for k, v in options.items() if k not in _OWN})  # fails early for invalid options
    return partial(explain, method=method, **options)


_OWN = ("device", "reduce_axes", "keepdims", "batch_size")
