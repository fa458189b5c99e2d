"""The private parts of torch that the engine uses: all of them are named here and nowhere else.

Each is taken from the first of several candidates that exists and gives the right answer on a tiny example,
when this module is imported. A torch version that lacks one of them either gets the slower public way, or
the import fails with a sentence that names what is missing: nothing degrades silently.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _HooksUnknown:
    """Stands for `saved_tensor_hooks` where torch does not tell."""

    def __init__(self) -> None:
        self._answers = iter((1, 2))  # for the check of itself

    def __call__(self) -> Any:
        return next(self._answers, self)


def _choose(purpose: str, works: Callable[[Any], bool], *candidates: Callable[[], Any]) -> Any:
    """The first candidate that exists and works."""
    for candidate in candidates:
        try:
            found = candidate()
            if works(found):
                return found
        except (AttributeError, ImportError, TypeError, RuntimeError):
            continue
    raise ImportError(f"rectgrad cannot use torch {torch.__version__}: it has no way to {purpose}")


class _Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _counts_function_modes(depth: Callable[[], int]) -> bool:
    before = depth()
    with BaseTorchFunctionMode():
        return depth() == before + 1


def _counts_dispatch_modes(depth: Callable[[], int]) -> bool:
    before = depth()
    with _Counting():
        return depth() == before + 1


function_modes: Callable[[], int] = _choose(
    "count the active TorchFunctionModes",
    _counts_function_modes,
    lambda: torch._C._len_torch_function_stack,
    lambda: lambda: len(torch.overrides._get_current_function_mode_stack()),
)

dispatch_modes: Callable[[], int] = _choose(
    "count the active TorchDispatchModes",
    _counts_dispatch_modes,
    lambda: torch._C._len_torch_dispatch_stack,
    lambda: lambda: len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
)


def active_function_modes() -> list[Any]:
    """The TorchFunctionModes of this thread, the outermost first."""
    return list(torch.overrides._get_current_function_mode_stack())


def _pops(pop: Callable[[], Any]) -> bool:
    mode = BaseTorchFunctionMode()
    mode.__enter__()
    return pop() is mode


_pop_function_mode: Callable[[], Any] = _choose(
    "remove a TorchFunctionMode",
    _pops,
    lambda: torch._C._pop_torch_function_stack,
    lambda: torch.overrides._pop_mode,
)


def _pushes(push: Callable[[Any], Any]) -> bool:
    before = function_modes()
    push(BaseTorchFunctionMode())
    pushed = function_modes() == before + 1
    while function_modes() > before:
        _pop_function_mode()
    return pushed


_push_function_mode: Callable[[Any], Any] = _choose(
    "add a TorchFunctionMode",
    _pushes,
    lambda: torch._C._push_on_torch_function_stack,
    lambda: torch.overrides._push_mode,
)


def under_mode(mode: Any, work: Callable[[], Any]) -> Any:
    """`work()` with a TorchFunctionMode active.

    A `with` statement would do, but for interrupts: the mode's own `__exit__` is Python code, which an
    interrupt can end early, and fails if torch had taken the mode off the stack at that moment.
    """
    depth = function_modes()
    try:
        _push_function_mode(mode)
        return work()
    finally:
        while function_modes() > depth:
            _pop_function_mode()


def restore_function_modes(modes: list[Any]) -> None:
    """Exactly these modes are active afterwards."""
    now = active_function_modes()
    same = 0
    while same < min(len(now), len(modes)) and now[same] is modes[same]:
        same += 1
    while function_modes() > same:
        _pop_function_mode()
    for mode in modes[same:]:
        _push_function_mode(mode)


def no_inference_mode() -> Any:
    """Leaves inference mode, if it is on: its guard is not touched otherwise."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _sees_autocast(active: Callable[[], bool]) -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = active()
    with torch.autocast("cpu", enabled=False):
        return inside and not active()


_DEVICES = ("cpu", "cuda", "mps")  # not all of them in every version: torch 2.4 has no autocast for mps


autocast_active: Callable[[], bool] = _choose(
    "ask whether autocast is on",
    _sees_autocast,
    lambda: torch._C._is_any_autocast_enabled,
    lambda: lambda: any(map(torch.is_autocast_enabled, filter(torch.amp.is_autocast_available, _DEVICES))),
)


def _switches(set_enabled: Callable[[bool], Any]) -> bool:
    before = torch.is_grad_enabled()
    set_enabled(not before)
    switched = torch.is_grad_enabled() is not before
    set_enabled(before)
    return switched


set_grad_enabled: Callable[[bool], Any] = _choose(
    "switch gradients on and off",
    _switches,
    lambda: torch._C._set_grad_enabled,
    lambda: torch.set_grad_enabled,
)


def _silences(context: Callable[[], Any]) -> bool:
    seen: list[Any] = []

    class Mode(BaseTorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), context():
        torch.zeros(1).add(1)
    return not seen


without_torch_function: Callable[[], Any] = _choose(
    "call a function past the active modes", _silences, lambda: torch._C.DisableTorchFunction
)


class _AskedError(Exception):
    pass


def _asking_code() -> Any:
    """The code in which torch.autograd.backward first meets a mode; None if the mode sees the call itself."""
    found: list[Any] = []

    class Mode(BaseTorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(None if func is torch.autograd.backward else sys._getframe(1).f_code)
            raise _AskedError  # before anything is differentiated

    x = torch.zeros(1, device="cpu", requires_grad=True)
    with contextlib.suppress(_AskedError), Mode():
        torch.autograd.backward(x)
    if not found:
        raise RuntimeError("no mode meets torch.autograd.backward")
    return found[0]


_ASKING: Any = _choose(
    "see that torch.autograd.backward is called",
    lambda code: code is None or isinstance(code, types.CodeType),
    _asking_code,
    lambda: torch.autograd._make_grads.__code__,
)


def asked_by_backward(frame: Any) -> bool:
    """Whether the code that asks a tensor for an attribute is torch.autograd.backward. Some versions (2.4) do
    not show the call itself to a mode, but the questions it begins with: `requires_grad` or `is_nested`."""
    return frame.f_code is _ASKING


def _tells_storages_apart(storage: Callable[[Tensor], int]) -> bool:
    x = torch.zeros(2)
    return storage(x) == storage(x[1:]) and storage(x) != storage(torch.zeros(2))


storage_of: Callable[[Tensor], int] = _choose(
    "tell storages apart",
    _tells_storages_apart,
    lambda: lambda x: x.untyped_storage()._cdata,
    lambda: lambda x: x.untyped_storage().data_ptr(),
)


def _counts_writes(version: Callable[[Tensor], int]) -> bool:
    x = torch.zeros(2)
    before = version(x)
    x.detach()[0].add_(1)
    return version(x) > before


_version: Callable[[Tensor], int] = _choose(
    "count the writes on a tensor", _counts_writes, lambda: operator.attrgetter("_version")
)


def version(x: Tensor) -> int:
    """How often a tensor was written. Inference tensors are not counted: they cannot be written elsewhere."""
    try:
        return _version(x)
    except RuntimeError:
        return 0


def _knows_views(is_view: Callable[[Tensor], bool]) -> bool:
    x = torch.zeros(2)
    return is_view(x[1:]) and not is_view(x)


is_view: Callable[[Tensor], bool] = _choose(
    "ask whether a tensor is a view",
    _knows_views,
    lambda: operator.methodcaller("_is_view"),
    lambda: lambda x: x._base is not None,
)


def base_of(view: Tensor) -> Tensor:
    """The tensor that a view is a view of."""
    base = view._base
    assert base is not None
    return base


def _sees_transforms(active: Callable[[], bool]) -> bool:
    return active() is False


transform_active: Callable[[], bool] = _choose(
    "ask whether a torch.func transform is active",
    _sees_transforms,
    lambda: torch._C._are_functorch_transforms_active,
    lambda: lambda: torch._C._functorch.peek_interpreter_stack() is not None,
)


def _sees_hooks(top: Callable[[], Any]) -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        inside = top()
    return inside is not None and inside != top()


# The innermost hooks for saved tensors. Older versions cannot tell: there may always be some.
saved_tensor_hooks: Callable[[], Any] = _choose(
    "ask for the hooks of saved tensors",
    _sees_hooks,
    lambda: lambda: torch._C._autograd._top_saved_tensors_default_hooks(False),
    lambda: _HooksUnknown(),
)


def _walks(tree: Any) -> bool:
    value = {"a": [torch.zeros(1), (2, None)]}
    return len(tree.tree_leaves(value)) >= 2 and tree.tree_map(lambda x: x, value).keys() == value.keys()


_pytree: Any = _choose("walk nested containers", _walks, lambda: torch.utils._pytree)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `change` applied to every tensor in its lists, tuples and dicts, however deep."""
    if isinstance(value, Tensor):
        return change(value)
    return _pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def namespaces() -> Iterable[Any]:
    """Where torch keeps the functions that reach `__torch_function__`."""
    own = (torch.Tensor, torch, F, torch.special, torch.linalg, torch.fft)
    hidden = (getattr(torch._C, name, None) for name in ("_VariableFunctions", "_nn", "_special", "_linalg"))
    return (*own, *(each for each in hidden if each is not None))


def saved(node: Any, *names: str) -> Any:
    """What an autograd node saved under the first of these names; None if it saved nothing."""
    return next((getattr(node, f"_saved_{name}") for name in names if hasattr(node, f"_saved_{name}")), None)


def node_number(x: Tensor) -> int:
    """When the node that made a tensor was created: larger for a later one of the same thread."""
    number = getattr(x.grad_fn, "_sequence_nr", None)
    return number() if number is not None else 2**63  # unknown: as if it were the last


def next_node_number() -> int:
    """The number that the next node of this thread gets."""
    with torch.enable_grad():
        return node_number(torch.zeros((), device="cpu", requires_grad=True).view(())) + 1


class _Packing(threading.local):
    count = 0


packing = _Packing()  # how many tensors our own hooks have packed in this thread


def _are_ours() -> bool:
    """Whether the innermost hooks of saved tensors are ours, found out by saving a tensor."""
    before = packing.count
    with no_inference_mode(), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).exp()
    return packing.count > before


def remove_tensor_hooks(until: Any) -> None:
    """Remove the hooks that an interrupted context left behind; where torch cannot tell, only our own."""
    if not isinstance(until, _HooksUnknown):
        while saved_tensor_hooks() not in (None, until):
            torch._C._autograd._pop_saved_tensors_default_hooks()
    elif isinstance(sys.exc_info()[1], KeyboardInterrupt):
        while _are_ours():
            torch._C._autograd._pop_saved_tensors_default_hooks()


def inner_model(model: Any) -> Any:
    """The original module of a compiled one, or None."""
    held = isinstance(model, torch.nn.Module) and "_orig_mod" in model._modules
    return model._modules["_orig_mod"] if held else None


_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "insufficient memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was not sufficient: torch says so in several ways."""
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    return known or any(words in str(error).lower() for words in _NO_MEMORY)


@functools.cache
def overload_types() -> tuple[type, type]:
    """The classes of `torch.ops.aten.relu.default` and of `torch.ops.aten.relu`."""
    return type(torch.ops.aten.relu.default), type(torch.ops.aten.relu)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x
