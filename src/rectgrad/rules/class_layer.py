"""The class layer, of Grad-CAM and of the class gate: the last activation that still has positions.

It is the last recorded tensor that is the output of a rectified activation, or of the `cat` or `add` that
joins such outputs (pooled or padded before, perhaps), has more than one position, and has a plain gradient of
the score that is non-zero at more than one position. This is decided for each sample: a ViT whose score reads
the class token alone has its class layer in an earlier block.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.backward import OVERWRITTEN, Pass, Plan
from rectgrad.engine.bridge import unsupported
from rectgrad.engine.diagnose import first_wrong
from rectgrad.engine.op import Op, Rule, Rules
from rectgrad.engine.request import Request
from rectgrad.engine.trace import outermost
from rectgrad.kernels.class_maps import Gate, class_map
from rectgrad.kernels.closed_forms import relu_gradient
from rectgrad.kernels.device import is_capturing
from rectgrad.kernels.positions import Grids, Image, mirrors
from rectgrad.ops.arguments import Slot

_NAME = "class layer"
_JOINS = ("add", *ops.FAMILIES["cat"].split())
_CARRIERS = ("max_pool", "avg_pool", "pad", "add", "cat")
_READS = ("shapes", "output", "inputs", "all")  # in increasing order
_PLAIN = Rule(lambda op, R: op.vjp(R), "plain")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(ops.RECTIFIERS, _PLAIN),
    **dict.fromkeys((*_CARRIERS, "div", "mul"), replace(_PLAIN, reads="shapes")),
    "relu": Rule(lambda op, R: relu_gradient(R, op.output), "plain", reads="output"),
    "relu6": Rule(lambda op, R: op.relu6_gradient(R), "plain", reads="output"),
}


def class_layer_rules(others: Rules | None = None) -> Rules:
    """Rules with plain gradients, for a pass that keeps what `class_layers` needs. others: the rules of a
    method that shares the pass, which are returned with the same `reads`."""
    others = others or {}
    reads = {f: max(rule.reads, _RULES.get(f, rule).reads, key=_READS.index) for f, rule in others.items()}
    return _RULES | {f: replace(rule, reads=reads[f]) for f, rule in others.items()}


class ClassLayer(NamedTuple):
    """The class layer of some samples: activation and plain gradient of the score, (N, C, d1..dk)."""

    op: Op
    rows: Tensor  # the samples, (N,)
    a: Tensor
    R: Tensor


def class_layers(
    plan: Plan, request: Request, passed: Pass, scores: Tensor, layer: str | None = None, once: bool = False
) -> list[ClassLayer]:
    """The class layer of each sample, found by a backward pass that stops there. plan: has the rules of
    `class_layer_rules` and the fact "gate". layer: the name of a module whose output is used instead. once:
    whether this is the last pass."""
    asked = None if layer is None else _output_of(layer, passed)
    wanted = _activations(passed.ops) if asked is None else {id(asked)}
    settled = torch.zeros(passed.n, dtype=torch.bool, device=scores.device)
    found, arrived, done = list[ClassLayer](), list[Tensor](), False
    images = cache(lambda: _images(wanted, passed, request))  # once facts are known

    def look(op: Op, R: Tensor) -> bool:
        nonlocal settled, done
        if request.observe is not None:
            request.observe(op, R)
        image = None if done else images().get(id(op))
        if image is None or op.facts.gate:
            return done
        positions = (image(R) != 0).any(1).flatten(1).sum(1).to(settled.device)
        rows = ~settled & ((positions > 1) if asked is None else True)
        settled, capturing = settled | rows, is_capturing(R.device)
        arrived.append(R.flatten(1).any(1).to(settled.device))
        if capturing or bool(rows.any()):
            found.append(ClassLayer(op, rows, image(_activation(op)), image(R)))
        # A capture must not synchronise: its walk is as long as in earlier passes.
        done = op.index <= request.memo.get(_NAME, op.index) if capturing else bool(settled.all())
        return done

    passed.backward(plan, scores, once, look)
    for each in found:
        each.op.rule, request.memo[_NAME] = _NAME, each.op.index
    reached = torch.stack(arrived).any(0) if arrived else ~settled  # if no gradient arrived, the map is zero
    if first_wrong(request, ~settled & reached) is not None:
        what = f"layer {layer!r}" if layer is not None else "activation"
        last = asked or next((op for op in reversed(passed.ops) if op.family in ops.RECTIFIERS), None)
        shape = f"the last one has shape {tuple(last.shape)}" if last else "there is no activation at all"
        lack = f"no {what} with positions, (N, C, d1..dk), where the score's gradient reaches several"
        raise unsupported(type(plan).__name__, f"{lack}; {shape}. Other methods, such as saliency, need none")
    return found


class ClassGate:
    """The factor for the scores of an op. At the class layer, it is the positive part of the sum over
    channels of a * R, R the plain gradient, scaled to a maximum of 1 for each sample. Elsewhere, it is that
    resized, or None if the op has no positions."""

    def __init__(self, plan: Plan, request: Request, passed: Pass, scores: Tensor) -> None:
        found = class_layers(plan, replace(request, observe=None), passed, scores)
        self.layers = [each.op for each in found]
        self.cams = Gate([(each.rows, class_map(each.a, each.R, "hirescam")) for each in found])
        wanted = set(map(id, passed.ops))
        self._images = cache(lambda: _images(wanted, passed, request))  # once facts are known

    def __call__(self, op: Op) -> Tensor | None:
        return self.cams.at(self._images().get(id(op)), tuple(op.shape))


def _activations(recorded: Iterable[Op]) -> set[int]:
    """The ids of rectified activations and of the ops that join them."""
    found, carried = set[int](), set[int]()
    for op in recorded:
        rectified, joins = op.family in ops.RECTIFIERS, op.name in _JOINS and op.data_count > 1
        carries = op.family in _CARRIERS and len(op.sources) == op.data_count
        if rectified or (carries and carried.issuperset(map(id, op.sources))):
            carried.add(id(op))
            found |= {id(op)} if rectified or joins else set()
    return found


def _activation(op: Op) -> Tensor:
    """An op's output, recomputed for `cat` and `add` if only their inputs are kept."""
    if op._output is None:
        return op.result(*map(_activation, op.sources))
    if op.overwritten():
        raise RuntimeError(f"the output of {op.name} was {OVERWRITTEN}")
    return op.output


def _output_of(name: str, passed: Pass) -> Op:
    """The last op that ran inside a module: it made the output of the module's last call."""
    root = passed.trace.root or outermost(passed.trace.rows)
    modules = dict(root.named_modules(remove_duplicate=False)) if root is not None else {}
    inside = [row.op for row in passed.trace.rows if modules.get(name) in row.modules]
    if not inside or inside[-1] is None:
        lack = "made no tensor that is recorded" if name in modules else "does not exist"
        near = difflib.get_close_matches(name, modules, 5, 0.5) or list(modules)[1:6]
        raise ValueError(f"the layer {name!r} {lack}; there are {', '.join(near)} and others")
    return inside[-1]


def _images(wanted: set[int], passed: Pass, request: Request) -> dict[int, Image]:
    """How the positions of ops are laid out, by id, without ops that have none or a mirrored image. The
    positions are those of the last image in the pass before the op, or of the first one after it."""
    grids, met, mirrored = Grids(passed.n, (x.shape for x in request.inputs)), {}, set[int]()
    for row in passed.trace.rows:
        op, given = row.op, () if row.op is None else (*row.op.args, *row.op.kwargs.values())
        grids.meet(row.name, row.family, row.source, row.shape, given)
        if op is not None and row.family == "cat" and op.argument("dim", 0) in (1, -2):
            parts, shapes = op.spec.argument("tensors", op.args, op.kwargs), op.input_shapes
            grids.join((shapes[x] if type(x) is Slot else x.shape, type(x) is Slot) for x in parts)
        if op is not None and mirrors(op.name, op.shape, given) ^ any(id(x) in mirrored for x in op.sources):
            mirrored.add(id(op))
        elif op is not None and id(op) in wanted:
            met[id(op)] = op, grids.now
    seen = {key: grids.image(op.shape, op.facts.channels_last, now) for key, (op, now) in met.items()}
    return {key: image for key, image in seen.items() if image is not None}
