"""The calls people make: attribute, record, capture, layer_attributions, propagate."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rectgrad import checks, ops
from rectgrad.engine.backward import Inputs, Maps, Pass, Plan, interrupted
from rectgrad.engine.bridge import BridgeRecorder
from rectgrad.engine.capture import Capture as Capture
from rectgrad.engine.diagnose import warn
from rectgrad.engine.op import Op, UnsupportedModelError, as_rules
from rectgrad.engine.preserve import Region
from rectgrad.engine.recorder import Recorder
from rectgrad.engine.request import Request, mixes_samples
from rectgrad.engine.target import Picked, Target, changed
from rectgrad.engine.torch_private import (
    COMPILER,
    active_function_modes,
    inner_model,
    map_tensors,
    no_inference_mode,
    remove_tensor_hooks,
    restore_function_modes,
    saved_tensor_hooks,
    set_grad_enabled,
    tensors_in,
)
from rectgrad.engine.trace import Trace, module_names
from rectgrad.kernels.device import free_unused_memory, out_of_memory
from rectgrad.kernels.relevance_ops import Conservation
from rectgrad.methods.catalog import as_method
from rectgrad.methods.method import Method

T = TypeVar("T")

Model = Callable[..., object]  # a module, or a function of the inputs
Args = Sequence[object]  # further arguments of the model
Kwargs = Mapping[str, object]
OptionValue = float | str | bool | Tensor | tuple[Tensor, ...] | Method | None
Rules = Mapping[str, Callable[[Op, Tensor], Tensor | tuple[Tensor | None, ...]]]


def chosen(method: str | Method, options: Mapping[str, OptionValue]) -> Method:
    """The method of a call. A percentile given as a fraction, q=0.98 for q=98, is an error."""
    q = options.get("q")
    found = as_method(method, dict(options))
    if isinstance(q, float) and 0.5 <= q < 1:
        raise ValueError(
            f"q={q:g} is a percentile, from 0 to 100, not a fraction: use q={100 * q:g}. If you do want the "
            f"percentile {q:g}, give the method itself, rectgrad.RectGrad(q={q:g})"
        )
    return found


def attribute(
    model: Model,
    inputs: Inputs,
    method: str | Method = "rectgrad",
    target: Target = None,
    *,
    forward_args: Args = (),
    forward_kwargs: Kwargs | None = None,
    batch_size: int | None = None,
    **options: OptionValue,
) -> Inputs:
    """The attribution of a model's score to its inputs: a tensor of their shape (a tuple for a tuple).

    method: a name in METHODS, with its options as keywords, or an instance. target: the class to explain, an
    int or one for each sample; None for each sample's largest output; or a callable from the model's output
    to (N,) scores. forward_args, forward_kwargs: further arguments of the model; those with one row for each
    sample are split with the inputs. batch_size: explain this many samples at a time.

        maps = rectgrad.attribute(model, images, "rectgrad", target=281, q=95)
    """
    method = chosen(method, options)
    request = _request(model, inputs, target, forward_args, forward_kwargs)
    size = _chunk(batch_size, request.n)

    def maps() -> Maps:
        _check_model(request, method)
        if request.n == 0:
            return tuple(torch.zeros_like(x) for x in request.inputs)
        return _joined(_parts(request, method, size))

    return _given_back(preserved(request, maps), isinstance(inputs, tuple))


class Record(Generic[Inputs]):
    """One forward pass, kept: `outputs`, and `attribute` for any method and target."""

    def __init__(self, request: Request, as_tuple: bool, only: Method | None = None) -> None:
        """only: the single method that will be asked for, so that the pass keeps what that one needs."""
        self._only = only
        passed = self._recorded(request)
        self.outputs = map_tensors(lambda x: x.detach().clone(), passed.outputs)
        self._request, self._as_tuple = request, as_tuple
        request.passed, self._trace = passed, passed.trace
        self._parts = [request]
        if (only is None or only.per_sample) and mixes_samples(request, passed):
            self._parts = [request.rows(i, i + 1) for i in range(request.n)]
            for part in self._parts:
                part.passed = self._recorded(part)

    def _recorded(self, request: Request) -> Pass:
        if self._only is None:
            return request.recording(None)
        one_pass = self._only.one_backward and self._only.runs_model
        return request.recording(self._only if one_pass else Plan(), named=True)

    def __repr__(self) -> str:
        given, said = (_shapes(x) for x in (self._request.inputs, self.outputs))
        name = getattr(self._request.model, "__name__", type(self._request.model).__name__)
        device = self._request.inputs[0].device
        return f"Record({name}, inputs {given}, outputs {said}, {len(self._trace.rows)} ops, {device})"

    @property
    def trace(self) -> Trace:
        """The ops of the last pass and the rule each one used; prints as a table."""
        return self._trace

    def attribute(
        self, method: str | Method = "rectgrad", target: Target = None, **options: OptionValue
    ) -> Inputs:
        """As `rectgrad.attribute`, without running the model again if the method needs one pass only."""
        asked = chosen(method, options)
        assert self._only is None or asked == self._only
        whole = replace(self._request, target=target)

        def maps() -> Maps:
            _refuse(whole, asked)
            if whole.n == 0:
                return tuple(torch.zeros_like(x) for x in whole.inputs)
            found, accounts = zip(*[self._part(part, whole, asked) for part in self._parts], strict=True)
            self._trace.conservation = Conservation.joined(accounts)
            return _joined(list(found))

        return _given_back(preserved(whole, maps), self._as_tuple)

    def _part(self, part: Request, whole: Request, method: Method) -> tuple[Maps, Conservation | None]:
        start, stop = part.offset, part.offset + part.n
        target = changed(whole.target, whole.n, lambda index: index[start:stop])
        asked = replace(part, target=target, region=whole.region)
        self._trace.conservation = self._trace.completeness_error = None  # of an earlier method
        maps = method.rows(start, stop, whole.inputs).maps(asked)
        self._trace = asked.trace or self._trace
        return maps, self._trace.conservation


def _shapes(values: Any) -> str:
    """The shapes of the tensors in a value, as readable text."""
    shapes = [" × ".join(map(str, x.shape)) or "scalar" for x in tensors_in(values)]
    return ", ".join(shapes) or type(values).__name__


def record(
    model: Model, inputs: Inputs, *, forward_args: Args = (), forward_kwargs: Kwargs | None = None
) -> Record[Inputs]:
    """Run the model once and keep the pass, for many methods or classes.

    Its memory is held as long as the record is.

        kept = rectgrad.record(model, images)
        kept.attribute("rectgrad", target=281), kept.attribute("guided_backprop", target=285)
    """
    return _kept(_request(model, inputs, None, forward_args, forward_kwargs), isinstance(inputs, tuple))


def record_for(model: Model, inputs: Tensor, method: Method) -> Record[Tensor]:
    """`record` for one known method: it costs no more than `attribute`, and further classes one backward pass
    each. Its maps are those of `attribute` to the last bit."""
    return _kept(_request(model, inputs, None, (), None), as_tuple=False, only=method)


def _kept(request: Request, as_tuple: bool, only: Method | None = None) -> Record[Any]:
    request.inputs = tuple(x.detach().clone() for x in request.inputs)  # the caller may modify theirs

    def kept() -> Record[Any]:
        if only is not None:
            _refuse(request, only)
        _warn_training(request)
        found = Record[Any](request, as_tuple, only)
        warn_probabilities(getattr(found.outputs, "logits", found.outputs))
        return found

    return preserved(request, kept)


def capture(
    model: Model,
    example: Inputs,
    method: str | Method = "rectgrad",
    *,
    target: Target = None,
    forward_args: Args = (),
    forward_kwargs: Kwargs | None = None,
    **options: OptionValue,
) -> Capture[Inputs]:
    """Prepare a model for many calls with inputs of the example's shape, type and device.

    On CUDA the forward and the backward pass become one CUDA graph, and the model's Python does not run
    again. On the CPU it is an ordinary call behind the same checks. In-place updates of weights take effect;
    a replaced weight, a changed training flag or another shape raises `StaleCaptureError`. Further arguments,
    and a `contrast` or callable target, are fixed at capture.

        explain = rectgrad.capture(model, images)
        maps = explain(images), explain(others, target=281)
    """
    asked = chosen(method, options)
    request = _request(model, example, target, forward_args, forward_kwargs)

    def ordinary(inputs: Any, own: Any, method: Method = asked) -> Any:
        return attribute(model, inputs, method, own, forward_args=forward_args, forward_kwargs=forward_kwargs)

    def made() -> Capture:
        _check_model(request, asked)
        return Capture(request, asked, ordinary)

    captured = preserved(request, made)
    captured.check_replays()
    return captured


def layer_attributions(
    model: Model,
    inputs: Tensor | tuple[Tensor, ...],
    method: str | Method = "rectgrad",
    target: Target = None,
    *,
    forward_args: Args = (),
    forward_kwargs: Kwargs | None = None,
    **options: OptionValue,
) -> list[tuple[str, Tensor]]:
    """For every rectified activation, from the output to the input: (layer, a * R averaged over channels).

    R is the gradient as it arrives, before the rule. No positive part is taken.
    """
    method = chosen(method, options)
    if not method.one_backward:
        raise ValueError(f"{type(method).__name__} has no single backward pass; choose a method that has one")
    request = _request(model, inputs, target, forward_args, forward_kwargs)

    def layers() -> list[list[tuple[str, Tensor]]]:
        _check_model(request, method)
        parts = [request]
        if request.mixes(method):
            parts = [request.rows(i, i + 1) for i in range(request.n)]
        return [_layers(part, method.rows(i, i + part.n, request.inputs)) for i, part in enumerate(parts)]

    found = preserved(request, layers)
    kinds = {tuple((name, value.shape[1:]) for name, value in pairs) for pairs in found}
    if len(kinds) > 1:
        raise ValueError("the samples take different paths through the model; pass one sample at a time")
    return [(pairs[0][0], torch.cat([value for _, value in pairs])) for pairs in zip(*found, strict=True)]


def _layers(request: Request, method: Method) -> list[tuple[str, Tensor]]:
    seen: list[tuple[Op, Tensor]] = []
    n = request.n

    def observe(op: Op, R: Tensor) -> None:
        if op.family in ops.RECTIFIERS and not op.facts.gate:
            # Channels are dimension 1 of what a convolution made, the last one of what a linear layer made.
            dim = -1 if op.facts.channels_last else min(1, R.dim() - 1)
            product = (op.output * R).mean(dim)
            seen.append((op, product if product.shape[:1] == (n,) else product.unsqueeze(0)))

    request.observe = observe
    method.raw(request)
    assert request.trace is not None
    layers = request.trace.layers_of_ops()
    return [(layers[id(op)], value) for op, value in seen]


@contextlib.contextmanager
def propagate(rules: Rules) -> Iterator[Trace]:
    """Run a model with your own backward rules.

    `rules` maps an op family to a function `(op, R) -> gradient` (one, or a tuple with one for each of
    `op.inputs`). Inside the context, calls that depend on a tensor requiring a gradient are recorded; the
    rules act in every backward pass through them, inside the context or after it. Parameters get no
    gradient. Yields the trace; printed, it is a table of the ops and the rule that each one used.

        with rectgrad.propagate({"relu": lambda op, R: R.clamp(min=0)}) as trace:
            model(x)[0, 281].backward()
        print(trace)
    """
    _check_rules(rules)
    recorder = BridgeRecorder(families=frozenset(rules))
    recorder.state.rules = as_rules(rules)
    with recorder:
        yield recorder.trace
    if rules and not any(row.op and row.family in rules for row in recorder.trace.rows):
        met = ", ".join(sorted({row.family or row.name for row in recorder.trace.rows})) or "nothing"
        warnings.warn(f"no rule will act: the model has no {' or '.join(rules)}, only {met}", stacklevel=3)


def _check_rules(rules: Any) -> None:
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules must map op families to functions (op, R), not {rules!r}")
    known = (set(ops.FAMILIES) - {"clamp"}) | ops.RECTIFIERS
    for family, rule in rules.items():
        if family not in known:
            raise ValueError(f"unknown op family {family!r}; families are {', '.join(sorted(known))}")
        if not callable(rule):
            raise TypeError(f"the rule for {family!r} must be a function (op, R), not {rule!r}")


def unwrap(model: Any) -> tuple[Any, torch.device | None]:
    """The module inside a wrapper such as DataParallel, and the device to which the wrapper sends inputs."""
    if not callable(model):
        if isinstance(getattr(model, "module", None), nn.Module):
            raise TypeError(
                f"model must be a module, not {type(model).__name__}; give the module that it holds, "
                "model.module, or call rectgrad.explain(picture, model)"
            )
        raise TypeError(f"model must be a module or a function of the inputs, not {model!r}")
    device = None
    while True:
        if isinstance(model, nn.DataParallel):
            device = model.src_device_obj if model.device_ids else None
            model = model.module
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif (inner := inner_model(model)) is not None:  # torch.compile's wrapper
            model = inner
        else:
            return model, device


def _request(model: Any, inputs: Any, target: Any, args: Args, kwargs: Kwargs | None) -> Request:
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    if not tensors:
        raise ValueError("inputs is an empty tuple; give at least one tensor (N, ...)")
    for x in tensors:
        checks.check_input(x, tensors[0])
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"forward_args must be a tuple of further arguments, not {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"forward_kwargs must be a dict of further arguments, not {type(kwargs).__name__}")
    inner, device = unwrap(model)
    if isinstance(target, Tensor):  # reading the classes from a device would wait for it
        target = target.cpu()
    return Request(inner, tensors, tuple(args), dict(kwargs or {}), target, device=device)


def _chunk(batch_size: Any, n: int) -> int:
    if batch_size is None:
        return max(n, 1)
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size.__index__() < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
    return batch_size.__index__()


def _parts(request: Request, method: Method, size: int) -> list[Maps]:
    """Explains `size` samples at a time, and half as many if memory runs out."""
    parts: list[Maps] = []
    start, wanted = 0, size
    while start < request.n:
        found = _part_or_none(request, method, start, size)
        if found is None:
            size = -(-min(size, request.n - start) // 2)
        else:
            parts.append(found)
            start += size
    if size < wanted:
        warn(
            f"not enough memory for {min(wanted, request.n)} samples at once, so {size} were explained at a "
            f"time; pass batch_size={size} to start with that"
        )
    return parts


def _part_or_none(request: Request, method: Method, start: int, size: int) -> Maps | None:
    """None if memory ran out and fewer samples may fit."""
    try:
        return _part(request, method, start, size)
    except Exception as error:
        if not out_of_memory(error) or min(size, request.n - start) == 1:
            raise
        if request.region is not None and request.region.trains:
            warn("in training mode, a batch is not split automatically; pass batch_size=N to split it")
            raise
    if request.region is not None:
        request.region.restore()
    free_unused_memory()
    return None


def _part(request: Request, method: Method, start: int, size: int) -> Maps:
    stop = min(start + size, request.n)
    asked, own = request, method
    if size < request.n:
        asked, own = request.rows(start, stop), method.rows(start, stop, request.inputs)
    maps = own.maps(asked)
    if start == 0 and isinstance(asked.target, Picked):
        warn_probabilities(asked.answer)
    return maps


def _joined(parts: list[Maps]) -> Maps:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(maps) for maps in zip(*parts, strict=True))


def _given_back(maps: Maps, as_tuple: bool) -> Any:
    return maps if as_tuple else maps[0]


def preserved(request: Request, work: Callable[[], T]) -> T:
    """`work()`, after which the model, the caller's arguments, torch's modes and the random state are as
    before, also after an error.

    An interrupt may arrive at any instruction, also in the cleanup: so that runs twice, and can.
    """
    device = request.inputs[0].device
    region = Region(request.model, request.target, (request.args, request.kwargs), device)
    modes, enabled, hooks = active_function_modes(), torch.is_grad_enabled(), saved_tensor_hooks()
    ours = [mode for mode in modes if isinstance(mode, (Recorder, BridgeRecorder))]
    outer = [mode for mode in ours if not mode.suspended]
    try:
        try:
            for mode in outer:
                mode.suspended = True  # a call inside another one's forward pass is not a part of that pass
            region.open()
            request.region = region
            with no_inference_mode():
                return work()
        except BaseException as error:
            if interrupted(error):
                # Contexts that the interrupt left half open close now, not when the traceback is freed.
                traceback.clear_frames(error.__traceback__)
                if not isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt from error
            elif type(error).__module__.startswith(COMPILER):
                hides = "contains a part compiled by torch.compile, whose inside cannot be seen"
                raise UnsupportedModelError(f"the model {hides}; use the original Python code") from error
            elif sentence := _lacks_samples(request, error):
                raise ValueError(sentence) from error
            raise
        finally:
            _clean_up(region, modes, enabled, hooks, outer)
    finally:
        _clean_up(region, modes, enabled, hooks, outer)


def _lacks_samples(request: Request, error: BaseException) -> str | None:
    fails = isinstance(error, (RuntimeError, ValueError, IndexError)) and request.passed is None
    known = isinstance(error, UnsupportedModelError) or out_of_memory(error)
    return checks.lacks_samples(request.model, request.inputs, error) if fails and not known else None


def _clean_up(region: Region, modes: list[Any], enabled: bool, hooks: Any, outer: list[Any]) -> None:
    restore_function_modes(modes)
    remove_tensor_hooks(until=hooks)
    if torch.is_grad_enabled() is not enabled:
        set_grad_enabled(enabled)
    region.close()
    for mode in outer:
        mode.suspended = False


def _check_model(request: Request, method: Method) -> None:
    if method.runs_model:
        _refuse(request, method)
        _warn_training(request)


def _refuse(request: Request, method: Method) -> None:
    """Rules cannot reach into scripted or quantised modules, and a lazy module has no weights."""
    has_rules, region = method.uses_rules, request.region
    assert region is not None
    strange = any(checks.strange(kind, has_rules) for kind in set(map(type, region.modules)))
    if not region.lazy and not strange:
        return
    root = request.model if isinstance(request.model, nn.Module) else None
    for module in root.modules() if root is not None else region.modules:
        if sentence := checks.unsupported_module(module, has_rules):
            name = module_names(root).get(id(module)) or type(module).__name__
            what = f"{type(method).__name__} cannot explain this model"
            raise UnsupportedModelError(f"{what}: {name!r} is {sentence}")


def _warn_training(request: Request) -> None:
    assert request.region is not None
    if request.region.trains:
        warn("the model is in training mode (random dropout, batch statistics); call model.eval() first")


def warn_probabilities(outputs: object) -> None:
    if checks.are_probabilities(outputs):
        warn(
            "the model ends in a softmax, whose gradient vanishes where the network is certain. Explain the "
            "scores before the softmax instead: pass the model without its last layer, such as model[:-1]"
        )
