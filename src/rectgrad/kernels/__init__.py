"""Fast versions of what threshold.py and the rules specify, each tested against them: which are in use.

The environment variable RECTGRAD_KERNELS chooses: "reference" the plain torch code of the specification,
"portable" what needs neither a compiler nor a GPU, nothing (the default) the fastest there is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from rectgrad.kernels import native, portable
from rectgrad.kernels.sparse import Carry, Survivors, carried, dense, survivors_of
from rectgrad.ops.windows import Region

__all__ = [
    "Survivors",
    "carried",
    "carries",
    "dense",
    "in_use",
    "masks",
    "rectify",
    "replays",
    "scales",
    "smallest",
    "survivors_of",
]

CHOICES = ("fast", "portable", "reference")


def chosen() -> str:
    value = os.environ.get("RECTGRAD_KERNELS") or "fast"
    if value not in CHOICES:
        raise ValueError(f"RECTGRAD_KERNELS is {value!r}; it can be {', '.join(CHOICES)}")
    return value


def in_use() -> dict[str, str]:
    """The kernels for each kind of device, in words."""
    return {"cpu": _on_cpu(), "cuda": "triton" if _cuda() else "reference"}


def _on_cpu() -> str:
    if chosen() == "reference":
        return "reference"
    library = native.load() if chosen() == "fast" else None
    return f"native {library.level}" if library is not None else "portable"


def _cuda() -> bool:
    if chosen() != "fast":
        return False
    from rectgrad.kernels import cuda

    return cuda.available()


def carries(x: Tensor) -> bool:
    """Whether what passes an activation of this kind may travel as lists."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and _native() is not None


def scales() -> bool:
    """Whether there is a kernel for a convolution's weights times a batch norm's scale."""
    return _cuda()


def replays(inputs: Sequence[Tensor]) -> bool:
    """Whether the kernels for what is made of these inputs can be run again without being asked for anew."""
    if all(map(carries, inputs)):
        return True
    if not all(x.is_cuda for x in inputs) or not _cuda():
        return False
    from rectgrad.kernels import cuda

    return all(x.dtype in cuda.DTYPES for x in inputs)


def masks(a: Tensor) -> bool:
    """Whether the kernel for this activation can leave out a part of its maps."""
    if not a.is_cuda or not _cuda():
        return False
    from rectgrad.kernels import cuda

    return cuda.has_maps(a)


def _native() -> native.Library | None:
    return native.load() if chosen() == "fast" else None


def smallest(score: Tensor, k: int) -> Tensor | None:
    """The k-th smallest of each row, counted from 1; None where the specification's way is to be taken."""
    if chosen() == "reference" or not score.numel():
        return None
    if score.device.type == "cuda" and score.dtype == torch.float32 and _cuda():
        from rectgrad.kernels import cuda

        return cuda.smallest(score, k)
    if score.device.type != "cpu":
        return None
    library = _native()
    if library is not None and score.dtype == torch.float32:
        return native.smallest(library, score, k)
    return portable.smallest(score, k) if score.dtype in (torch.float32, torch.float64) else None


def rectify(
    a: Tensor,
    R: Tensor,
    rows: int,
    k: int | None,
    tau: float | None,
    rule: str,
    seen: list,
    carry: Carry | None,
    within: Region | None = None,
) -> Tensor | None:
    """R where its score exceeds tau, the k-th smallest of each row or a constant; 0 elsewhere.

    `seen` gets a number that is not finite if an R is not. carry: how lists of what passed may travel instead
    of the result. within: 0 outside of this region too, where the kernel `masks`. None where the plain rule
    is to be taken.
    """
    if a.is_cpu:
        library = _native()
        if library is not None:
            return native.rectify(library, a, R, rows, k, tau, rule, seen, carry)
        if k is None or chosen() == "reference" or a.dtype != R.dtype:
            return None
        seen.append(R.sum())
        return portable.rectify(a, R, rows, k, rule)
    if not a.is_cuda or not _cuda():
        return None
    from rectgrad.kernels import cuda

    if a.dtype not in cuda.DTYPES or R.dtype not in cuda.DTYPES:
        return None
    if not (seen and _counts(seen[-1], a)):
        seen.append(torch.zeros(1, dtype=torch.float32, device=a.device))  # one number for all layers
    if k is None:
        assert tau is not None
        return cuda.rectify_constant(a, R, tau, rule, seen[-1], within)
    return cuda.rectify(a, R, rows, k, rule, seen[-1], within)


def _counts(seen: object, a: Tensor) -> bool:
    """Whether this is the number that the layers of a device share."""
    return isinstance(seen, Tensor) and seen.dim() == 1 and seen.get_device() == a.get_device()
