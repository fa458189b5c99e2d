"""The explanations of a batch of pictures whose forward pass is recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rectgrad.api import Record
from rectgrad.checks import are_probabilities
from rectgrad.engine import target as targets
from rectgrad.engine.trace import Trace
from rectgrad.explanation.captures import Answered, without_tensors
from rectgrad.explanation.network import Network, Prepared
from rectgrad.explanation.result import Explanation
from rectgrad.explanation.trust import Specificity, caution, specificity
from rectgrad.explanation.warning_log import WarningLog
from rectgrad.kernels.class_maps import SILENT
from rectgrad.methods import Method, RandomMap
from rectgrad.methods.catalog import name_of
from rectgrad.models import Guess
from rectgrad.ops.table import CHANGES_SHAPE


def explain_record(
    recorded: Answered,
    network: Network,
    batch: Sequence[Prepared],
    method: Method,
    target: Any = None,
    specificity: bool | None = None,
) -> list[Explanation]:
    """The explanations of a recorded batch. Several methods or classes can share one forward pass."""
    with WarningLog() as log:
        return answers(recorded, network, batch, method, target, specificity, log)


def measured(recorded: Answered, explanation: Explanation, target: Any) -> Explanation:
    """Adds the specificity to an explanation of a recorded picture, even if that needs many passes. The map
    is not recomputed."""
    scores = _scores(recorded, 1)
    index = None if scores is None or callable(target) else targets.indices(scores, target)
    maps = explanation.map.unsqueeze(0)
    [found] = _specificities(recorded, explanation.method, maps, scores, index, requested=True)
    return replace(explanation, specificity=found.value, specificity_note=_note(found, explanation.method))


def answers(
    recorded: Answered,
    network: Network,
    batch: Sequence[Prepared],
    method: Method,
    target: Any,
    requested: bool | None,
    log: WarningLog,
) -> list[Explanation]:
    """The explanations, with the warnings logged so far. requested: whether to compute the specificity; None:
    only if it needs one pass."""
    method = network.bounded(method)
    scores = _scores(recorded, len(batch))
    if scores is not None:
        network.check_labels(scores.shape[1])
    maps = recorded.attribute(method, target)
    trace, messages = without_tensors(recorded.trace, method), list(log.messages)
    index = None if scores is None or callable(target) else targets.indices(scores, target)
    found = _specificities(recorded, method, maps, scores, index, requested)
    on_cpu, guesses = maps.cpu(), _guesses(network, scores, index, len(batch), trace)
    explanations = [
        Explanation(
            map=on_cpu[i].clone(),
            outputs=_outputs(recorded, scores, i),
            target=None if index is None else guesses[i][0],
            top=tuple(guesses[i][1:]),
            method=method,
            photo=batch[i].photo,
            trace=trace,
            warnings=_warnings(messages, i, guesses[i][0].label if index is not None else None),
            specificity=value,
            specificity_note=_note(Specificity(value, note), method),
            model=network.name,
            question=_question(network, target, i),
        )
        for i, (value, note) in enumerate(found)
    ]
    # Without those about the other class, for which a zero map is expected.
    log.messages[:] = dict.fromkeys(message for each in explanations for message in each.warnings)
    return explanations


def _scores(recorded: Answered, n: int) -> Tensor | None:
    """The outputs as (N, classes); None if they are not one row of scores per sample."""
    outputs = getattr(recorded.outputs, "logits", recorded.outputs)
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2) or len(outputs) != n:
        return None
    return outputs.reshape(n, -1).cpu()


def _outputs(recorded: Answered, scores: Tensor | None, i: int) -> Tensor:
    """The raw outputs of one sample; empty if the model does not return a single tensor."""
    if scores is not None:
        return scores[i].clone()
    outputs = getattr(recorded.outputs, "logits", recorded.outputs)
    known = isinstance(outputs, Tensor) and outputs.dim() > 0 and i < len(outputs)
    return outputs[i].cpu().clone() if known else torch.empty(0)


def top_classes(recorded: Record[Tensor], network: Network) -> tuple[Guess, ...]:
    """The five classes with the largest outputs of a recorded picture."""
    return tuple(_guesses(network, _scores(recorded, 1), None, 1, recorded.trace)[0][1:])


def _guesses(
    network: Network, scores: Tensor | None, index: Tensor | None, n: int, trace: Trace
) -> list[list[Guess]]:
    """For each sample, the explained class followed by the five classes with the largest outputs.

    Probabilities are the softmax of the outputs, unless those are probabilities already; a single output has
    none.
    """
    if scores is None:
        return [[]] * n
    if scores.shape[1] < 2:
        only = Guess(0, network.names[0][0] if network.names else "output", float("nan"))
        return [[only, only]] * n
    ready = are_probabilities(scores) or _ends_in_sigmoid(trace)
    probabilities = scores.double() if ready else scores.double().softmax(1)
    first = scores.argmax(1, keepdim=True) if index is None else index.unsqueeze(1)
    shown = torch.cat([first, scores.topk(min(5, scores.shape[1])).indices], dim=1)
    return [
        [Guess(i, network.label(i), float(own[i])) for i in row]
        for row, own in zip(shown.tolist(), probabilities, strict=True)
    ]


def _ends_in_sigmoid(trace: Trace) -> bool:
    """Whether each output is a probability of its own, as in a network that assigns several labels."""
    return next((row.name for row in reversed(trace.rows) if row.name not in CHANGES_SHAPE), "") == "sigmoid"


def _question(network: Network, target: Any, i: int) -> str:
    """A description of what is explained, for targets that are not a class."""
    if not isinstance(target, targets.contrast):
        return "a custom score" if callable(target) else "the explained class"
    a, b = (torch.as_tensor(x).reshape(-1).tolist() for x in (target.a, target.b))
    return f"{network.label(a[min(i, len(a) - 1)])} rather than {network.label(b[min(i, len(b) - 1)])}"


def _specificities(
    recorded: Answered,
    method: Method,
    maps: Tensor,
    scores: Tensor | None,
    index: Tensor | None,
    requested: bool | None,
) -> list[Specificity]:
    """The specificity of each sample's map; None with a reason if it is not defined or not computed."""
    reason = _missing(method, scores, index, requested)
    if reason or scores is None or index is None:
        return [Specificity(None, reason)] * len(maps)
    others = scores.float().scatter(1, index.unsqueeze(1), float("inf"))
    least = recorded.attribute(method, others.argmin(1))
    return [specificity(a, b) for a, b in zip(maps.cpu(), least.cpu(), strict=True)]


def _note(found: Specificity, method: Method) -> str:
    """The text that follows the number: a reason, a caution, or nothing."""
    return found.note or ("" if found.value is None else caution(found.value, name_of(method)))


def _missing(method: Method, scores: Tensor | None, index: Tensor | None, requested: bool | None) -> str:
    """Why the specificity is not computed; empty if it is."""
    if isinstance(method, RandomMap):
        return "a random map does not depend on the class"
    if scores is not None and scores.shape[1] < 2:
        return "the model has fewer than two outputs"
    if index is None:
        return "the explained score is not the output of a single class"
    if requested is False or (requested is None and not method.one_backward):
        return "not computed; use specificity=True or --specificity to compute it, which takes a second map"
    return ""


def _warnings(messages: Sequence[str], i: int, label: str | None) -> tuple[str, ...]:
    """The messages about the i-th sample or about the whole batch. label: the explained class.

    They do not name the sample: its number in the batch means nothing to those who see one picture.
    """
    own = tuple(_SAMPLES.sub(r"\1", message, count=1) for message in messages if _concerns(message, i))
    if label is None:
        return own
    silent = f"nothing in the picture speaks for {label!r}"
    return tuple(silent if message.endswith(SILENT) else message for message in own)


def _concerns(message: str, i: int) -> bool:
    samples = _SAMPLES.search(message)
    return samples is None or str(i) in re.findall(r"\d+", samples[0])


_SAMPLES = re.compile(r" of sample \d+( is zero)?(?:, and so are those of [\d, ]+)?")
