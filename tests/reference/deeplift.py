"""DeepLIFT, Rescale: the difference of the outputs goes to the inputs in proportion to theirs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from reference.graph import RECTIFIERS, SQUASHING, Rule, Run, Shares, family, part, plain
from reference.lrp import norm_settings
from reference.windows import Windows, each_window, windows_of


def deeplift_rescale(x: Tensor, x0: Tensor, f: Callable[[Tensor], Tensor], m: Tensor) -> Tensor:
    """m * (f(x) - f(x0)) / (x - x0), with the derivative at the midpoint where |x - x0| < 1e-6."""
    middle = ((x + x0) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(f(middle).sum(), middle)
    dx = x - x0
    near = dx.abs() < 1e-6
    return m * torch.where(near, slope, (f(x) - f(x0)) / torch.where(near, 1.0, dx))


def deeplift_max_pool(x: Tensor, x0: Tensor, m: Tensor, windows: Windows) -> Tensor:
    """The output's difference goes to the input's arg-max where it rose, to the baseline's where it fell."""
    multipliers = torch.zeros_like(x)
    for target, places in each_window(x, m, windows):
        values, values0 = [x[p].item() for p in places], [x0[p].item() for p in places]
        dy = max(values) - max(values0)
        place = places[values.index(max(values)) if dy >= 0 else values0.index(max(values0))]
        dx = (x[place] - x0[place]).item()
        multipliers[place] += m[target] * (1.0 if abs(dx) < 1e-6 else dy / dx)
    return multipliers


def deeplift_quotient(n: Tensor, n0: Tensor, d: Tensor, d0: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """n / d as n * r with r = 1 / d: multipliers of n and of d, both already of m's shape."""
    r, r0 = 1 / d, 1 / d0
    return m * (r + r0) / 2, deeplift_rescale(d, d0, torch.reciprocal, m * (n + n0) / 2)


def deeplift_softmax(x: Tensor, x0: Tensor, m: Tensor, dim: int) -> Tensor:
    """exp(x - c), their sum, the quotient; c is one constant for x and x0."""
    c = torch.maximum(x, x0).amax(dim, keepdim=True)
    e, e0 = (x - c).exp(), (x0 - c).exp()
    total, total0 = (v.sum(dim, keepdim=True).expand_as(v) for v in (e, e0))
    m_e, m_total = deeplift_quotient(e, e0, total, total0, m)
    m_e = m_e + m_total.sum(dim, keepdim=True)
    return deeplift_rescale(x, x0, lambda v: (v - c).exp(), m_e)


def deeplift_norm(x: Tensor, x0: Tensor, m: Tensor, eps: float) -> Tensor:
    """Along the last dimension: c = x - mean, v = mean(c * c) + eps, c * rsqrt(v)."""
    c, c0 = (v - v.mean(-1, keepdim=True) for v in (x, x0))
    v, v0 = ((part * part).mean(-1, keepdim=True) + eps for part in (c, c0))
    r, r0 = v.rsqrt(), v0.rsqrt()
    m_r = (m * (c + c0) / 2).sum(-1, keepdim=True)
    m_v = deeplift_rescale(v, v0, torch.rsqrt, m_r)
    m_c = m * (r + r0) / 2 + m_v / x.shape[-1] * (c + c0)
    return m_c - m_c.mean(-1, keepdim=True)


def deeplift_rule(baseline: Run) -> Rule:
    """R is a multiplier here; `baseline` holds the same nodes' values on the baseline."""

    def both(record: Run, node: fx.Node) -> tuple[Any, Any]:
        return record.values[node], baseline.values[node]

    def step(record: Run, node: fx.Node, R: Any) -> Shares:
        kind, source = family(node), node.args[0]
        if kind in RECTIFIERS | SQUASHING | {"pow"}:
            return [(source, deeplift_rescale(*both(record, source), part(record, node, source), R))]
        if kind in ("max_pool", "adaptive_max_pool"):
            return [(source, deeplift_max_pool(*both(record, source), R, windows_of(record, node)))]
        if kind == "softmax":
            return [(source, deeplift_softmax(*both(record, source), R, node.kwargs["dim"]))]
        if kind in ("layer_norm", "group_norm"):
            grouped, weight, _, eps = norm_settings(record, node)
            x, x0 = (grouped(v) for v in both(record, source))
            return [(source, deeplift_norm(x, x0, grouped(R * weight), eps).reshape(R.shape))]
        if kind == "truediv" and node.args[1] in record.data:
            return quotient(record, node, R)
        # Linear steps, and products of two: their gradient at the midpoint is exact.
        return plain(record, node, R, {s: middle(*both(record, s)) for s in record.sources(node)})

    def middle(x: Any, x0: Any) -> Any:
        return (x + x0) / 2 if isinstance(x, Tensor) else x

    def quotient(record: Run, node: fx.Node, R: Tensor) -> Shares:
        spread = [torch.broadcast_to(v, R.shape) for s in node.args for v in both(record, s)]
        shares = deeplift_quotient(*spread, R)
        return [(s, m.sum_to_size(record.values[s].shape)) for s, m in zip(node.args, shares, strict=True)]

    return step
