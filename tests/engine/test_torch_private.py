"""Private names of torch: one file names them, and it notices when one is missing or gives another answer."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from rectgrad.engine import torch_private

SOURCE = Path(torch_private.__file__)
HIDDEN = [
    "_len_torch_function_stack",
    "_len_torch_dispatch_stack",
    "_pop_torch_function_stack",
    "_push_on_torch_function_stack",
    "_is_any_autocast_enabled",
    "_are_functorch_transforms_active",
    "_VariableFunctions",
    "_nn",
    "_special",
    "_linalg",
]
NEEDED = ["DisableTorchFunction", "_set_grad_enabled"]  # torch's own public functions need them too


def loaded() -> ModuleType:
    """The file once more, as a module of its own."""
    spec = importlib.util.spec_from_file_location("torch_private_again", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def works(module: ModuleType) -> bool:
    mode = torch.overrides.BaseTorchFunctionMode()
    before = module.active_function_modes()
    inside = module.under_mode(mode, module.active_function_modes)
    counted = inside == [*before, mode] and module.active_function_modes() == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = module.autocast_active()
    x = torch.zeros(3)
    before = module.version(x)
    x.add_(1)
    written = module.version(x) > before
    in_transform = []
    torch.vmap(lambda row: (in_transform.append(module.transform_active()), row)[1])(torch.zeros(2, 2))
    return counted and autocast and written and in_transform == [True] and not module.transform_active()


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_name_has_a_substitute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, name, raising=False)
    assert works(loaded())


@pytest.mark.parametrize("name", NEEDED)
def test_a_hidden_name_without_a_substitute_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, name)
    with pytest.raises(
        ImportError, match=rf"rectgrad cannot use torch {re.escape(torch.__version__)}: it has"
    ):
        loaded()


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("_len_torch_function_stack", lambda: 0),
        ("_are_functorch_transforms_active", lambda: 0),
        ("_len_torch_dispatch_stack", lambda: 3),
        ("_is_any_autocast_enabled", lambda: False),
    ],
)
def test_a_wrong_answer_is_not_used(name: str, lie: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, name, lie)
    module = loaded()
    assert lie not in vars(module).values()
    assert works(module)


def test_an_import_inside_inference_mode() -> None:
    with torch.inference_mode():
        module = loaded()
    assert works(module)


def test_hooks_that_cannot_be_seen_may_always_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    assert loaded().saved_tensor_hooks() is not None


@pytest.mark.parametrize("inference", [False, True])
def test_hooks_that_cannot_be_seen_are_removed_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, inference: bool
) -> None:
    """Ours, and not those of the caller."""
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    module, packed = loaded(), []
    hooks = module.saved_tensor_hooks()

    def pack(x: torch.Tensor) -> torch.Tensor:
        module.packing.count += 1
        return x

    def interrupted() -> None:
        try:
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x).__enter__()
            raise KeyboardInterrupt
        finally:
            module.remove_tensor_hooks(until=hooks)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        with torch.inference_mode(inference), pytest.raises(KeyboardInterrupt):
            interrupted()
        packed.clear()
        count = module.packing.count
        torch.zeros(1, requires_grad=True).exp()
    assert (len(packed), module.packing.count) == (1, count)


def test_modes_are_restored_whatever_an_interrupt_left() -> None:
    """One taken off by torch for the moment is put back, one that was left behind is removed."""
    with BaseTorchFunctionMode(), BaseTorchFunctionMode():
        modes = torch_private.active_function_modes()
        torch_private._pop_function_mode()
        torch_private.restore_function_modes(modes)
        assert torch_private.active_function_modes() == modes
        torch_private._push_function_mode(BaseTorchFunctionMode())
        torch_private.restore_function_modes(modes)
        assert torch_private.active_function_modes() == modes


def test_no_other_file_names_private_parts() -> None:
    private = re.compile(r"torch\._C|torch\._[a-z]|\._saved_[a-z]|_top_saved|\._cdata")
    package = SOURCE.parents[1]
    naming = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path != SOURCE
        and any(private.search(line.split("#")[0]) for line in path.read_text().splitlines())
    ]
    assert naming == []
