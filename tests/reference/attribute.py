"""Whole maps, sample by sample and node by node."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from reference.averages import integrated
from reference.deeplift import deeplift_rule
from reference.gradients import FINAL, PRESETS, RAW, Maps, baseline_of
from reference.graph import backward, run, trace
from reference.lrp import lrp_rule
from reference.perturbation import occlusion


def reference_attribute(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...], method: str, target: Any = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """What `rectgrad.attribute` must give, sample by sample and node by node. Without random numbers: not
    SmoothGrad, Expected Gradients and RISE.

    `target` may be a function of the outputs of a network with one input; it is then part of the network.
    """
    if callable(target):
        model, target = Scored(model, target), None
    graph, batch = trace(model), inputs if isinstance(inputs, tuple) else (inputs,)
    samples = []
    for n in range(len(batch[0])):
        own = {k: v[n : n + 1] if isinstance(v, Tensor) else v for k, v in options.items()}
        own |= {k: v for k, v in options.items() if k == "baselines"}  # all of them, for every sample
        sample = tuple(x[n : n + 1].detach() for x in batch)
        samples.append(one_map(graph, sample, method, target_of(target, n), own))
    maps = tuple(torch.cat(parts) for parts in zip(*samples, strict=True))
    return maps if isinstance(inputs, tuple) else maps[0]


RELEVANCE = {
    "epsilon_lrp": {"epsilon": 1e-4},
    "lrp": {"composite": "epsilon_plus_flat", "epsilon": 1e-6},
    "attn_lrp": {"epsilon": 1e-6, "attention": True},
    "excitation_backprop": {"composite": "excitation", "epsilon": 1e-12},
}


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
    if method in RELEVANCE:
        preset = RELEVANCE[method]
        score = 1 if method == "excitation_backprop" else record.output  # a probability, whatever the score
        maps = backward(record, start * score, lrp_rule(**{**preset, **options}))
        return tuple(m.clamp(min=0) for m in maps) if options.get("contrastive") else maps
    if method == "occlusion":
        return occlusion(lambda point: float((start * run(graph, point).output).sum()), sample, **options)
    if method == "deeplift_shap":
        each = [one_map(graph, sample, "deeplift", target, {"baseline": b}) for b in options["baselines"]]
        return tuple(sum(maps) / len(each) for maps in zip(*each, strict=True))
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
