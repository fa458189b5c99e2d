"""The maps that experiments compare, and what is measured on them. All in the units of their method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectgrad import image
from rectgrad.records import attribute

# The methods of the paper's comparisons, in its order, and Deconv and epsilon-LRP.
COMPARED = (
    "saliency",
    "deconv",
    "guided_backprop",
    "smoothgrad",
    "gradient_x_input",
    "integrated_gradients",
    "epsilon_lrp",
    "deeplift",
    "rectgrad",
    "rectgrad_prr",
)


def comparison_map(module: nn.Module, x: Tensor, method: str, batch: int = 100) -> Tensor:
    """(N, H, W): the map for the largest logit, summed over colours; of RectGrad, its positive parts."""
    device = next(module.parameters()).device
    return torch.cat([attribute(module, rows.to(device), method).sum(1).cpu() for rows in x.split(batch)])


def finally_thresholded(maps: Tensor) -> Tensor:
    """Each map with the final threshold of the paper's comparisons."""
    return torch.from_numpy(np.stack([image.final_threshold(each) for each in maps.numpy()]))


def spread(values: Tensor | np.ndarray | Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation, quartiles and number of one value a picture."""
    found = np.asarray(values, dtype=np.float64)
    low, median, high = np.percentile(found, (25, 50, 75))
    return {
        "mean": float(found.mean()),
        "std": float(found.std(ddof=1)) if len(found) > 1 else 0.0,
        "quartiles": [float(low), float(median), float(high)],
        "n": len(found),
    }
