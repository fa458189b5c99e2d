"""The private parts of torch that the engine uses: all of them are named here and nowhere else.

Each is taken from the first of several candidates that exists and gives the right answer on a tiny example,
when this module is imported. A torch version that lacks one of them either gets the slower public way, or
the import fails with a sentence that names what is missing: nothing degrades silently.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


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


def _pops(pop: Callable[[], Any]) -> bool:
    mode = BaseTorchFunctionMode()
    mode.__enter__()
    return pop() is mode


pop_function_mode: Callable[[], Any] = _choose(
    "remove a TorchFunctionMode",
    _pops,
    lambda: torch._C._pop_torch_function_stack,
    lambda: torch.overrides._pop_mode,
)


def _sees_autocast(active: Callable[[], bool]) -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = active()
    with torch.autocast("cpu", enabled=False):
        return inside and not active()


autocast_active: Callable[[], bool] = _choose(
    "ask whether autocast is on",
    _sees_autocast,
    lambda: torch._C._is_any_autocast_enabled,
    lambda: lambda: any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "mps")),
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


version: Callable[[Tensor], int] = _choose(
    "count the writes on a tensor", _counts_writes, lambda: operator.attrgetter("_version")
)


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


def inner_model(model: Any) -> Any:
    """The original module of a compiled one, or None."""
    return model._modules.get("_orig_mod") if isinstance(model, torch.nn.Module) else None


_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "insufficient memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was not sufficient: torch says so in several ways."""
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    return known or any(words in str(error).lower() for words in _NO_MEMORY)


@functools.cache
def overload_types() -> tuple[type, type]:
    """The classes of `torch.ops.aten.relu.default` and of `torch.ops.aten.relu`."""
    return type(torch.ops.aten.relu.default), type(torch.ops.aten.relu)
