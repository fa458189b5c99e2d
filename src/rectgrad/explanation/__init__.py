"""`explain`: from a picture to its explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from rectgrad.api import Model, OptionValue, chosen, record_for
from rectgrad.engine import target as targets
from rectgrad.engine.diagnose import warn
from rectgrad.explanation.network import Labels, Network, Picture, Prepare, Prepared, single
from rectgrad.explanation.recorded import answers, explain_record
from rectgrad.explanation.result import Explanation, named
from rectgrad.explanation.trust import Specificity, recommended, specificity
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.kernels.device import out_of_memory
from rectgrad.methods import Method
from rectgrad.models import Guess, ImageModel

__all__ = [
    "Explanation",
    "Guess",
    "Network",
    "Prepared",
    "Specificity",
    "explain",
    "explain_prepared",
    "explain_record",
    "named",
    "recommended",
    "specificity",
]

Target = int | str | Sequence[int | str] | Tensor | Callable[..., Tensor] | None
Pictures = TypeVar("Pictures", bound=Picture)  # a list of paths is also a list of pictures


@overload
def explain(
    image: str | Path | Image.Image | np.ndarray,
    model: str | ImageModel | Model | None = ...,
    method: str | Method | None = ...,
    target: Target = ...,
    *,
    prepare: Prepare | None = ...,
    labels: Labels | None = ...,
    device: str | torch.device | None = ...,
    batch_size: int = ...,
    specificity: bool | None = ...,
    **options: OptionValue,
) -> Explanation: ...
@overload
def explain(
    image: list[Pictures] | tuple[Pictures, ...],
    model: str | ImageModel | Model | None = ...,
    method: str | Method | None = ...,
    target: Target = ...,
    *,
    prepare: Prepare | None = ...,
    labels: Labels | None = ...,
    device: str | torch.device | None = ...,
    batch_size: int = ...,
    specificity: bool | None = ...,
    **options: OptionValue,
) -> list[Explanation]: ...
@overload
def explain(
    image: Tensor,
    model: str | ImageModel | Model | None = ...,
    method: str | Method | None = ...,
    target: Target = ...,
    *,
    prepare: Prepare | None = ...,
    labels: Labels | None = ...,
    device: str | torch.device | None = ...,
    batch_size: int = ...,
    specificity: bool | None = ...,
    **options: OptionValue,
) -> Explanation | list[Explanation]: ...
def explain(
    image: Picture | list[Pictures] | tuple[Pictures, ...],
    model: str | ImageModel | Model | None = None,
    method: str | Method | None = None,
    target: Target = None,
    *,
    prepare: Prepare | None = None,
    labels: Labels | None = None,
    device: str | torch.device | None = None,
    batch_size: int = 8,
    specificity: bool | None = None,
    **options: OptionValue,
) -> Explanation | list[Explanation]:
    """Explains what a network looked at in a picture. Returns an `Explanation`, or a list of them for several
    pictures.

    image: a path, a PIL image, an array (H, W, 3) of uint8 or of floats from 0 to 1, or a tensor that the
    model takes, (C, H, W) or (1, ...). For several pictures, a list of these or a tensor (N, ...).
    model: a name in rectgrad.models.MODELS, an ImageModel, or your own module, which needs `prepare` or a
    tensor; default: efficientnet_lite0, which is loaded in each call.
    method, options: as in `attribute`; default: `recommended("where")`.
    target: as in `attribute`, or a class name.
    prepare: a function from a PIL image to a tensor (C, H, W) that the model takes.
    labels: the class names, or a text file with one per line.
    device: the device for a model that is loaded by name.
    specificity: True also computes it for methods that need many passes, False never computes it.

        rectgrad.explain("cat.jpg").save("explained.png")
        rectgrad.explain(photo, net, "integrated_gradients", prepare=transform, labels=["cat", "dog"])
    """
    configured = chosen(method if method is not None else recommended("where"), options)
    pictures, several = _pictures(image)
    with closing(Network.of(model, prepare, labels, device)) as network:
        prepared = map(network.prepared, pictures)  # lazily: thousands would not fit in memory
        found = explain_prepared(
            network, prepared, len(pictures), configured, target, batch_size, specificity
        )
    return found if several else found[0]


def _pictures(image: Any) -> tuple[list[Any], bool]:
    """The pictures as a list, and whether `image` was a list or a batch."""
    if isinstance(image, (ImageModel, nn.Module)):
        raise TypeError("the picture comes before the model: rectgrad.explain(picture, model)")
    if isinstance(image, Tensor):
        if image.dim() == 0:
            raise ValueError("image is a scalar tensor; pass a tensor that the model takes, (C, H, W)")
        if not single(image):
            return list(image), True
        return [image if image.dim() in (1, 3) else image[0]], False
    if isinstance(image, (list, tuple)):
        return [x[0] if isinstance(x, Tensor) and x.dim() > 3 and len(x) == 1 else x for x in image], True
    return [image], False


def explain_prepared(
    network: Network,
    prepared: Iterable[Prepared],
    n: int,
    method: Method,
    target: Target = None,
    batch_size: int = 8,
    specificity: bool | None = None,
) -> list[Explanation]:
    """Like `explain`, for n pictures that are already prepared for the network."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    wanted, method = _indices_of(network, target, n), network.bounded(method)
    found: list[Explanation] = []
    for batch in _batches(prepared, batch_size):
        start, stop = len(found), len(found) + len(batch)
        whole = batch[0].inputs.new_empty((n, *batch[0].inputs.shape), device="meta")
        own = method.rows(start, stop, (whole,)) if len(batch) < n else method
        asked = targets.changed(wanted, n, itemgetter(slice(start, stop)))
        found += _explained(network, batch, own, asked, specificity)
    return found


def _batches(prepared: Iterable[Prepared], size: int) -> Iterator[list[Prepared]]:
    """Groups consecutive pictures of the same shape and dtype into batches of at most `size`."""
    batch: list[Prepared] = []
    for each in prepared:
        if len(batch) == size or (batch and _kind(batch[0]) != _kind(each)):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _kind(each: Prepared) -> tuple[torch.Size, torch.dtype]:
    return each.inputs.shape, each.inputs.dtype


def _indices_of(network: Network, target: Any, n: int) -> Any:
    """The target with class names replaced by their indices."""
    if isinstance(target, str):
        return network.find_class(target)
    if isinstance(target, (list, tuple)):
        if len(target) != n:
            raise ValueError(
                f"target has {len(target)} classes for {n} pictures; pass one, or one per picture"
            )
        return [network.find_class(each) if isinstance(each, str) else each for each in target]
    return target


def _explained(
    network: Network, batch: list[Prepared], method: Method, target: Any, specificity: bool | None
) -> list[Explanation]:
    """Explains one batch; splits it in half if memory runs out."""
    try:
        with WarningLog() as log:
            inputs = torch.stack([each.inputs for each in batch]).to(network.device)
            replayed = network.replay(inputs, method, target)
            recorded = record_for(network.module, inputs, method) if replayed is None else replayed
            return answers(recorded, network, batch, method, target, specificity, log)
    except Exception as error:
        if type(error) is RuntimeError:
            network.check_type(batch[0].inputs)
        if not out_of_memory(error) or len(batch) == 1:
            raise
    half = len(batch) // 2
    warn(f"not enough memory for {len(batch)} pictures at once; batch_size={half} may be small enough")
    return explain_prepared(network, batch, len(batch), method, target, half, specificity)
