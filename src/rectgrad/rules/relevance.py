"""Layer-wise relevance propagation: the rules of kernels/relevance_ops.py on layers with weights, and

    linear maps     c_x = J^T (c * |z| / (|z| + epsilon))     the epsilon rule
    activations     c_z = c * a / z                           relevance passes unchanged
    x * y, x @ y    half of the gradient to each; all of it to x where y is a softmax's weights
    norms, x / y    the denominator is a constant

What travels is c = relevance / value, so that the relevance of a tensor is value * c and each step is a plain
gradient with factors. In the code, as in every rule, R is what arrives at an op, which is c here. On ReLU
networks the epsilon rule tends to gradient * input as epsilon goes to 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.op import Op, Rule, first, wide
from rectgrad.kernels import relevance_ops as kernel
from rectgrad.kernels.closed_forms import relu_gradient
from rectgrad.kernels.relevance_ops import Composite, absorb, safe, stabilised
from rectgrad.ops.composite import norm_gradient
from rectgrad.rules.layers import CONVOLUTIONS, WEIGHTED, layer_of


def lrp_rules(composite: Composite) -> dict[str, Rule]:
    linear = lrp_linear(composite.epsilon)
    rules: dict[str, Rule] = dict.fromkeys("max_pool avg_pool sum add".split(), linear)
    activation = Rule(_activation, "lrp_activation")
    rules |= dict.fromkeys((*ops.RECTIFIERS, "squash", "unary", "softmax", "log_softmax"), activation)
    # Models overwrite the inputs and outputs of ReLUs and batch norms: keeping them would need copies.
    rules |= {"relu": replace(activation, reads="output"), "batch_norm": replace(linear, reads="inputs")}
    rules |= {"mul": Rule(_product, "lrp_product"), "div": Rule(_division, "lrp_division")}
    rules |= {part: _unless_merged(rules[part], composite) for part in ("add", "batch_norm", "mul", "div")}
    rules |= {family: lrp_layer(composite, family in CONVOLUTIONS) for family in WEIGHTED}
    return rules | {"norm": lrp_norm(composite.epsilon)}


def attn_lrp_rules(epsilon: float) -> dict[str, Rule]:
    """After Achtibat et al. 2024: R_i = x_i (R_i - s_i sum_j R_j) of a softmax s, its plain gradient here."""

    def softmax(op: Op, R: Tensor) -> Any:
        dim = op.argument("dim", -1)
        absorb(op.state.absorbed, lambda: (R * kernel.softmax_bias(op.output, op.inputs[0], dim), 0))
        return op.vjp(R)

    rule = Rule(softmax, "attn_lrp", checks=True)
    return lrp_rules(Composite.named("epsilon", epsilon)) | {"softmax": rule}


def excitation_rules(contrastive: bool, epsilon: float = 1e-12) -> dict[str, Rule]:
    """After Zhang et al. 2016: z+ without biases, in sums too. contrastive: at the last layer, less what goes
    to a unit with the opposite weights."""
    composite = Composite(*("excitation",) * 3, epsilon, top="contrast" if contrastive else "")
    sums, passed = excited_sum(epsilon), Rule(_activation, "excitation", reads="inputs")
    rules = lrp_rules(composite) | {"sum": sums, "avg_pool": sums, "add": _unless_merged(sums, composite)}
    return rules | {"batch_norm": _unless_merged(passed, composite)}


def lrp_linear(epsilon: float) -> Rule:
    def apply(op: Op, R: Tensor) -> Any:
        if op.facts.folded:
            absorb(op.state.absorbed, lambda: (kernel.product(R, _constant(op)), 0))
        else:
            z = op.output if op.family != "add" or op.data_count > 1 else op.output.nan_to_num()  # a mask
            R = stabilised(R, z, epsilon, op.state.absorbed, lambda: _constant(op))
        return op.vjp(R) if op.data_count == 1 or op.family == "add" else _product(op, R)

    return Rule(apply, "lrp_epsilon", checks=epsilon > 0)  # non-finite values are kept, and detected later


def lrp_layer(composite: Composite, convolution: bool) -> Rule:
    """The composite's rule of a layer with weights."""
    plain = lrp_linear(composite.epsilon)

    def apply(op: Op, R: Tensor) -> Any:
        if composite.rule(op.facts) == "epsilon":
            return plain.apply(op, R)
        return layer_of(op, R, composite).shared().to(R.dtype)

    name = composite.convolution if convolution else composite.dense
    title = f"lrp_{name}" + f" (first lrp_{composite.first})" * (composite.first != name)
    return Rule(apply, title, checks=plain.checks and composite.first == "epsilon")


def _unless_merged(rule: Rule, composite: Composite) -> Rule:
    """A step that belongs to a layer passes relevance on as it is: the layer's rule counts it in. After the
    layer it passes c, which is relevance / the output of the whole."""

    def apply(op: Op, R: Tensor) -> Any:
        layer = op.facts.part_of
        if layer is None or composite.rule(layer.facts) == "epsilon":
            return rule.apply(op, R)
        if op in layer.facts.after:
            return R
        return (wide(R) * wide(safe(op.output)) / wide(safe(op.inputs[0]))).to(R.dtype)

    return replace(rule, apply=apply)


def excited_sum(epsilon: float) -> Rule:
    """Relevance goes to the positive summands, in proportion."""

    def apply(op: Op, R: Tensor) -> Any:
        if op.family == "add" and op.data_count == 1:
            return _activation(op, R)
        parts = kernel.positive_summands(op.inputs, op.name)
        shared = kernel.per_unit(wide(R) * safe(wide(op.output)), wide(first(op.call(*parts))), epsilon)
        grads = op.vjp(shared.to(R.dtype))
        return tuple(torch.where(part == 0, 0, grad) for part, grad in zip(parts, grads, strict=True))

    return Rule(apply, "excitation")


def _activation(op: Op, R: Tensor) -> Tensor:
    if op.family == "relu":
        return relu_gradient(R, op.output)[0]
    a, z = wide(op.output), wide(op.inputs[0])
    ratio = a / safe(z)
    absorb(op.state.absorbed, lambda: (0, R * (a - ratio * z)))
    return (R * ratio).to(R.dtype)


def _product(op: Op, R: Tensor) -> Any:
    constant = op.facts.constant or (False,) * op.data_count
    sharing, grads = constant.count(False), op.vjp(R)
    if sharing > 1:  # here, because the gradients of a product of matrices are often smaller than R
        grads = tuple(grad / sharing for grad in grads)
    return grads if all(constant) else tuple(None if k else g for k, g in zip(constant, grads, strict=True))


def _division(op: Op, R: Tensor) -> Any:
    if op.data_count == 1:
        return _activation(op, R) if op.name == "rdiv" else op.vjp(R)
    grads = op.vjp(R)
    return (None, grads[1]) if op.name == "rdiv" else (grads[0], None)


def lrp_norm(epsilon: float) -> Rule:
    def apply(op: Op, R: Tensor) -> Any:
        return norm_gradient(op, stabilised(R, op.output, epsilon, op.state.absorbed, lambda: _constant(op)))

    return Rule(apply, "lrp_norm", checks=epsilon > 0)


def _constant(op: Op) -> Tensor:
    """The output of a linear step for an input of 0."""
    return first(op.call(*map(torch.zeros_like, op.inputs)))


def absorbed_by_constants(op: Op, R: Tensor) -> None:
    """Records the relevance of constants that a step without a rule adds, such as a class token."""
    if op.family not in op.state.rules and (constant := _constant(op)).shape == R.shape:
        absorb(op.state.absorbed, lambda: (kernel.product(R, constant), 0))
