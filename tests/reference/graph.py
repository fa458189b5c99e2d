"""A network as a list of nodes, run node by node on one sample and gone through backwards with a rule at each
node; and the ordinary gradient of a node."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from networks import SelfAttention

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
    if name == "div":
        return "truediv"
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


def part(record: Run, node: fx.Node, source: fx.Node) -> Callable[[Tensor], Tensor]:
    """The node as a function of one of its sources, the others held."""
    return lambda x: record.call(node, {source: x})
