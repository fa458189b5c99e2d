"""How a linear layer shares relevance among its inputs, from the formulas: one sample, as vectors.

x: the inputs; w: (outputs, inputs); b: the biases; R: the relevance of the outputs. Montavon et al. 2019,
table 1, for inputs of either sign; Zhang et al. 2016 for excitation backprop.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Terms = list[tuple[float, Tensor, Tensor]]  # factor, numerators, denominator


def positive(values: Tensor) -> Tensor:
    return values.clamp(min=0)


def negative(values: Tensor) -> Tensor:
    return values.clamp(max=0)


def epsilon(x: Tensor, w: Tensor, b: Tensor, **_) -> Terms:
    return [(1.0, x * w, (x * w).sum() + b)]


def alpha_beta(alpha: float, beta: float, biased: bool = True) -> Callable[..., Terms]:
    def terms(x: Tensor, w: Tensor, b: Tensor, **_) -> Terms:
        excites, inhibits = positive(x * w), negative(x * w)
        b = b if biased else torch.zeros_like(b)
        return [
            (alpha, excites, excites.sum() + positive(b)),
            (-beta, inhibits, inhibits.sum() + negative(b)),
        ]

    return terms


def gamma(x: Tensor, w: Tensor, b: Tensor, gamma: float, **_) -> Terms:
    own = positive if (x * w).sum() + b > 0 else negative
    numerators = x * w + gamma * own(x * w)
    return [(1.0, numerators, numerators.sum() + b + gamma * own(b))]


def flat(x: Tensor, w: Tensor, b: Tensor, **_) -> Terms:
    connected = (w != 0).to(w.dtype)
    return [(1.0, connected, connected.sum())]


def wsquare(x: Tensor, w: Tensor, b: Tensor, **_) -> Terms:
    return [(1.0, w**2, (w**2).sum())]


def box(x: Tensor, w: Tensor, b: Tensor, low: Tensor, high: Tensor, **_) -> Terms:
    numerators = x * w - low * positive(w) - high * negative(w)
    return [(1.0, numerators, numerators.sum())]


RULES = {
    "epsilon": epsilon,
    "zplus": alpha_beta(1, 0),
    "alpha2_beta1": alpha_beta(2, 1),
    "gamma": gamma,
    "flat": flat,
    "wsquare": wsquare,
    "box": box,
    "excitation": alpha_beta(1, 0, biased=False),
    "contrast": alpha_beta(1, 1, biased=False),
}
COMPOSITES = {  # first layer, convolutions, dense layers
    "epsilon": ("epsilon", "epsilon", "epsilon"),
    "epsilon_plus_flat": ("flat", "zplus", "epsilon"),
    "epsilon_alpha2_beta1_flat": ("flat", "alpha2_beta1", "epsilon"),
    "epsilon_gamma_box": ("box", "gamma", "epsilon"),
    "zplus": ("zplus", "zplus", "zplus"),
    "gamma": ("gamma", "gamma", "gamma"),
    "deep_taylor": ("wsquare", "zplus", "zplus"),
    "deep_taylor_box": ("box", "zplus", "zplus"),
    "excitation": ("excitation", "excitation", "excitation"),
}


def shared(rule: str, x: Tensor, w: Tensor, b: Tensor, R: Tensor, stabiliser: float, **options) -> Tensor:
    """The relevance of the inputs: each output's in proportion to the numerators. Where a denominator is 0,
    there is nothing to share among."""
    relevance = torch.zeros_like(x)
    for j in R.nonzero().flatten():  # a unit without relevance shares nothing
        for factor, numerators, denominator in RULES[rule](x, w[j], b[j], **options):
            if denominator != 0:
                sign = 1 if denominator > 0 else -1
                relevance += factor * numerators * R[j] / (denominator + sign * stabiliser)
    return relevance
