"""One recorded op: what a rule is given. And the bridge that puts a rule into autograd's backward pass.

Nothing here is global: what a rule needs travels with the op, because a backward pass may run in another
thread and one recorded forward pass may serve several methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rectgrad import kernels, ops
from rectgrad.kernels.linear_ops import Step, outside_zeroed
from rectgrad.ops.windows import Region

Rule = Callable[["Op", Tensor], Any]
Rules = Mapping[str, Rule]

# Families worth a graph of their own: their gradient should not pay for the forward computation twice.
_HEAVY = frozenset("conv conv_transpose linear matmul max_pool batch_norm norm avg_pool pad sum".split())


class Slot(int):
    """Where the i-th data tensor stands among a call's arguments."""


def fill(value: Any, data: Sequence[Tensor]) -> Any:
    """`value` with the data tensors back in their slots."""
    kind = type(value)
    if kind is Slot:
        return data[value]
    if kind is tuple or kind is list:
        return kind([fill(v, data) if type(v) in _FILLED else v for v in value])
    return value


_FILLED = (Slot, tuple, list)


def unshared(value: Any, storage: int) -> Any:
    """`value` with copies of the tensors that lie in a storage."""
    if type(value) in (list, tuple):
        return type(value)(unshared(v, storage) for v in value)
    return value.clone() if isinstance(value, Tensor) and storage_of(value) == storage else value


class Current:
    """What one backward pass shares with the ops it meets: the rules in force, and what was observed."""

    def __init__(self) -> None:
        self.rules: Rules = {}
        self.batch: int | None = None  # N, where the engine knows it
        self.observe: Callable[[Op, Tensor], None] | None = None  # sees R before the rule
        # Of every R that met a rule a sum, not finite if the R is not: one check at the end.
        self.sums: list[Tensor | float] = []
        self.ran: set[str] = set()  # families whose rule ran
        self.carries = False  # what passed an activation may travel as lists: see kernels/survivors.py
        self.once = False  # the recorded values may go as soon as they were used

    def look(self, R: Tensor | None) -> None:
        """Remember enough of R to know at the end of the pass whether it was finite."""
        if R is not None:
            self.sums.append(R.sum(dtype=torch.float32 if R.element_size() < 4 else None))


class Keep(NamedTuple):
    """What is kept of a call for the rule of its family, and which calls it concerns (None: all)."""

    inputs: bool = True
    output: bool = True
    concerns: Callable[[Op], bool] | None = None


class Op:
    """A call in the forward pass that depends on the input: its data tensors, its output, its arguments.

    `inputs` are the tensors that depend on the network's input, in the order of the call; parameters and
    constants are arguments. `sources` are the ops that made the inputs, where they are recorded too.
    """

    inputs: tuple[Tensor, ...] = ()
    data_count = 1  # of `inputs`, also where they are not kept
    sources: tuple[Op | None, ...] = ()
    module: Any = None
    rule = "plain"  # name of the rule that ran here last
    reference: Op | None = None  # the same op in the baseline's pass (DeepLIFT)
    result_type: Any = Tensor  # a named tuple, of some reductions
    shape: tuple[int, ...] = ()  # of the output
    input_shapes: tuple[tuple[int, ...], ...] = ()
    step: Step | None = None  # a linear step, whose gradient needs no graph
    path: str | None = None  # how the gradient of a linear step was computed last: sparse or dense
    # The plain gradient from R and what is `needed`, where it has a closed form.
    back: Callable[..., tuple[Tensor, ...]] | None = None
    # In a linked pass (see linked.py): how many ops read the result, what has arrived at it so far, and the
    # versions of what is kept.
    readers = 0
    R: Tensor | None = None
    versions: tuple[int, ...] = ()
    needed: tuple[Tensor, ...] = ()  # by `back`
    _output: Tensor | None = None
    _local: Tensor | None = None
    _leaves: tuple[Tensor, ...] = ()

    def __init__(self, spec: ops.Spec, family: str, args: tuple, kwargs: dict, current: Current) -> None:
        self.spec, self.family, self.name = spec, family, spec.name
        self.args, self.kwargs = args, kwargs
        self.current = current
        self.facts: dict[str, Any] = {}  # what the graph around the op says: see graph.py

    @property
    def output(self) -> Tensor:
        assert self._output is not None
        return self._output

    @property
    def batch(self) -> int:
        """Number of samples in the output: all of it is one sample's where the engine runs just one."""
        return 1 if self.current.batch == 1 or not self.shape else self.shape[0]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by name, however it was passed; data tensors as recorded."""
        value = self.spec.argument(name, self.args, self.kwargs)
        if value is None:
            return default
        return fill(value, self.inputs) if type(value) in _FILLED else value

    def call(self, *inputs: Tensor) -> Any:
        """The op again, on other data tensors."""
        if len(inputs) == 1 and self.args and type(self.args[0]) is Slot:  # nearly always
            return self.spec.func(inputs[0], *self.args[1:], **self.kwargs)
        named = {k: fill(v, inputs) for k, v in self.kwargs.items()} if self.kwargs else {}
        return self.spec.func(*fill(self.args, inputs), **named)

    def vjp(self, R: Tensor, within: Region | None = None) -> tuple[Any, ...]:
        """The plain gradient: what autograd would pass to each of `inputs`. R counts `within` a region."""
        if self.step is not None:
            return (self._linear(self.step, R, within),)
        R = outside_zeroed(R, within)
        if self.back is not None:
            return self.back(R, *self.needed)
        if self._local is None:
            return self.vjp_at(self.inputs, R)
        return torch.autograd.grad(self._local, self._leaves, R, retain_graph=True, allow_unused=True)

    def _linear(self, step: Step, R: Tensor, within: Region | None) -> Tensor:
        passed = kernels.survivors_of(R) if step.takes_lists else None
        grad = step.from_lists(passed, R, within) if passed is not None else None
        self.path = step.paths[grad is not None]
        if grad is not None:
            return grad
        R = kernels.dense(R)
        return step.gradient(R if within is None else outside_zeroed(R, within))

    def vjp_at(self, points: Sequence[Tensor], R: Tensor) -> tuple[Any, ...]:
        """The plain gradient at other data tensors than the recorded ones."""
        with torch.enable_grad():
            leaves = [point.detach().requires_grad_() for point in points]
            output = first(self.call(*leaves))
        return torch.autograd.grad(output, leaves, R, allow_unused=True)

    def _of_relu6(self, R: Tensor) -> Tensor:
        """The plain gradient of a ReLU6, from its output: its input may not have been kept."""
        ceiling = self.argument("max_val", self.argument("max", 6.0))
        return torch.where((self.output > 0) & (self.output < ceiling), R, 0)

    def run(self, data: Sequence[Tensor], keep: Keep) -> Any:
        """Run the op and remember what its rule may ask for. Gradients are off."""
        self.input_shapes = tuple([x.shape for x in data])
        if self.family in _HEAVY:
            self._leaves = tuple([x.detach().requires_grad_() for x in data])
            with torch.enable_grad():
                result = self.call(*self._leaves)
            self._local = first(result)
        else:
            result = self.call(*data)
        self._remember(result)
        if keep.output:
            self._output = first(result).detach()
        if keep.inputs:
            self.inputs = tuple([x.detach() for x in data])
        fresh = self._local is None and type(result) is Tensor and not any(result is x for x in data)
        return result if fresh and not result._is_view() else _detached(result)

    def run_step(self, step: Step, keep: Keep, x: Tensor) -> Tensor:
        """Run a linear step of x, the first argument. Gradients are off."""
        y: Tensor = self.spec.func(x, *self.args[1:], **self.kwargs)
        self.input_shapes, self.shape, self.step = (x.shape,), y.shape, step
        if self.current.carries:
            step.made(self, y)
        if keep.output:
            self._output = y.detach()
        if keep.inputs:
            self.inputs = (x.detach(),)
        return y.detach() if y._is_view() else y

    def run_in_place(self, x: Tensor, func: Callable[[], Any]) -> None:
        """Run an op that overwrites its one data tensor, whose rule asks for the output alone."""
        self.input_shapes = (x.shape,)
        func()
        self._remember(x)
        self._output = x.detach()

    def _remember(self, result: Any) -> None:
        self.shape, self.result_type = first(result).shape, type(result)

    def held(self) -> Iterator[Tensor]:
        """The data tensors that the record needs as they are."""
        yield from self.inputs
        yield from self.needed
        if self._output is not None:
            yield self._output

    def unshare(self, storage: int) -> None:
        """Keep copies of what lies in a storage that is about to be written."""
        self.inputs = unshared(self.inputs, storage)
        self._output = unshared(self._output, storage)
        self.args = unshared(self.args, storage)
        self.kwargs = {k: unshared(v, storage) for k, v in self.kwargs.items()}
        if self.step is not None:
            self.step.unshare(storage)

    def forget(self) -> None:
        """Let go what was kept of the data."""
        self.inputs, self.needed, self._output, self.versions = (), (), None, ()

    def release(self) -> None:
        self.forget()
        self._local, self._leaves, self.step, self.back = None, (), None, None

    def backward(self, R: Tensor) -> tuple[Tensor | None, ...]:
        """R by the rule in force for this family, or by the plain gradient."""
        current = self.current
        rule = None if self.facts.get("gate") else current.rules.get(self.family)
        if self.step is None:
            R = kernels.dense(R)
            if not getattr(rule, "looks", False):
                current.look(R)  # what is not finite goes through a linear step and is seen after it
        if current.observe is not None:
            current.observe(self, R)
        if rule is None:
            self.rule = "plain"
            return (self._of_relu6(R),) if self.facts.get("gate") else self.vjp(R)
        current.ran.add(self.family)
        self.rule = getattr(rule, "__name__", None) or type(rule).__name__
        result = rule(self, R)
        grads = result if isinstance(result, tuple) else (result,)
        if len(grads) != 1 or getattr(grads[0], "shape", None) != self.input_shapes[0]:
            self._check(grads)
        return grads

    def _check(self, grads: tuple) -> None:
        """A rule's mistake is said at the rule, not somewhere in autograd."""
        shapes = [tuple(g.shape) if isinstance(g, Tensor) else g for g in grads]
        wanted = [tuple(shape) for shape in self.input_shapes]
        right = len(grads) == self.data_count and any(isinstance(g, Tensor) for g in grads)
        for shape, wish in zip(shapes, wanted, strict=False):
            right = right and (shape is None or wish is None or shape == wish)
        if not right:
            where = f"{self.name} in {type(self.module).__name__}" if self.module is not None else self.name
            raise ValueError(f"the rule {self.rule!r} returned {shapes} for inputs {wanted} of {where}")


def _detached(result: Any) -> Any:
    """A tensor that autograd can make its own: not one of a local graph, nor a view, nor the input itself."""
    return tuple(r.detach() for r in result) if isinstance(result, (tuple, list)) else result.detach()


def first(result: Any) -> Tensor:
    """The differentiable part of a result: pooling may return indices too."""
    return result[0] if isinstance(result, (tuple, list)) else result


def wide(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.float() if x.element_size() < 4 else x


def per_sample(x: Tensor) -> Tensor:
    """x with one row for each sample."""
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


class Bridge(torch.autograd.Function):
    """An op whose backward step is the rule in force when the backward pass runs."""

    @staticmethod
    def forward(ctx: Any, op: Op, keep: Keep, *data: Tensor) -> Any:
        ctx.op = op
        ctx.set_materialize_grads(False)
        result = op.run(data, keep)
        if isinstance(result, tuple):
            ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, R: Tensor | None, *_: Any) -> Any:
        if torch.is_grad_enabled():  # somebody asks for second derivatives
            return _once(ctx, R)
        return _backward(ctx, R)


def _backward(ctx: Any, R: Tensor | None) -> Any:
    op: Op = ctx.op
    if R is None:
        return (None,) * len(ctx.needs_input_grad)
    with torch._C.DisableTorchFunction(), no_autocast(R.device.type):
        grads = op.backward(R)
        if op.current.once:
            op.release()
    return (*(None,) * (len(ctx.needs_input_grad) - op.data_count), *grads)


_once = once_differentiable(_backward)


def bridged(bridge: Any, *args: Any) -> Any:
    """bridge.apply(*args), without the detour for functional transforms where none is active."""
    if torch._C._are_functorch_transforms_active():
        return bridge.apply(*args)
    return super(torch.autograd.Function, bridge).apply(*args)


class BridgeInPlace(Bridge):
    """The same for an op that overwrites its one data tensor."""

    @staticmethod
    def forward(ctx: Any, op: Op, func: Any, x: Tensor) -> Any:  # type: ignore[override]
        ctx.op = op
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        op.run_in_place(x, func)
        return x


class BridgeStep(Bridge):
    """The same for a linear step, which keeps nothing but its weights."""

    @staticmethod
    def forward(ctx: Any, op: Op, step: Step, keep: Keep, x: Tensor) -> Any:  # type: ignore[override]
        ctx.op = op
        ctx.set_materialize_grads(False)
        return op.run_step(step, keep, x)


BRIDGES = (Bridge, BridgeInPlace, BridgeStep)


def op_of(node: Any) -> Op | None:
    """The op that an autograd node belongs to, where it is a recorded one."""
    return node.op if getattr(node, "_forward_cls", None) in BRIDGES else None


class Overwrite(torch.autograd.Function):
    """The end of an in-place op: `target` gets the values and the gradient path of `result`."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, result: Tensor) -> Tensor:
        ctx.mark_dirty(target)
        ctx.dtype, ctx.view = result.dtype, target._is_view()
        return target.copy_(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, R: Tensor) -> Any:
        # Of a view, autograd takes what the rest of its base gets from here too: zeros, not nothing.
        return torch.zeros_like(R) if ctx.view else None, R.to(ctx.dtype)


def no_autocast(device: str) -> Any:
    """Rules compute in the types they are given, also when the caller is inside autocast."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
