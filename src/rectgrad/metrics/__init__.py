"""Metrics of saliency maps: noise, sparsity, location, similarity and faithfulness.

All metrics are pure functions on batches. The first dimension is the batch, and every metric returns one
value per sample.

A map is (N, H, W) or (N, C, H, W); all dimensions between the first and the last two are channels. Metrics
that do not depend on positions (`gini`, `zero_share`, `rank_correlation`) take any (N, ...). Half types and
integers are converted to float32.
"""

from rectgrad.metrics.curves import area, deletion, insertion
from rectgrad.metrics.maps import (
    gini,
    in_box,
    inside,
    outside,
    pointing_game,
    total_variation,
    zero_share,
)
from rectgrad.metrics.similarity import rank_correlation, ssim

__all__ = [
    "area",
    "deletion",
    "gini",
    "in_box",
    "insertion",
    "inside",
    "outside",
    "pointing_game",
    "rank_correlation",
    "ssim",
    "total_variation",
    "zero_share",
]
