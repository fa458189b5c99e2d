"""What each rule does to a gradient: the paper lives here.

A rule is a function (op, R) -> the gradient for each of op.inputs. Factories take the parameters.
"""

from rectgrad.rules.padding import masked_padding
from rectgrad.rules.pooling import proportional_pooling
from rectgrad.rules.rectified import deconv, guided, rectified
from rectgrad.rules.relevance import lrp_rules
from rectgrad.rules.rescale import deeplift_rules

__all__ = [
    "deconv",
    "deeplift_rules",
    "guided",
    "lrp_rules",
    "masked_padding",
    "proportional_pooling",
    "rectified",
]
