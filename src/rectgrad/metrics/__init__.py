"""Numbers that describe saliency maps: how noisy, how sparse, where, how alike, how faithful.

Pure functions on batches: the first dimension counts samples and every metric returns one value per sample.
Making maps, drawing them and averaging over a dataset live elsewhere.

A map is (N, H, W) or (N, C, H, W); any further dimensions between the first and the last two are channels
too. Metrics without a notion of place (`gini`, `zero_share`, `rank_correlation`) take any (N, ...). Half
types and integers are computed, and answered, in float32.
"""

from rectgrad.metrics.curves import area, deletion, insertion
from rectgrad.metrics.likeness import rank_correlation, ssim
from rectgrad.metrics.maps import (
    gini,
    in_box,
    inside,
    outside,
    pointing_game,
    total_variation,
    zero_share,
)

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
