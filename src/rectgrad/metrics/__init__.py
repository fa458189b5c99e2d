"""Metrics of saliency maps: noise, sparsity, location, similarity, faithfulness, stability and specificity.

All metrics are pure functions on batches. The first dimension is the batch, and every metric returns one
value or one row per sample.

A map is (N, H, W) or (N, C, H, W); all dimensions between the first and the last two are channels. Metrics
that do not depend on positions (`gini`, `zero_share`, `rank_correlation`) take any (N, ...). Half types and
integers are converted to float32. The result of a map with a NaN is NaN.

Submodules: `controls` (maps that do not depend on the network), `grid` (composites for `grid_pointing`),
`matching` (equal post-processing), `random_weights` (randomised networks), `statistics` (intervals, tests).
"""

from rectgrad.metrics import controls as controls
from rectgrad.metrics import matching as matching
from rectgrad.metrics import statistics as statistics
from rectgrad.metrics.curves import area, deletion, insertion
from rectgrad.metrics.grid import grid_pointing
from rectgrad.metrics.maps import (
    gini,
    in_box,
    inside,
    outside,
    pointing_game,
    total_variation,
    zero_share,
)
from rectgrad.metrics.overlap import specificity, unrelated
from rectgrad.metrics.perturbation import infidelity
from rectgrad.metrics.random_weights import randomisation
from rectgrad.metrics.removal import road
from rectgrad.metrics.sensitivity import max_sensitivity, sensitivity_n
from rectgrad.metrics.similarity import rank_correlation, ssim

__all__ = [
    "area",
    "deletion",
    "gini",
    "grid_pointing",
    "in_box",
    "infidelity",
    "insertion",
    "inside",
    "max_sensitivity",
    "outside",
    "pointing_game",
    "randomisation",
    "rank_correlation",
    "road",
    "sensitivity_n",
    "specificity",
    "ssim",
    "total_variation",
    "unrelated",
    "zero_share",
]
