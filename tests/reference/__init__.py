"""Slow, obvious versions of every rule and metric, written from the formulas: one file a family.

The rules are functions of one sample. `reference_attribute` gives whole maps without the engine: a network is
traced into a list of nodes, run node by node on one sample, and gone through backwards with a rule at each
node. Nothing here imports rectgrad, and nothing here is meant to be fast.

Notation: a = activation, z = its input or a linear map's output, R = what arrives from above (a gradient,
a relevance or a multiplier, as the method has it).
"""

from reference.attribute import reference_attribute
from reference.averages import quadrature_points
from reference.graph import RECTIFIERS, SQUASHING, family, output_node, run, trace
from reference.rectified import last_rectifiers, rectified, tau_of
from reference.windows import padding_mask, pool_windows, prr_max_pool, windows_of

__all__ = [
    "RECTIFIERS",
    "SQUASHING",
    "family",
    "last_rectifiers",
    "output_node",
    "padding_mask",
    "pool_windows",
    "prr_max_pool",
    "quadrature_points",
    "rectified",
    "reference_attribute",
    "run",
    "tau_of",
    "trace",
    "windows_of",
]
