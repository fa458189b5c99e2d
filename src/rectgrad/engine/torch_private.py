"""The private parts of torch that the engine uses: all of them are named here and nowhere else.

Each is taken from the first of several candidates that exists and gives the right answer on a tiny example,
when this module is imported. A torch version that lacks one of them either gets the slower public way, or
the import fails with a sentence that names what is missing: nothing degrades silently.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


def _choose(purpose: str, works: Callable[[Any], bool], *candidates: Any) -> Any:
    """The first candidate, a function or names in torch, that exists and works."""
    for candidate in candidates:
        try:
            found = attrgetter(*candidate.split())(torch) if isinstance(candidate, str) else candidate
            with torch.inference_mode(False):  # where a user's function imports us
                if works(found):
                    return found
        except (AttributeError, ImportError, TypeError, RuntimeError):
            continue
    raise ImportError(f"rectgrad cannot use torch {torch.__version__}: it has no way to {purpose}")


def _inside(context: Any, work: Callable[[], Any]) -> Any:
    with context:
        return work()


_x: Tensor = _inside(torch.inference_mode(False), lambda: torch.zeros(2))  # an example

active_function_modes: Callable[[], list[Any]] = _choose(
    "list the active TorchFunctionModes, the outermost first",
    lambda active: _inside(BaseTorchFunctionMode(), active)[:-1] == active(),
    "overrides._get_current_function_mode_stack",
)
dispatch_modes: Callable[[], int] = _choose(
    "count the active TorchDispatchModes",
    lambda count: _inside(TorchDispatchMode(), count) == count() + 1,
    "_C._len_torch_dispatch_stack",
    lambda: len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
)
_push_function_mode, _pop_function_mode = _choose(
    "add and remove a TorchFunctionMode",
    lambda both: both[0](mode := BaseTorchFunctionMode()) is None and both[1]() is mode,
    "overrides._push_mode overrides._pop_mode",
)
without_torch_function: Callable[[], Any] = _choose(
    "call a function past the active modes",  # this mode refuses every call
    lambda off: _inside(TorchFunctionMode(), lambda: _inside(off(), lambda: torch.zeros(1))) is not None,
    "_C.DisableTorchFunction",
)
COMPILER = "torch._dynamo"  # the package of the errors of torch.compile
_DEVICES = ("cpu", "cuda", "mps")  # not all of them in every version: torch 2.4 has no autocast for mps
autocast_active: Callable[[], bool] = _choose(
    "ask whether autocast is on",
    lambda active: all(_inside(torch.autocast("cpu", enabled=on), active) is on for on in (True, False)),
    "_C._is_any_autocast_enabled",
    lambda: any(map(torch.is_autocast_enabled, filter(is_autocast_available, _DEVICES))),
)
set_grad_enabled: Callable[[bool], Any] = _choose(
    "switch gradients on and off",
    lambda switch: _inside(torch.no_grad(), lambda: switch(True) is None and torch.is_grad_enabled()),
    "_C._set_grad_enabled",
)
transform_active: Callable[[], bool] = _choose(
    "ask whether a torch.func transform is active",
    lambda active: active() is False,
    "_C._are_functorch_transforms_active",
    lambda: torch._C._functorch.peek_interpreter_stack() is not None,
)
is_view: Callable[[Tensor], bool] = _choose(
    "ask whether a tensor is a view", lambda asks: asks(_x[1:]) and not asks(_x), methodcaller("_is_view")
)
base_of: Callable[[Tensor], Tensor] = _choose(
    "find the tensor that a view is a view of", lambda base: base(_x[1:]) is _x, attrgetter("_base")
)
# The innermost hooks for saved tensors. Older versions cannot tell: an object says that there may be some.
saved_tensor_hooks: Callable[[], Any] = _choose(
    "ask for the hooks of saved tensors",
    lambda top: _inside(saved_tensors_hooks(torch.neg, torch.neg), top) not in (None, top()),
    lambda: torch._C._autograd._top_saved_tensors_default_hooks(False),
    object,
)


def version(x: Tensor) -> int:
    """How often a tensor was written; 0 for inference tensors, which cannot be written elsewhere."""
    try:
        return x._version
    except RuntimeError:
        return 0


def under_mode(mode: Any, work: Callable[[], Any]) -> Any:
    """`work()` with a TorchFunctionMode active.

    A `with` statement would do, but for interrupts: the mode's own `__exit__` is Python code, which an
    interrupt can end early, and fails if torch had taken the mode off the stack at that moment.
    """
    modes = active_function_modes()
    try:
        _push_function_mode(mode)
        return work()
    finally:
        restore_function_modes(modes)


def restore_function_modes(modes: list[Any]) -> None:
    """Makes exactly these modes active."""
    while (active := active_function_modes()) != modes[: len(active)]:
        _pop_function_mode()
    for mode in modes[len(active) :]:
        _push_function_mode(mode)


class _Packing(threading.local):
    count = 0


packing = _Packing()  # how many tensors our own hooks have packed in this thread


def _hooks_are_ours() -> bool:
    """Whether the innermost hooks of saved tensors are ours, found out by saving a tensor."""
    before = packing.count
    with no_inference_mode(), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).exp()
    return packing.count > before


def remove_tensor_hooks(until: Any) -> None:
    """Remove the hooks that an interrupted context left behind; where torch cannot tell, only our own."""
    if type(until) is not object:
        while saved_tensor_hooks() not in (None, until):
            torch._C._autograd._pop_saved_tensors_default_hooks()
    elif isinstance(sys.exc_info()[1], KeyboardInterrupt):
        while _hooks_are_ours():
            torch._C._autograd._pop_saved_tensors_default_hooks()


# Since torch 2.5 a mode sees torch.autograd.backward; before, the first question that it asks a tensor.
_seen = "has_torch_function" in torch.autograd.backward.__code__.co_names
_asking = None if _seen else torch.autograd._make_grads.__code__


def asked_by_backward(frame: Any) -> bool:
    """Whether the code that asks a tensor for an attribute is torch.autograd.backward."""
    return frame.f_code is _asking


def no_inference_mode() -> Any:
    """Leaves inference mode, if it is on: its guard is not touched otherwise."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `change` applied to every tensor in its lists, tuples and dicts, however deep."""
    if isinstance(value, Tensor):
        return change(value)
    return _pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    leaves = [value] if isinstance(value, Tensor) else _pytree.tree_leaves(value)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def saved(node: Any, *names: str) -> Any:
    """What an autograd node saved under the first of these names; None if it saved nothing."""
    return next((getattr(node, f"_saved_{name}") for name in names if hasattr(node, f"_saved_{name}")), None)


def node_number(x: Tensor) -> int:
    """The sequence number of the node that made a tensor; it grows within a thread."""
    number = getattr(x.grad_fn, "_sequence_nr", None)
    return number() if number is not None else 2**63  # unknown: treated as the last one


def next_node_number() -> int:
    """The number that the next node of this thread gets."""
    with torch.enable_grad():
        return node_number(torch.zeros((), device="cpu", requires_grad=True).view(())) + 1


def namespaces() -> Iterable[Any]:
    """Where torch keeps the functions that reach `__torch_function__`."""
    hidden = (getattr(torch._C, name, None) for name in ("_VariableFunctions", "_nn", "_special", "_linalg"))
    public = (torch.Tensor, torch, torch.nn.functional, torch.special, torch.linalg, torch.fft)
    return (*public, *filter(None, hidden))


def overload_types() -> tuple[type, type]:
    """The classes of `torch.ops.aten.relu.default` and of `torch.ops.aten.relu`."""
    return type(torch.ops.aten.relu.default), type(torch.ops.aten.relu)


def inner_model(model: Any) -> Any:
    """The original module of a compiled one, or None."""
    compiled = isinstance(model, torch.nn.Module) and "_orig_mod" in model._modules
    return model._modules["_orig_mod"] if compiled else None
