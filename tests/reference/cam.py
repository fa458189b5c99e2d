"""Grad-CAM and its variants for one sample at a time: channel by channel and position by position.

The class layer is looked for node by node, from the output to the input. Nodes are (1, C, d1..dk).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from reference.graph import RECTIFIERS, Run, combined, family, output_node, plain, run, trace

Image = Callable[[Tensor], Tensor | None]


def gradients(record: Run, R: Tensor) -> dict[fx.Node, Any]:
    """The plain gradient at every node that it reaches."""
    arriving: dict[fx.Node, Any] = {output_node(record.graph): R}
    for node in reversed(record.graph.graph.nodes):
        if node in arriving and node.op not in ("placeholder", "get_attr"):
            for source, share in plain(record, node, arriving[node]):
                arriving[source] = combined(arriving.get(source), share)
    return arriving


def is_activation(record: Run, node: fx.Node) -> bool:
    """Whether a node is a rectified activation, or joins such ones."""
    if family(node) in RECTIFIERS:
        return True
    return family(node) in ("cat", "add", "iadd") and all(
        comes_from_activations(record, source) for source in record.sources(node)
    )


def comes_from_activations(record: Run, node: fx.Node) -> bool:
    """An activation, or one that was pooled or padded."""
    pooled = family(node) in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "pad")
    below = record.sources(node)
    return is_activation(record, node) or (pooled and comes_from_activations(record, below[0]))


def channels_first(x: Tensor) -> Tensor | None:
    """x as (1, C, d1..dk), if it has more than one position. A network with tokens needs another function."""
    return x if x.dim() > 2 and math.prod(x.shape[2:]) > 1 else None


def class_layer(record: Run, arriving: dict[fx.Node, Any], image: Image = channels_first) -> fx.Node:
    """The last activation whose gradient is non-zero at more than one position."""
    for node in reversed(record.graph.graph.nodes):
        if node in arriving and node.op.startswith("call") and is_activation(record, node):
            R = image(arriving[node])
            if R is not None and int((R[0] != 0).any(0).sum()) > 1:
                return node
    raise LookupError("there is no class layer")


def class_map(a: Tensor, R: Tensor, variant: str) -> Tensor:
    """The map at the class layer, from an activation and its gradient, both (C, d1..dk)."""
    total = torch.zeros(a.shape[1:], dtype=a.dtype)
    for channel in range(len(a)):
        A, g = a[channel], R[channel]
        if variant == "gradcam":
            total += A * g.sum() / g.numel()
        elif variant == "hirescam":
            total += A * g
        elif variant == "layercam":
            total += A * g.clamp(min=0)
        else:  # w = sum alpha * relu(g), alpha = g^2 / (2 g^2 + sum(A) g^3)
            weight = 0.0
            for slope in g.flatten().tolist():
                if slope > 0:
                    weight += slope**2 / (2 * slope**2 + float(A.sum()) * slope**3) * slope
            total += A * weight
    return total.clamp(min=0)


def resize(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Linear interpolation along every dimension, pixels being areas: output i is centred on
    (i + 1/2) * old / new - 1/2, and beyond the first and last pixel the value stays."""
    out = torch.zeros(sizes, dtype=values.dtype)
    for place in itertools.product(*map(range, sizes)):
        corners = []
        for i, old, new in zip(place, values.shape, sizes, strict=True):
            at = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
            low = min(math.floor(at), old - 1)
            corners.append([(low, 1 - (at - low)), (min(low + 1, old - 1), at - low)])
        for corner in itertools.product(*corners):
            index, weights = zip(*corner, strict=True)
            out[place] += values[index] * math.prod(weights)
    return out


def spread(cam: Tensor, x: Tensor) -> Tensor:
    """The map of an input (1, C, ...): each channel has its share of the value. None for other inputs."""
    if x.dim() - 2 != cam.dim():
        return torch.zeros_like(x)
    return (resize(cam, tuple(x.shape[2:])) / x.shape[1]).expand(x.shape)


def class_gate(record: Run, R: Tensor, image: Image = channels_first) -> Tensor:
    """Where the class is: HiResCAM's map at the class layer with a maximum of 1, (d1..dk). R: the gradient of
    the score at the output."""
    arriving = gradients(record, R)
    node = class_layer(record, arriving, image)
    cam = class_map(image(record.values[node])[0], image(arriving[node])[0], "hirescam")
    return cam / cam.max() if cam.max() > 0 else cam


def gate_at(gate: Tensor, a: Tensor, image: Image = channels_first) -> Tensor:
    """What an activation's scores are multiplied by, one number for each unit: 1 where it has no position."""
    g = torch.ones_like(a)
    seen = image(g)
    if seen is not None and seen.dim() - 2 == gate.dim():
        values = resize(gate, tuple(seen.shape[2:]))
        for place in itertools.product(*map(range, values.shape)):
            seen[(slice(None), slice(None), *place)] = values[place]
    return g


def one_cam(graph: fx.GraphModule, sample: tuple[Tensor, ...], start: Any, variant: str = "gradcam") -> Any:
    """start: from the output to the gradient of the score."""
    record = run(graph, sample)
    arriving = gradients(record, start(record.output))
    node = class_layer(record, arriving)
    cam = class_map(record.values[node][0], arriving[node][0], variant)
    return tuple(spread(cam, x) for x in sample)


def reference_cam(model: nn.Module, inputs: Any, start: Any, **options: Any) -> Any:
    graph, batch = trace(model), inputs if isinstance(inputs, tuple) else (inputs,)
    samples = [tuple(x[n : n + 1] for x in batch) for n in range(len(batch[0]))]
    maps = [
        one_cam(graph, sample, lambda out, n=n: start(out, n), **options) for n, sample in enumerate(samples)
    ]
    joined = tuple(torch.cat(parts) for parts in zip(*maps, strict=True))
    return joined if isinstance(inputs, tuple) else joined[0]
