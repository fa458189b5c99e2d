"""Slow, obvious versions of every rule, written from the formulas, and an interpreter that applies them.

First the rules, each on one sample. Then `reference_attribute`, which gives whole maps without the engine:
a network is traced into a list of nodes, run node by node on one sample, and gone through backwards with
a rule at each node. Nothing here imports rectgrad, and nothing here is meant to be fast.

Notation: a = activation, z = its input or a linear map's output, R = what arrives from above (a gradient,
a relevance or a multiplier, as the method has it).
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from networks import SelfAttention

# --- RectGrad, Guided Backprop, Deconv ---------------------------------------------------------------------


def tau_of(scores: Sequence[float], q: float, interpolation: str = "nearest") -> float:
    """The q-th percentile of one layer's scores of one sample."""
    if interpolation == "linear":
        return float(np.percentile(scores, q))
    d = len(scores)
    return sorted(scores, reverse=True)[round((d - 1) * (1 - q / 100))]


def score(a: float, r: float, rule: str) -> float:
    return {"PR1": a * r, "PR2": abs(a * r), "PR3": a, "PR4": r}[rule]


def rectified(
    a: Tensor,
    R: Tensor,
    q: float = 98.0,
    tau: float | None = None,
    rule: str = "PR1",
    interpolation: str = "nearest",
    margins: list[float] | None = None,
) -> Tensor:
    """R where score > tau, else 0. `margins` collects how far the nearest other score is from tau."""
    scores = [score(*unit, rule) for unit in zip(a.flatten().tolist(), R.flatten().tolist(), strict=True)]
    limit = tau_of(scores, q, interpolation) if tau is None else tau
    if margins is not None:
        largest = max(abs(s) for s in scores) or 1.0
        margins += [abs(s - limit) / largest for s in scores if s != limit]
    passed = [r if s > limit else 0.0 for s, r in zip(scores, R.flatten().tolist(), strict=True)]
    return torch.tensor(passed, dtype=R.dtype).reshape(R.shape)


def guided(z: Tensor, R: Tensor) -> Tensor:
    """R where R > 0 and the pre-activation > 0."""
    return torch.where((R > 0) & (z > 0), R, 0.0)


def deconv(R: Tensor) -> Tensor:
    """R where R > 0."""
    return torch.where(R > 0, R, 0.0)


# --- windows: the padding trick and pooling ----------------------------------------------------------------

Pair = tuple[int, int]


def outer(axes: Sequence[Iterable]) -> list[tuple]:
    return list(itertools.product(*axes))


def inside(length: int, kernel: int, stride: int, padding: Pair, dilation: int) -> list[bool]:
    """For each window along one axis: does it touch the image only?"""
    left, right = padding
    kept, start = [], -left
    while start + dilation * (kernel - 1) < length + right:
        taps = [start + dilation * t for t in range(kernel)]
        kept.append(all(0 <= tap < length for tap in taps))
        start += stride
    return kept


def padding_mask(
    lengths: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Pair],
    dilation: Sequence[int],
    extra: Sequence[Pair] | None = None,
) -> Tensor:
    """1 at the output positions of a convolution whose window stays inside the image, 0 at the others.

    `lengths` are those of the image before any padding, `extra` is the zero padding of a separate F.pad;
    both and `padding` go axis by axis as (before, after). Where no position would be left, all are.
    """
    extra = extra or [(0, 0)] * len(lengths)
    both = [(p[0] + e[0], p[1] + e[1]) for p, e in zip(padding, extra, strict=True)]
    axes = [inside(*axis) for axis in zip(lengths, kernel, stride, both, dilation, strict=True)]
    kept = [all(position) for position in outer(axes)]
    mask = torch.tensor(kept, dtype=torch.float64).reshape([len(axis) for axis in axes])
    return mask if any(kept) else torch.ones_like(mask)


Windows = list[list[list[int]]]  # axis, output position, the real input positions it covers


def pool_windows(
    lengths: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Windows:
    """What each output position of a pooling covers; ceil mode shows in `out` alone."""
    windows = []
    for length, size, k, s, p, d in zip(lengths, out, kernel, stride, padding, dilation, strict=True):
        taps = [[o * s - p + d * t for t in range(k)] for o in range(size)]
        windows.append([[tap for tap in window if 0 <= tap < length] for window in taps])
    return windows


def adaptive_windows(lengths: Sequence[int], out: Sequence[int]) -> Windows:
    """Output o of n covers floor(o * length / n) up to, not including, ceil((o + 1) * length / n)."""
    return [
        [list(range(o * length // n, -(-(o + 1) * length // n))) for o in range(n)]
        for length, n in zip(lengths, out, strict=True)
    ]


def each_window(x: Tensor, R: Tensor, windows: Windows) -> Iterable[tuple[tuple, list[tuple]]]:
    """(output index, input indices) of every window of every channel and leading dimension."""
    leading = [range(n) for n in x.shape[: x.ndim - len(windows)]]
    for channel in outer(leading):
        for position in outer([range(len(axis)) for axis in windows]):
            covered = [axis[o] for axis, o in zip(windows, position, strict=True)]
            yield channel + position, [channel + place for place in outer(covered)]


def prr_max_pool(x: Tensor, R: Tensor, windows: Windows) -> Tensor:
    """R * input / (sum of the window + count * 1e-10); the plain arg-max where that sum is negative."""
    shares = torch.zeros_like(x)
    for target, places in each_window(x, R, windows):
        values = [x[place].item() for place in places]
        total = sum(values)
        if total < 0:
            shares[places[values.index(max(values))]] += R[target]
            continue
        for place, value in zip(places, values, strict=True):
            shares[place] += R[target] * value / (total + len(places) * 1e-10)
    return shares


# --- Epsilon-LRP and DeepLIFT ------------------------------------------------------------------------------


def lrp_linear(x: Tensor, jacobian: Tensor, z: Tensor, R: Tensor, epsilon: float) -> Tensor:
    """R_i = sum_j x_i w_ij R_j / (z_j + epsilon * sign(z_j)), sign(0) = 1; jacobian is (outputs, inputs)."""
    z, R = z.flatten(), R.flatten()
    sign = torch.where(z >= 0, torch.ones_like(z), -torch.ones_like(z))
    messages = R / (z + epsilon * sign)
    return (x.flatten() * (jacobian.T @ messages)).reshape(x.shape)


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


# --- a network as a list of nodes --------------------------------------------------------------------------

SPATIAL = {"1d": 1, "2d": 2, "3d": 3}
RECTIFIERS = {"relu", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "silu", "gelu", "mish",
              "hardswish", "softplus"}  # fmt: skip
SQUASHING = {"sigmoid", "tanh", "hardsigmoid"}
LINEAR = {"conv", "conv_transpose", "linear", "add", "sub", "mean", "sum", "avg_pool", "adaptive_avg_pool",
          "max_pool", "adaptive_max_pool", "batch_norm", "layer_norm", "group_norm"}  # fmt: skip
ROUTES = {"reshape", "view", "flatten", "transpose", "permute", "getitem", "split", "cat", "pad", "squeeze",
          "expand", "dropout", "contiguous"}  # fmt: skip


def family(node: fx.Node) -> str:
    """What a node does, by the name of what it calls: 'relu', 'conv', 'add', ..."""
    if node.op == "call_module":
        return "batch_norm"
    if node.op not in ("call_function", "call_method"):
        return node.op
    name = (node.target if isinstance(node.target, str) else node.target.__name__).strip("_")
    if name == "clamp" and dict(node.kwargs) == {"min": 0}:
        return "relu"
    if name == "hardtanh" and (node.kwargs["min_val"], node.kwargs["max_val"]) == (0, 6):
        return "relu6"
    return name.removesuffix("1d").removesuffix("2d").removesuffix("3d")


class Tracer(fx.Tracer):
    """Looks into every module but batch normalisation, whose forward asks for the input's dimensions."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.modules.batchnorm._BatchNorm)


class Twin(nn.Module):
    """Stands for nn.MultiheadAttention in self-attention: the same call, written out."""

    def __init__(self, module: nn.MultiheadAttention):
        super().__init__()
        self.attention = SelfAttention.like(module)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> tuple[Tensor, None]:
        return self.attention(query), None


def trace(model: nn.Module) -> fx.GraphModule:
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, Twin(child))
    traced = fx.GraphModule(model, Tracer().trace(model))
    follow_in_place_calls(traced.graph)
    return traced


def follow_in_place_calls(graph: fx.Graph) -> None:
    """After `x.relu_()` every later use of x means the result."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        method = node.op == "call_method" and node.target.endswith("_")
        if method or node.kwargs.get("inplace"):
            node.args[0].replace_all_uses_with(node, lambda user, node=node: order[user] > order[node])


@dataclass
class Run:
    """One sample's way through a network: every node's value."""

    graph: fx.GraphModule
    values: dict[fx.Node, Any] = field(default_factory=dict)
    data: set[fx.Node] = field(default_factory=set)  # what depends on the inputs and holds floating numbers

    def value(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda node: self.values[node])

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes a gradient goes on to."""
        return [source for source in node.all_input_nodes if source in self.data]

    def store(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value
        first = value[0] if isinstance(value, tuple) and value else value
        floating = isinstance(first, Tensor) and first.is_floating_point()
        if floating and (node.op == "placeholder" or self.sources(node)):
            self.data.add(node)

    def call(self, node: fx.Node, given: dict[fx.Node, Any] | None = None) -> Any:
        """The node's own function, with the values in `given` in place of the recorded ones."""
        given = given or {}
        fetch = {source: given.get(source, self.values.get(source)) for source in node.all_input_nodes}
        fetch = {s: v.clone() if isinstance(v, Tensor) else v for s, v in fetch.items()}  # for in-place calls
        args = fx.map_arg(node.args, fetch.__getitem__)
        kwargs = fx.map_arg(node.kwargs, fetch.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        target = self.graph.get_submodule(node.target) if node.op == "call_module" else node.target
        return target(*args, **kwargs)

    @property
    def output(self) -> Tensor:
        return self.values[output_node(self.graph)]


def output_node(graph: fx.GraphModule) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op == "output").args[0]


@torch.no_grad()
def run(graph: fx.GraphModule, sample: Sequence[Tensor]) -> Run:
    record, inputs = Run(graph), iter(sample)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            record.store(node, next(inputs))
        elif node.op == "get_attr":
            record.store(node, attribute_of(graph, node.target))
        elif node.op != "output":
            record.store(node, record.call(node))
    return record


def attribute_of(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module.detach()


Shares = list[tuple[fx.Node, Any]]


def plain(record: Run, node: fx.Node, R: Any, at: dict[fx.Node, Tensor] | None = None) -> Shares:
    """The ordinary backward step of one node, at the recorded values or at those in `at`."""
    sources = record.sources(node)
    if isinstance(record.values[sources[0]], tuple):  # an element of a split
        return [(sources[0], {node.args[1]: R})]
    leaves = {s: (at or record.values)[s].detach().clone().requires_grad_() for s in sources}
    with torch.enable_grad():
        out = record.call(node, leaves)
        if isinstance(out, tuple):
            R = torch.cat([R.get(i, torch.zeros_like(part)).flatten() for i, part in enumerate(out)])
            out = torch.cat([part.flatten() for part in out])
        grads = torch.autograd.grad(out, list(leaves.values()), R)
    return list(zip(leaves, grads, strict=True))


Rule = Callable[[Run, fx.Node, Any], Shares]


def backward(record: Run, R: Tensor, rule: Rule) -> tuple[Tensor, ...]:
    """From the output to the inputs, `rule` at every node; what arrives at a node is added up."""
    arriving: dict[fx.Node, Any] = {output_node(record.graph): R}
    for node in reversed(record.graph.graph.nodes):
        if node in arriving and node.op not in ("placeholder", "get_attr"):
            for source, share in rule(record, node, arriving[node]):
                arriving[source] = combined(arriving.get(source), share)
    inputs = [node for node in record.graph.graph.nodes if node.op == "placeholder"]
    return tuple(arriving.get(node, torch.zeros_like(record.values[node])) for node in inputs)


def combined(old: Any, new: Any) -> Any:
    if old is None:
        return new
    if isinstance(new, dict):
        return old | {i: combined(old.get(i), r) for i, r in new.items()}
    return old + new


# --- the rules at the nodes of a network -------------------------------------------------------------------


def tuple_of(value: Any, n: int) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * n


def windows_of(record: Run, node: fx.Node) -> Windows:
    """The windows of a max-pooling node."""
    n = SPATIAL[node.target.__name__[-2:]]
    lengths, out = record.values[node.args[0]].shape[-n:], record.values[node].shape[-n:]
    if family(node) == "adaptive_max_pool":
        return adaptive_windows(lengths, out)

    def regular(kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        settings = (kernel_size, stride or kernel_size, padding, dilation)
        return pool_windows(lengths, out, *(tuple_of(setting, n) for setting in settings))

    return regular(*node.args[1:], **node.kwargs)


def zero_pad_before(node: fx.Node, n: int) -> list[Pair]:
    """(before, after) for each of the n convolved axes, from a zero F.pad that feeds a convolution."""
    pad = node.args[0]
    if family(pad) != "pad":
        return [(0, 0)] * n

    def pairs(input, pad, mode="constant", value=None):
        amounts = list(pad) + [0] * (2 * n)
        if mode != "constant" or value:
            return [(0, 0)] * n
        return [(max(amounts[2 * i], 0), max(amounts[2 * i + 1], 0)) for i in reversed(range(n))]

    return pairs(*pad.args, **pad.kwargs)


def mask_of(record: Run, node: fx.Node) -> Tensor:
    """The padding trick's mask of a convolution node."""
    n = SPATIAL[node.target.__name__[-2:]]

    def settings(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        kernel, dilation = tuple(weight.shape[-n:]), tuple_of(dilation, n)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        same = [(r // 2, r - r // 2) for r in reach]
        own = same if padding == "same" else [(0, 0)] * n if padding == "valid" else None
        own = own or [(p, p) for p in tuple_of(padding, n)]
        extra = zero_pad_before(node, n)
        lengths = [length - sum(e) for length, e in zip(input.shape[-n:], extra, strict=True)]
        return padding_mask(lengths, kernel, tuple_of(stride, n), own, dilation, extra)

    return settings(*record.value(node.args), **record.value(node.kwargs))


def last_rectifiers(record: Run) -> set[fx.Node]:
    """The rectified activations from which the output is reached without meeting another one."""
    found, seen, todo = set(), set(), [output_node(record.graph)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if family(node) in RECTIFIERS:
            found.add(node)
        else:
            todo += record.sources(node)
    return found


def rectgrad_rule(
    q: float = 98.0,
    tau: float | None = None,
    rule: str = "PR1",
    padding_trick: bool = True,
    prr: bool = False,
    interpolation: str = "nearest",
    margins: list[float] | None = None,
) -> Rule:
    def step(record: Run, node: fx.Node, R: Tensor) -> Shares:
        kind = family(node)
        if kind in RECTIFIERS:
            here = rule if rule != "mod" else "PR1" if node in last_rectifiers(record) else "PR2"
            return [(node.args[0], rectified(record.values[node], R, q, tau, here, interpolation, margins))]
        if kind == "conv" and padding_trick:
            return plain(record, node, R * mask_of(record, node))
        if kind in ("max_pool", "adaptive_max_pool") and prr:
            return [(node.args[0], prr_max_pool(record.values[node.args[0]], R, windows_of(record, node)))]
        return plain(record, node, R)

    return step


def guided_rule(record: Run, node: fx.Node, R: Tensor) -> Shares:
    if family(node) in RECTIFIERS:
        return [(node.args[0], guided(record.values[node.args[0]], R))]
    return plain(record, node, R)


def deconv_rule(record: Run, node: fx.Node, R: Tensor) -> Shares:
    return [(node.args[0], deconv(R))] if family(node) in RECTIFIERS else plain(record, node, R)


def frozen_norm(record: Run, node: fx.Node) -> Callable[[Tensor], Tensor]:
    """Layer or group normalisation with its denominator held at the recorded value: a linear map."""
    x = record.values[node.args[0]]
    grouped, weight, bias, eps = norm_settings(record, node)
    deviation = (grouped(x).var(-1, unbiased=False, keepdim=True) + eps).sqrt()

    def f(x: Tensor) -> Tensor:
        rows = grouped(x)
        return ((rows - rows.mean(-1, keepdim=True)) / deviation).reshape(x.shape) * weight + bias

    return f


def norm_settings(record: Run, node: fx.Node) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor, float]:
    """How to lay out what is normalised together as rows; weight and bias shaped for the input."""
    settings = record.value(node.kwargs)
    if family(node) == "layer_norm":
        n = len(node.args[1])
        return (lambda x: x.flatten(-n)), settings["weight"], settings["bias"], settings["eps"]
    groups, channels = node.args[1], (-1,) + (1,) * (record.values[node].ndim - 2)
    weight, bias = settings["weight"].reshape(channels), settings["bias"].reshape(channels)
    return (lambda x: x.reshape(x.shape[0], groups, -1)), weight, bias, settings["eps"]


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(outputs, inputs), one basis vector after the other."""
    x = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = f(x).flatten()
    basis = torch.eye(len(out), dtype=x.dtype)
    return torch.stack([torch.autograd.grad(out, x, e, retain_graph=True)[0].flatten() for e in basis])


def lrp_rule(epsilon: float = 1e-4) -> Rule:
    """R is a relevance here, not a gradient. Pooling is a linear map, max pooling the one that selects."""

    def linear(record: Run, node: fx.Node, R: Tensor, f: Callable, source: fx.Node, z: Tensor) -> Shares:
        x = record.values[source]
        return [(source, lrp_linear(x, dense_jacobian(f, x), z, R, epsilon))]

    def product(record: Run, node: fx.Node, R: Tensor) -> Shares:
        sources = [s for s in record.sources(node) if not softmaxed(record, s)]
        if family(node) in ("mul", "truediv"):
            return [(s, (R / len(sources)).sum_to_size(record.values[s].shape)) for s in sources]
        z, shares = record.values[node], []
        for source in sources:
            shares += linear(record, node, R / len(sources), part(record, node, source), source, z)
        return shares

    def step(record: Run, node: fx.Node, R: Any) -> Shares:
        kind, z = family(node), record.values[node]
        if kind in RECTIFIERS | SQUASHING:
            return [(node.args[0], R)]
        if kind in ("mul", "truediv", "matmul"):
            return product(record, node, R)
        if kind in ("layer_norm", "group_norm"):
            return linear(record, node, R, frozen_norm(record, node), node.args[0], z)
        if kind == "batch_norm" and folds(record, node):
            before = node.args[0]
            f = part(record, before, before.args[0])
            return linear(record, node, R, lambda x: record.call(node, {before: f(x)}), before.args[0], z)
        if kind in LINEAR:
            shares = [linear(record, node, R, part(record, node, s), s, z) for s in record.sources(node)]
            return [share for group in shares for share in group]
        assert kind in ROUTES, f"no relevance rule for {kind}"
        return plain(record, node, R)

    return step


def part(record: Run, node: fx.Node, source: fx.Node) -> Callable[[Tensor], Tensor]:
    """The node as a function of one of its sources, the others held."""
    return lambda x: record.call(node, {source: x})


def folds(record: Run, node: fx.Node) -> bool:
    """Is this batch normalisation the only reader of a convolution or a linear layer?"""
    before = node.args[0]
    return family(before) in ("conv", "linear") and len(before.users) == 1


def softmaxed(record: Run, node: fx.Node) -> bool:
    """Softmax weights, possibly moved about since."""
    kind = family(node)
    if kind in ROUTES - {"cat"}:
        return softmaxed(record, node.args[0])
    return kind == "softmax"


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


# --- methods -----------------------------------------------------------------------------------------------

PRESETS = {
    "rectgrad_prr": ("rectgrad", {"prr": True}),
    "rectgrad_mod": ("rectgrad", {"rule": "mod"}),
}
Maps = tuple[Tensor, ...]
RAW = {"saliency": lambda: plain, "gradient_x_input": lambda: plain, "rectgrad": rectgrad_rule,
       "guided_backprop": lambda: guided_rule, "deconv": lambda: deconv_rule}  # fmt: skip
FINAL = {  # the method's last step: times the input, positive part
    "saliency": (False, False),
    "gradient_x_input": (True, False),
    "rectgrad": (True, True),
    "guided_backprop": (False, False),
    "deconv": (False, False),
}


def reference_attribute(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...], method: str, target: Any = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """What `rectgrad.attribute` must give, sample by sample and node by node. SmoothGrad is not here.

    `target` may be a function of the outputs of a network with one input; it is then part of the network.
    """
    if callable(target):
        model, target = Scored(model, target), None
    graph, batch = trace(model), inputs if isinstance(inputs, tuple) else (inputs,)
    samples = []
    for n in range(len(batch[0])):
        own = {k: v[n : n + 1] if isinstance(v, Tensor) else v for k, v in options.items()}
        sample = tuple(x[n : n + 1].detach() for x in batch)
        samples.append(one_map(graph, sample, method, target_of(target, n), own))
    maps = tuple(torch.cat(parts) for parts in zip(*samples, strict=True))
    return maps if isinstance(inputs, tuple) else maps[0]


class Scored(nn.Module):
    """A network that ends in a score of each sample."""

    def __init__(self, model: nn.Module, score: Callable[[Tensor], Tensor]):
        super().__init__()
        self.model, self.score = model, score

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.model(x))


def target_of(target: Any, n: int) -> Any:
    return target[n] if isinstance(target, (list, Tensor)) else target


def one_map(graph: fx.GraphModule, sample: Maps, method: str, target: Any, options: dict) -> Maps:
    record = run(graph, sample)
    start = chosen(record.output, target)
    if method == "integrated_gradients":
        return integrated(graph, sample, start, **options)
    if method == "epsilon_lrp":
        return backward(record, start * record.output, lrp_rule(**options))
    if method == "deeplift":
        zero = baseline_of(sample, **options)
        multipliers = backward(record, start, deeplift_rule(run(graph, zero)))
        return tuple(m * (x - x0) for m, x, x0 in zip(multipliers, sample, zero, strict=True))
    method, preset = PRESETS.get(method, (method, {}))
    options = {**preset, **options}
    multiply, positive = FINAL[method]
    multiply = options.pop("multiply_by_input", multiply)
    positive = options.pop("positive_only", positive)
    maps = backward(record, start, RAW[method](**options))
    maps = tuple(m * x for m, x in zip(maps, sample, strict=True)) if multiply else maps
    return tuple(m.clamp(min=0) for m in maps) if positive else maps


def chosen(output: Tensor, target: Any) -> Tensor:
    """1 at the output that is explained, 0 at the others: the gradient of its score."""
    index = int(output.flatten().argmax()) if target is None else int(target)
    start = torch.zeros_like(output)
    start.view(-1)[index] = 1
    return start


def baseline_of(sample: tuple[Tensor, ...], baseline: Any = 0.0) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) + baseline for x in sample)


def integrated(
    graph: fx.GraphModule,
    sample: tuple[Tensor, ...],
    start: Tensor,
    over: str = "saliency",
    steps: int = 50,
    baseline: Any = 0.0,
    quadrature: str = "trapezoid",
    inner: dict | None = None,
) -> tuple[Tensor, ...]:
    """(x - x0) * sum of weight * raw backward result at x0 + alpha * (x - x0)."""
    zero, total = baseline_of(sample, baseline), [torch.zeros_like(x) for x in sample]
    method, preset = PRESETS.get(over, (over, {}))
    rule = RAW[method](**{**preset, **(inner or {})})
    for alpha, weight in quadrature_points(steps, quadrature):
        point = tuple(x0 + alpha * (x - x0) for x, x0 in zip(sample, zero, strict=True))
        for sum_, m in zip(total, backward(run(graph, point), start, rule), strict=True):
            sum_ += weight * m
    return tuple(m * (x - x0) for m, x, x0 in zip(total, sample, zero, strict=True))


def quadrature_points(steps: int, quadrature: str) -> list[tuple[float, float]]:
    """(alpha, weight): right is k / n for k = 1..n; trapezoid has both ends, at half the weight."""
    if quadrature == "right":
        return [(k / steps, 1 / steps) for k in range(1, steps + 1)]
    ends = (0, steps - 1)
    return [(k / (steps - 1), (0.5 if k in ends else 1.0) / (steps - 1)) for k in range(steps)]
