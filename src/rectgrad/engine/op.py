"""One recorded op, which is what a rule is given, and the rule itself.

There is no global state. What a rule needs is stored in the op, because one recorded forward pass may serve
several methods, and an autograd backward pass may run in another thread.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rectgrad import ops
from rectgrad.engine.facts import NO_FACTS, Facts
from rectgrad.engine.torch_private import autocast_active, namespaces, overload_types, version
from rectgrad.kernels import Backend, backend_of
from rectgrad.kernels.linear_ops import LinearOp, outside_zeroed
from rectgrad.kernels.reference import wide as wide
from rectgrad.kernels.sparse import Sparse, dense
from rectgrad.ops.arguments import NESTED, Slot, fill
from rectgrad.ops.windows import Region

TABLE = ops.Table(namespaces(), overload_types())


class UnsupportedModelError(RuntimeError):
    """The model has a part that rules cannot reach, so that its map would silently be the plain gradient."""


@dataclass(frozen=True)
class Rule:
    """What replaces the ordinary gradient of an op.

    apply: a pure function (op, R) -> the gradient of each of `op.inputs` (one tensor, or a tuple). reads:
    what is kept of the op: "all", "inputs", "output" or "shapes". concerns: the ops of the family that it
    applies to (None: all). takes_sparse: R may be a `Sparse`. checks: it reports non-finite gradients itself.
    advice: (op, R, sample) -> what to change if the rule passed nothing of a sample's R.
    """

    apply: Callable[[Op, Any], Any]
    name: str
    reads: str = "all"
    concerns: Callable[[Op], bool] | None = None
    takes_sparse: bool = False
    checks: bool = False
    advice: Callable[[Op, Tensor, int], str | None] | None = None

    def __call__(self, op: Op, R: Any) -> Any:
        return self.apply(op, R)


Rules = Mapping[str, Rule]


def as_rules(rules: Mapping[str, Any], without: str = "") -> Rules:
    """The rules, with plain functions (op, R) as rules that may read everything."""
    return {
        family: rule if isinstance(rule, Rule) else Rule(rule, getattr(rule, "__name__", type(rule).__name__))
        for family, rule in rules.items()
        if family != without
    }


class State:
    """What the ops of a backward pass share: its rules, and what was observed."""

    def __init__(self) -> None:
        self.rules: Rules = {}
        self.batch: int | None = None  # N, if known
        self.observe: Callable[[Op, Tensor], None] | None = None  # sees R before the rule
        # Sums of every R that a rule received, to check once at the end of the pass that all were finite.
        self.sums: list[Tensor | float] = []
        self.ran: set[str] = set()  # families whose rule ran
        self.once = False  # recorded values may be released after their use
        self.backend: Backend | None = None  # of the device that the pass runs on
        self.absorbed: list[tuple[float, float]] | None = None  # LRP: by biases and stabilisers, if asked

    def report(self, R: Tensor | None) -> None:
        """Keep the sum of R, to check at the end of the pass whether R was finite."""
        if R is not None:
            self.sums.append(R.sum(dtype=torch.float32 if R.element_size() < 4 else None))


class Op:
    """A call in the forward pass that depends on the input: its data tensors, its output, its arguments.

    `inputs` are the tensors that depend on the network's input, in the order of the call; parameters and
    constants are arguments. `sources` are the ops that made the inputs, where they are recorded too.
    """

    inputs: tuple[Tensor, ...] = ()
    data_count = 1  # of `inputs`, also if they are not kept
    sources: tuple[Op, ...] = ()
    index = 0  # its position in the recorder's list
    modules: tuple[Any, ...] = ()  # whose methods called the op, the innermost first
    rule = "plain"  # name of the rule that ran here last
    path: str | None = None  # how the gradient of a linear op was computed last: sparse or dense
    reference: Op | None = None  # the same op in the baseline's pass (DeepLIFT)
    result_type: Any = Tensor  # a named tuple, for some reductions
    part = 0  # which of the call's results this op made
    shape: tuple[int, ...] = ()  # of the output
    input_shapes: tuple[tuple[int, ...], ...] = ()
    facts: Facts = NO_FACTS  # about the op's surroundings, filled in before a backward pass
    # The ordinary gradient: a linear op, a closed form of R and the tensors `needed`, or a graph of its own.
    linear: LinearOp | None = None
    back: Callable[..., tuple[Any, ...]] | None = None
    needed: tuple[Tensor, ...] = ()
    passes_sparse = False  # the closed form takes a `Sparse` too
    version = 0  # of the result when it was made
    versions: tuple[int, ...] = ()  # of the tensors kept
    _output: Tensor | None = None
    _local: Tensor | None = None
    _leaves: tuple[Tensor, ...] = ()

    def __init__(self, spec: ops.Spec, family: str, args: tuple, kwargs: dict, state: State) -> None:
        self.spec, self.family, self.name = spec, family, spec.name
        self.args, self.kwargs, self.state = args, kwargs, state

    @property
    def output(self) -> Tensor:
        assert self._output is not None or self.inputs
        return self.result(*self.inputs) if self._output is None else self._output

    @property
    def backend(self) -> Backend:
        """The backend for this op's output."""
        return self.state.backend or backend_of(self.output)

    @property
    def batch(self) -> int:
        """Number of samples in the output. If the pass has one sample, all of the output belongs to it."""
        return 1 if self.state.batch == 1 or not self.shape else self.shape[0]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by name, however it was passed; data tensors as recorded, or their shapes alone."""
        value = self.spec.argument(name, self.args, self.kwargs)
        if value is None or type(value) not in NESTED:
            return default if value is None else value
        return fill(value, self.inputs or [torch.empty(s, device="meta") for s in self.input_shapes])

    def call(self, *inputs: Tensor) -> Any:
        """Run the op on other data tensors."""
        if len(inputs) == 1 and self.args and type(self.args[0]) is Slot:  # nearly always
            return self.spec.func(inputs[0], *self.args[1:], **self.kwargs)
        named = {k: fill(v, inputs) for k, v in self.kwargs.items()} if self.kwargs else {}
        return self.spec.func(*fill(self.args, inputs), **named)

    def result(self, *inputs: Tensor) -> Tensor:
        """What the op made, on other data tensors: a call may return several tensors."""
        result = self.call(*inputs)
        return result[self.part] if isinstance(result, (tuple, list)) else result

    def of_part(self, part: int) -> Op:
        """The same call as the op that made another of its results."""
        op = copy.copy(self)
        op.part = part
        return op

    def vjp(self, R: Any, within: Region | None = None) -> tuple[Any, ...]:
        """The ordinary gradients of `inputs`, as autograd computes them. R is taken as 0 outside `within`."""
        if self.linear is not None:
            grad, self.path = self.linear.gradient(R, within)
            return (grad,)
        if self.passes_sparse and self.back is not None:
            return self.back(R)
        R = outside_zeroed(dense(R), within)
        if self.back is not None:
            return self.back(R, *self.needed)
        if self._local is None:
            return self.vjp_at(self.inputs, R)
        return torch.autograd.grad(self._local, self._leaves, R, retain_graph=True, allow_unused=True)

    def vjp_at(self, points: Sequence[Tensor], R: Tensor) -> tuple[Any, ...]:
        """The ordinary gradient at other data tensors than the recorded ones."""
        with torch.enable_grad():
            leaves = [point.detach().requires_grad_() for point in points]
            output = self.result(*leaves)
        return torch.autograd.grad(output, leaves, R, allow_unused=True)

    def backward(self, R: Any) -> tuple[Any, ...]:
        """The gradients of the inputs, by the rule for this family or the ordinary gradient."""
        state = self.state
        rule = state.rules.get(self.family)
        if rule is not None and (self.facts.gate or (rule.concerns is not None and not rule.concerns(self))):
            rule = None
        if rule is None:
            self.rule = "plain"
            if self.family in ops.RECTIFIERS:
                state.report(dense(R))  # the zeros of its gradient may hide an infinity
            return self.relu6_gradient(dense(R)) if self.facts.gate else self.vjp(R)
        if not rule.takes_sparse:
            R = dense(R)
        if not rule.checks:
            state.report(R)
        state.ran.add(self.family)
        self.rule = rule.name
        result = rule.apply(self, R)
        grads = result if isinstance(result, tuple) else (result,)
        if len(grads) != 1 or getattr(grads[0], "shape", None) != self.input_shapes[0]:
            self._check(grads)
        return grads

    def relu6_gradient(self, R: Tensor) -> tuple[Tensor]:
        """The ordinary gradient of a ReLU6, from its output: its input may not have been kept."""
        ceiling = self.argument("max_val", self.argument("max", 6.0))
        return (torch.where((self.output > 0) & (self.output < ceiling), R, 0),)

    def held(self) -> tuple[Tensor, ...]:
        """The data tensors that must not be modified."""
        output = () if self._output is None else (self._output,)
        return (*self.inputs, *self.needed, *output)

    def note_versions(self) -> None:
        self.versions = tuple(map(version, self.held()))

    def overwritten(self) -> bool:
        """Whether a kept tensor was modified."""
        return self.versions != tuple(map(version, self.held()))

    def release(self) -> None:
        """Frees the tensors that were kept."""
        self.inputs = self.needed = self.versions = self._leaves = ()
        self._output = self._local = self.reference = None

    def _check(self, grads: tuple) -> None:
        """Report gradients of wrong shapes where the rule returns them, not later in autograd."""
        shapes = [tuple(g.shape) if isinstance(g, (Tensor, Sparse)) else g for g in grads]
        wanted = [tuple(shape) for shape in self.input_shapes]
        alike = all(shape in (None, wish) for shape, wish in zip(shapes, wanted, strict=False))
        if not alike or len(grads) != self.data_count or not any(g is not None for g in grads):
            where = f"{self.name} in {type(self.modules[0]).__name__}" if self.modules else self.name
            raise ValueError(f"the rule {self.rule!r} returned {shapes} for inputs {wanted} of {where}")


def storage_id(x: Tensor) -> int:
    """The address of a tensor's storage, computed without creating a storage object."""
    if x.layout is not torch.strided:
        return id(x)
    try:
        return x.data_ptr() - x.storage_offset() * x.element_size()  # type: ignore[return-value]
    except RuntimeError:  # a wrapper of a torch.func transform has no storage
        return id(x)


def no_autocast(device: str) -> Any:
    """A context without autocast: rules compute in the types of their arguments."""
    if not autocast_active() or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
