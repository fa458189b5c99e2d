"""The calls people make: attribute, record, layer_attributions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rectgrad import ops
from rectgrad.catalog import as_method
from rectgrad.diagnose import warn
from rectgrad.methods import Method
from rectgrad.op import Op
from rectgrad.propagate import Tape
from rectgrad.run import Maps, Pass, Subject, UnsupportedModelError, mixes_samples
from rectgrad.target import narrow
from rectgrad.trace import Trace


def attribute(
    model: Any,
    inputs: Any,
    method: str | Method = "rectgrad",
    target: Any = None,
    *,
    forward_args: tuple = (),
    forward_kwargs: dict[str, Any] | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Any:
    """What `model` looked at in `inputs`: a tensor of the same shape (a tuple for a tuple).

    method: a name in METHODS, with its options as keywords, or an instance. target: the class to explain, an
    int or one for each sample; None for each sample's largest output; or a callable from the model's output
    to (N,) scores. forward_args, forward_kwargs: further arguments of the model; those with one row for each
    sample are cut along with the inputs. batch_size: explain this many samples at a time.

        maps = rectgrad.attribute(model, images, "rectgrad", target=281, q=95)
    """
    method = as_method(method, options)
    subject = _subject(model, inputs, target, forward_args, forward_kwargs)
    size = _chunk(batch_size, subject.n)
    _check_model(subject.model, method)
    if subject.n == 0:
        return _given_back(tuple(torch.zeros_like(x) for x in subject.inputs), isinstance(inputs, tuple))
    parts = [_part(subject, method, start, size) for start in range(0, subject.n, size)]
    return _given_back(_joined(parts), isinstance(inputs, tuple))


class Record:
    """One forward pass, kept: `outputs`, and `attribute` for any method and target."""

    def __init__(self, subject: Subject, as_tuple: bool) -> None:
        passed = Pass(subject, Tape())
        self.outputs = _detach(passed.outputs)
        self._subject, self._as_tuple = subject, as_tuple
        subject.passed = passed
        self._parts = [subject]
        if subject.n > 1 and mixes_samples(subject, passed):
            self._parts = [subject.rows(i, i + 1) for i in range(subject.n)]
            for part in self._parts:
                part.passed = Pass(part, Tape())

    @property
    def trace(self) -> Trace:
        """The ops of the forward pass and the rule each one used last; prints as a table."""
        passed = self._parts[0].passed
        assert passed is not None
        return passed.tape.trace

    def attribute(self, method: str | Method = "rectgrad", target: Any = None, **options: Any) -> Any:
        """As `rectgrad.attribute`, without running the model again where the method needs one pass only."""
        method = as_method(method, options)
        _refuse(self._subject.model, method)
        n, parts, start = self._subject.n, [], 0
        for part in self._parts:
            stop = start + part.n
            asked = part.asking(narrow(target, start, stop, n) if len(self._parts) > 1 else target)
            parts.append(method.rows(start, stop, n).maps(asked))
            start = stop
        return _given_back(_joined(parts), self._as_tuple)


def record(
    model: Any, inputs: Any, *, forward_args: tuple = (), forward_kwargs: dict[str, Any] | None = None
) -> Record:
    """Run the model once and keep the pass, for many methods or classes.

    kept = rectgrad.record(model, images)
    kept.attribute("rectgrad", target=281), kept.attribute("guided_backprop", target=285)
    """
    subject = _subject(model, inputs, None, forward_args, forward_kwargs)
    _warn_training(subject.model)
    return Record(subject, isinstance(inputs, tuple))


def layer_attributions(
    model: Any,
    inputs: Any,
    method: str | Method = "rectgrad",
    target: Any = None,
    *,
    forward_args: tuple = (),
    forward_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> list[tuple[str, Tensor]]:
    """For every rectified activation, from the output to the input: (layer, a * R averaged over channels).

    R is the gradient as it arrives, before the rule. No positive part is taken.
    """
    method = as_method(method, options)
    if not method.one_backward:
        raise ValueError(f"{type(method).__name__} has no single backward pass; choose a method that has one")
    subject = _subject(model, inputs, target, forward_args, forward_kwargs)
    _check_model(subject.model, method)
    parts = [subject]
    if subject.n > 1 and mixes_samples(subject, Pass(subject, Tape(ops.RECTIFIERS, decompose=()))):
        parts = [subject.rows(i, i + 1) for i in range(subject.n)]
    found = [_layers(part, method.rows(i, i + part.n, subject.n)) for i, part in enumerate(parts)]
    return [(pairs[0][0], torch.cat([value for _, value in pairs])) for pairs in zip(*found, strict=True)]


def _layers(subject: Subject, method: Method) -> list[tuple[str, Tensor]]:
    seen: list[tuple[Op, Tensor]] = []

    def observe(op: Op, R: Tensor) -> None:
        if op.family in ops.RECTIFIERS:
            product = (op.output * R).mean(channel_dim(op, len(op.output.shape)))
            seen.append((op, product if product.shape[:1] == (subject.n,) else product.unsqueeze(0)))

    subject.observe = observe
    method.raw(subject)
    assert subject.trace is not None
    layer = subject.trace.layer_of
    return [(layer(op), value) for op, value in seen]


def channel_dim(op: Op, rank: int) -> int:
    """Channels are dimension 1 of what a convolution made, the last one of what a linear layer made."""
    return -1 if op.facts.get("channels_last") else min(1, rank - 1)


def unwrap(model: Any) -> Any:
    """The module inside a wrapper that would hide it."""
    if not callable(model):
        raise TypeError(f"model must be a module or a function of the inputs, not {model!r}")
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(model, nn.Module) and "_orig_mod" in model._modules:  # torch.compile's wrapper
            model = model._modules["_orig_mod"]
        else:
            return model


def _subject(model: Any, inputs: Any, target: Any, args: tuple, kwargs: dict | None) -> Subject:
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors:
        raise ValueError("inputs is an empty tuple; give at least one tensor (N, ...)")
    for x in tensors:
        _check_input(x, tensors[0])
    return Subject(unwrap(model), tensors, tuple(args), dict(kwargs or {}), target)


def _check_input(x: Any, first: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"inputs must be a floating tensor (N, ...) or a tuple of them, not {type(x).__name__}"
        )
    if not x.dtype.is_floating_point:
        raise TypeError(
            f"inputs of type {x.dtype} have no gradient; give floating values, for images x.float() / 255 or "
            "what the model was trained on, for token ids the embeddings"
        )
    if x.dim() == 0:
        raise ValueError("inputs must have a first dimension of samples, (N, ...); got a scalar")
    if len(x) != len(first):
        raise ValueError(f"inputs differ in their number of samples: {len(first)} and {len(x)}")


def _chunk(batch_size: Any, n: int) -> int:
    if batch_size is None:
        return max(n, 1)
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size.__index__() < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    return batch_size.__index__()


def _part(subject: Subject, method: Method, start: int, size: int) -> Maps:
    if size >= subject.n:
        return method.maps(subject)
    stop = min(start + size, subject.n)
    return method.rows(start, stop, subject.n).maps(subject.rows(start, stop))


def _joined(parts: list[Maps]) -> Maps:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(maps) for maps in zip(*parts, strict=True))


def _given_back(maps: Maps, as_tuple: bool) -> Any:
    return maps if as_tuple else maps[0]


def _check_model(model: Any, method: Method) -> None:
    if method.runs_model:
        _refuse(model, method)
        _warn_training(model)


def _refuse(model: Any, method: Method) -> None:
    """No rule reaches into scripted or quantised modules."""
    if not isinstance(model, nn.Module) or not method.rules():
        return
    for name, module in model.named_modules():
        kind = None
        if isinstance(module, torch.jit.ScriptModule):
            kind = "a scripted module, whose inside cannot be seen; use the original Python module"
        elif "quantized" in type(module).__module__:
            kind = "a quantised module, which has no gradient; use the model before quantisation"
        if kind:
            raise UnsupportedModelError(
                f"{type(method).__name__} cannot explain this model: {name or 'the model'!r} is {kind}"
            )


def _warn_training(model: Any) -> None:
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        warn("the model is in training mode (random dropout, batch statistics); call model.eval() first")


def _detach(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if type(outputs) in (list, tuple):
        return type(outputs)(_detach(v) for v in outputs)
    if isinstance(outputs, dict):
        detached = {k: _detach(v) for k, v in outputs.items()}
        return detached if type(outputs) is dict else type(outputs)(**detached)
    return outputs
