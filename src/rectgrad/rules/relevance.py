"""Layer-wise relevance propagation, after Montavon et al. 2019: how a layer's relevance R_j is shared among
its inputs x_i. z = x w + b is the layer's output; + and - are positive and negative parts; every denominator
gets epsilon * sign.

    epsilon     R_i = sum_j x_i w_ij R_j / z_j                      z+ is alpha-beta with alpha 1, beta 0
    alpha-beta  R_i = sum_j (alpha (x_i w_ij)+ / z+_j - beta (x_i w_ij)- / z-_j) R_j, z+ = sum (x w)+ + b+
    gamma       R_i = sum_j (x_i w_ij + gamma (x_i w_ij)*) R_j / (z_j + gamma z*_j), * the part of z_j's sign
    flat        R_i = sum_j R_j / number of j's inputs              w-square: weights w_ij ** 2 instead of 1
    z-box       R_i = sum_j (x_i w_ij - l_i w+_ij - h_i w-_ij) R_j / sum_i (the same), l <= x <= h

What travels is c = relevance / value, so that the relevance of a tensor is value * c and each step is a plain
gradient with factors. R is the relevance in the formulas above; in the code, as in every rule, R is what
arrives at an op, which is c here:

    linear maps     c_x = J^T (c * |z| / (|z| + epsilon))
    activations     c_z = c * a / z                     relevance passes unchanged
    x * y, x @ y    half of the gradient to each; all of it to x where y is a softmax's weights
    norms, x / y    the denominator is a constant

On ReLU networks the epsilon rule tends to gradient * input as epsilon goes to 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule, first, wide
from rectgrad.kernels.relevance_ops import per_unit, product, safe, stabilised, withheld
from rectgrad.ops.composite import norm as norm_by_steps
from rectgrad.rules.layers import CONVOLUTIONS, WEIGHTED, Layer, Weights, has_weight

_LINEAR = "conv conv_transpose linear batch_norm max_pool avg_pool sum add matmul".split()
# The rules of the first layer, of convolutions and of dense layers.
COMPOSITES = {
    "epsilon": ("epsilon", "epsilon", "epsilon"),
    "epsilon_plus_flat": ("flat", "zplus", "epsilon"),
    "epsilon_alpha2_beta1_flat": ("flat", "alpha2_beta1", "epsilon"),
    "epsilon_gamma_box": ("box", "gamma", "epsilon"),
    "zplus": ("zplus", "zplus", "zplus"),
    "gamma": ("gamma", "gamma", "gamma"),
    "deep_taylor": ("wsquare", "zplus", "zplus"),
}
_ALPHA_BETA = {"zplus": (1, 0), "alpha2_beta1": (2, 1), "excitation": (1, 0), "contrast": (1, 1)}
AT_THE_INPUT = ("flat", "wsquare", "box")  # inputs that are 0 may get relevance too


class Composite(NamedTuple):
    """Which rule each layer gets, and their parameters."""

    first: str
    convolution: str
    dense: str
    epsilon: float
    gamma: float = 0.25
    low: Any = None
    high: Any = None
    top: str = ""  # of the last layer, if it differs

    def rule(self, op: Op) -> str:
        if not has_weight(op):
            return "epsilon"
        if op.facts.top and self.top:
            return self.top
        return self.first if op.facts.first else self.convolution if op.family in CONVOLUTIONS else self.dense


def lrp_rules(composite: Composite) -> dict[str, Rule]:
    epsilon = composite.epsilon
    rules: dict[str, Rule] = dict.fromkeys(_LINEAR, lrp_linear(epsilon))
    activation = Rule(_activation, "lrp_activation")
    rules |= dict.fromkeys((*ops.RECTIFIERS, "squash", "unary", "softmax", "log_softmax"), activation)
    rules |= {"mul": Rule(_product, "lrp_product"), "div": Rule(_division, "lrp_division")}
    rules |= {family: _unless_merged(rules[family], composite) for family in ("add", "batch_norm", "mul", "div")}
    rules |= dict.fromkeys(CONVOLUTIONS, lrp_layer(composite, composite.convolution))
    rules |= dict.fromkeys(("linear", "matmul"), lrp_layer(composite, composite.dense))
    return rules | {"norm": lrp_norm(epsilon)}


def attn_lrp_rules(epsilon: float) -> dict[str, Rule]:
    """After Achtibat et al. 2024: R_i = x_i (R_i - s_i sum_j R_j) of a softmax s, its plain gradient here."""

    def softmax(op: Op, R: Tensor) -> Any:
        if op.state.absorbed is not None:
            s, dim = op.output, op.argument("dim", -1)
            x = op.inputs[0].masked_fill(s == 0, 0)
            _absorb(op, R * (s - s * (x - (s * x).sum(dim, keepdim=True))))
        return op.vjp(R)

    plain = lrp_rules(Composite(*COMPOSITES["epsilon"], epsilon))
    return plain | {"softmax": Rule(softmax, "attn_softmax")}


def excitation_rules(contrastive: bool, epsilon: float = 1e-12) -> dict[str, Rule]:
    """After Zhang et al. 2016: z+ without biases, in sums too. What arrives at the last layer is its
    probability. contrastive: less what goes to a unit with the opposite weights there."""
    rules = "excitation", "excitation", "excitation"
    composite = Composite(*rules, epsilon, top="contrast" if contrastive else "excitation")
    passed = Rule(_activation, "excitation_passed")
    sums = dict.fromkeys(("add", "sum", "avg_pool"), excited_sum(epsilon))
    unchanged = {"batch_norm": _unless_merged(passed, composite), "softmax": Rule(lambda op, R: R, "unchanged")}
    return lrp_rules(composite) | sums | unchanged


def lrp_linear(epsilon: float) -> Rule:
    def apply(op: Op, R: Tensor) -> Any:
        c = R
        if not op.facts.folded:
            R = (R * stabilised(wide(op.output), epsilon)).to(R.dtype)
        if op.state.absorbed is not None:
            lost = 0 if op.facts.folded else withheld(c * op.output, op.output, epsilon)
            _absorb(op, product(R, _constant(op)), lost)
        return op.vjp(R) if op.data_count == 1 or op.family == "add" else _product(op, R)

    return Rule(apply, "lrp_linear")


def lrp_layer(composite: Composite, name: str) -> Rule:
    """The composite's rule of a layer with weights, with its biases and batch norms one linear map."""
    plain, epsilon = lrp_linear(composite.epsilon), composite.epsilon

    def apply(op: Op, R: Tensor) -> Any:
        rule = composite.rule(op)
        if rule == "epsilon":
            return plain.apply(op, R)
        layer = Layer(op)
        excites = rule in ("excitation", "contrast")
        relevance = wide(R) * (wide(safe(op.output)) if layer.after else layer.z)
        if excites and op.facts.top:
            relevance = relevance / safe(layer.z) if layer.after else wide(R)
        if rule in AT_THE_INPUT:
            shares = _at_the_input(layer, rule, relevance, composite)
        else:
            if rule == "gamma":
                grad = _gamma(layer, relevance, composite.gamma, epsilon)
            else:
                grad = _alpha_beta(layer, relevance, *_ALPHA_BETA[rule], epsilon, biased=not excites)
            if not layer.before:
                return grad.to(R.dtype)
            shares = layer.x * grad
        return (shares / wide(safe(layer.y))).to(R.dtype)

    return Rule(apply, f"lrp_{name}" if name == composite.first else f"lrp_{name}, first {composite.first}")


def _alpha_beta(layer: Layer, R: Tensor, alpha: float, beta: float, epsilon: float, biased: bool) -> Tensor:
    plus, minus = layer.plus, layer.minus
    bias = layer.bias if biased else torch.zeros_like(R[:1])
    z = layer.parts(plus, minus) + bias.clamp(min=0)
    p, n, lost = alpha * per_unit(R, z, epsilon), None, 0.0
    absorbs = layer.op.state.absorbed is not None
    if absorbs:
        _absorb(layer.op, bias.clamp(min=0) * p, alpha * withheld(R, z, epsilon))
    if beta:
        z = layer.parts(minus, plus) + bias.clamp(max=0)
        n = -beta * per_unit(R, z, epsilon)
        if absorbs:
            _absorb(layer.op, bias.clamp(max=0) * n, -beta * withheld(R, z, epsilon))
    return layer.shared(plus, minus, p, n)


def _gamma(layer: Layer, R: Tensor, gamma: float, epsilon: float) -> Tensor:
    z, bias = layer.z, layer.bias
    above = layer.parts(layer.plus, layer.minus) + bias.clamp(min=0)
    total = z + gamma * torch.where(z > 0, above, z - above)
    message = per_unit(R, total, epsilon)
    if layer.op.state.absorbed is not None:
        own = torch.where(z > 0, bias.clamp(min=0), bias.clamp(max=0))
        _absorb(layer.op, message * (bias + gamma * own), withheld(R, total, epsilon))
    plus = Weights(layer, lambda w: w + gamma * w.clamp(min=0))
    if layer.op.facts.rectified and layer.op.facts.positive:
        return plus.back(message)
    minus = Weights(layer, lambda w: w + gamma * w.clamp(max=0))
    return layer.shared(plus, minus, torch.where(z > 0, message, 0), torch.where(z > 0, 0, message))


def _at_the_input(layer: Layer, rule: str, R: Tensor, composite: Composite) -> Tensor:
    """The relevance of the first layer's inputs; what is no input, such as padding, gets none."""
    plain = layer.y
    if rule == "box":
        low, high = (layer.at(lambda s, x=x: _bound(x, s, plain)) for x in (composite.low, composite.high))
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        above, below = wide(plain) - low, wide(plain) - high
        z = layer.plus.of(above) + layer.minus.of(below)
        message = per_unit(R, z, composite.epsilon)
        shares = above * layer.plus.back(message) + below * layer.minus.back(message)
    else:
        slope = layer.at(plain.new_ones) - layer.at(plain.new_zeros)
        counts = slope.ne(0).to(slope.dtype) if rule == "flat" else slope.square()
        weights = Weights(layer, torch.ones_like if rule == "flat" else torch.square)
        z = weights.of(counts)
        message = per_unit(R, z, composite.epsilon)
        shares = counts * weights.back(message)
    if layer.op.state.absorbed is not None:
        _absorb(layer.op, 0, withheld(R, z, composite.epsilon))
    return shares


def _bound(value: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A number, one for each channel, or a tensor, for inputs of this shape."""
    bound = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    bound = bound.reshape(-1, *(1,) * (len(shape) - 2)) if isinstance(value, tuple) else bound
    try:
        return bound.expand(1, *shape[1:]).expand(shape)
    except RuntimeError:
        given = f"bounds of shape {tuple(bound.shape)} do not broadcast to one sample of the input"
        raise ValueError(f"{given}, {tuple(shape[1:])}; give a number or one for each channel") from None


def _unless_merged(rule: Rule, composite: Composite) -> Rule:
    """A step that belongs to a layer passes relevance on as it is: the layer's rule counts it in."""

    def apply(op: Op, R: Tensor) -> Any:
        layer = op.facts.part_of
        if layer is None or composite.rule(layer) == "epsilon":
            return rule.apply(op, R)
        value = safe(op.output) if op in layer.facts.before else op.output
        return (wide(R) * wide(value) / wide(safe(op.inputs[0]))).to(R.dtype)

    return replace(rule, apply=apply)


def excited_sum(epsilon: float) -> Rule:
    """Relevance goes to the positive summands, in proportion."""

    def apply(op: Op, R: Tensor) -> Any:
        if op.family == "add" and op.data_count == 1:
            return _activation(op, R)
        signs = {"sub": (1, -1), "subtract": (1, -1), "rsub": (-1, 1)}.get(op.name, (1,) * op.data_count)
        parts = [(x * sign).clamp(min=0) * sign for x, sign in zip(op.inputs, signs, strict=True)]
        message = per_unit(wide(R * op.output), wide(first(op.call(*parts))), epsilon)
        grads = op.vjp(message.to(R.dtype))
        return tuple(torch.where(part == 0, 0, grad) for part, grad in zip(parts, grads, strict=True))

    return Rule(apply, "excitation_sum")


def _activation(op: Op, R: Tensor) -> Tensor:
    a, z = wide(op.output), wide(op.inputs[0])
    ratio = a / safe(z)
    if op.state.absorbed is not None:
        _absorb(op, 0, R * (a - ratio * z))
    return (R * ratio).to(R.dtype)


def _product(op: Op, R: Tensor) -> Any:
    constant = op.facts.constant or (False,) * op.data_count
    sharing = constant.count(False) or 1
    grads = op.vjp(R / sharing)
    if all(constant):
        return grads
    return tuple(None if weight else grad for weight, grad in zip(constant, grads, strict=True))


def _division(op: Op, R: Tensor) -> Any:
    if op.data_count == 1:
        return _activation(op, R) if op.name == "rdiv" else op.vjp(R)
    grads = op.vjp(R)
    return (None, grads[1]) if op.name == "rdiv" else (grads[0], None)


def lrp_norm(epsilon: float) -> Rule:
    def apply(op: Op, R: Tensor) -> Any:
        with torch.enable_grad():
            leaf = op.inputs[0].detach().requires_grad_()
            output = norm_by_steps(op, leaf, constant=True)
        message = (R * stabilised(wide(op.output), epsilon)).to(R.dtype)
        if op.state.absorbed is not None:
            _absorb(op, message * _constant(op), withheld(R * op.output, op.output, epsilon))
        return torch.autograd.grad(output, leaf, message)

    return Rule(apply, "lrp_norm")


def _constant(op: Op) -> Tensor:
    """What a linear step makes of 0."""
    return first(op.call(*map(torch.zeros_like, op.inputs)))


def _absorb(op: Op, by_bias: Any, by_stabiliser: Any = 0) -> None:
    """For the account of where relevance went: see methods/lrp.py."""
    assert op.state.absorbed is not None
    op.state.absorbed.append((torch.as_tensor(by_bias).sum(), torch.as_tensor(by_stabiliser).sum()))


def absorbed_by_constants(op: Op, R: Tensor) -> None:
    """For the same: relevance of constants that a step without a rule joins to its data, as a class token."""
    if op.family not in op.state.rules and op.state.absorbed is not None and op.inputs:
        constant = _constant(op)
        if isinstance(constant, Tensor) and constant.shape == R.shape:
            _absorb(op, product(R, constant))
