"""Nothing is left behind on the model, the caller's tensors or the random state, also after an error.

Each test takes a snapshot, makes a call that ends well or badly, and compares.
"""

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rectgrad
from every_method import EVERY, RUNNING
from untouched import FEW, ONE_BACKWARD, Eventful, FaultError, Snapshot, images, untouched

pytestmark = pytest.mark.filterwarnings("ignore:the model is in training mode")


def test_the_snapshot_notices_what_it_must() -> None:
    """The instrument itself: each of these changes is one that the tests below would miss without it."""
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: m.seen.append(1),
        lambda m: m.cache["nested"].append(1),
        lambda m: m.past[0].add_(1),
        lambda m: m.norm.num_batches_tracked.add_(1),
        lambda m: m.weighted.parametrizations.weight.original1.grad.zero_(),
        lambda m: setattr(m, "new", 1),
        lambda m: m.norm.eval(),
        lambda m: m.conv.register_forward_hook(print),
        lambda m: setattr(m, "norm", nn.BatchNorm2d(6)),
        lambda m: m.conv.weight.requires_grad_(True),
        lambda m: setattr(m.conv.weight, "data", m.conv.weight.data + 1),
    ]
    for change in changes:
        model = Eventful()
        before = Snapshot(model)
        with torch.no_grad():
            change(model)
        assert before.differences(Snapshot(model))


@pytest.mark.parametrize("name", EVERY)
def test_attribute_leaves_everything_as_it_was(name: str) -> None:
    model, x, state = Eventful(), images().requires_grad_(), torch.zeros(2, 1)
    x.grad = torch.ones_like(x)
    target = torch.tensor([1, 3])
    with untouched(model, x, state, target):
        rectgrad.attribute(model, x, name, target, forward_kwargs={"state": state}, **FEW.get(name, {}))
    assert x._version == 0
    assert target._version == 0


@pytest.mark.parametrize("name", EVERY)
def test_attribute_in_chunks_leaves_everything_as_it_was(name: str) -> None:
    model, x, state = Eventful(), torch.cat([images(), images().flip(0)]), torch.zeros(4, 1)
    with untouched(model, x, state):
        rectgrad.attribute(
            model, x, name, [0, 1, 2, 3], batch_size=2, forward_args=(state,), **FEW.get(name, {})
        )


@pytest.mark.parametrize("name", EVERY)
def test_a_record_leaves_everything_as_it_was(name: str) -> None:
    model, x, state = Eventful(), images(), torch.zeros(2, 1)
    with untouched(model, x, state):
        kept = rectgrad.record(model, x, forward_kwargs={"state": state})
    with untouched(model, x, state, kept.outputs):
        kept.attribute(name, 2, **FEW.get(name, {}))


@pytest.mark.parametrize("name", ONE_BACKWARD)
def test_layer_attributions_leave_everything_as_they_were(name: str) -> None:
    model, x = Eventful(), images()
    with untouched(model, x):
        rectgrad.layer_attributions(model, x, name, 2, **FEW.get(name, {}))


@pytest.mark.parametrize("name", ["deeplift", "integrated_gradients"])
@pytest.mark.parametrize("inner", ["a tensor", "a tuple"])
def test_baselines_are_not_written(name: str, inner: str) -> None:
    baseline = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    model, x = Eventful(), images()
    with untouched(model, x, baseline):
        given = (baseline,) if inner == "a tuple" else baseline
        rectgrad.attribute(model, x, name, 1, baseline=given, **FEW.get(name, {}))
    assert baseline._version == 0


def trap(where: str, error: type[BaseException], on_call: int = 1) -> Callable[[str], None]:
    """Raises at a place in the forward pass, the n-th time it is reached."""
    met = collections.Counter()

    def spring(place: str) -> None:
        met[place] += 1
        if place == where and met[place] == on_call:
            raise error(where)

    return spring


CALLS: dict[str, Callable] = {
    **{
        name: functools.partial(
            lambda name, *a, **k: rectgrad.attribute(*a, name, **k, **FEW.get(name, {})), name
        )
        for name in RUNNING
    },
    "record": rectgrad.record,
    "layer_attributions": rectgrad.layer_attributions,
}


@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["start", "middle", "late"])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_inside_the_forward_pass(call: str, where: str, error: type[BaseException]) -> None:
    model, x, state = Eventful(), images(), torch.zeros(2, 1)
    with untouched(model, x, state), pytest.raises(error, match=where):
        CALLS[call](model, x, forward_kwargs={"state": state, "trap": trap(where, error)})


@pytest.mark.parametrize("name", ["smoothgrad", "integrated_gradients", "deeplift"])
def test_an_error_in_the_second_forward_pass(name: str) -> None:
    """Methods that run the model more than once are as careful the second time."""
    model, x = Eventful(), images()
    with untouched(model, x), pytest.raises(FaultError):
        CALLS[name](model, x, forward_kwargs={"trap": trap("late", FaultError, on_call=2)})


@pytest.mark.parametrize("name", [n for n in CALLS if n != "record"])
def test_a_bad_target(name: str) -> None:
    model, x = Eventful(), images()
    with untouched(model, x), pytest.raises(ValueError, match="out of range"):
        CALLS[name](model, x, target=77)


@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [n for n in CALLS if n != "record"])
def test_an_error_inside_a_callable_target(name: str, error: type[BaseException]) -> None:
    def target(outputs: Tensor) -> Tensor:
        outputs.mul_(2)
        raise error("target")

    model, x = Eventful(), images()
    with untouched(model, x), pytest.raises(error, match="target"):
        CALLS[name](model, x, target=target)


@pytest.mark.parametrize("name", [n for n in CALLS if n != "record"])
def test_a_nan_in_the_input(name: str) -> None:
    model, x = Eventful(), images()
    x[0, 0, 0, 0] = torch.nan
    with untouched(model, x), pytest.raises(ValueError, match="contains NaN"):
        CALLS[name](model, x, target=0)


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("record", "layer_attributions")])
def test_a_nan_in_a_weight(name: str) -> None:
    model, x = Eventful(), images()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with untouched(model, x), pytest.raises(ValueError, match="contains NaN"):
        CALLS[name](model, x, target=0)


def test_a_refused_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)).train()
    x = images()
    with untouched(model, x), pytest.raises(rectgrad.UnsupportedModelError):
        rectgrad.attribute(model, x)


def test_an_error_while_a_record_is_used_does_not_spoil_it() -> None:
    model, x = Eventful().eval(), images()
    kept = rectgrad.record(model, x)
    first = kept.attribute("rectgrad", 1)

    def target(outputs: Tensor) -> Tensor:
        raise FaultError

    with untouched(model, x, kept.outputs):
        with pytest.raises(FaultError):
            kept.attribute("guided_backprop", target)
        with pytest.raises(ValueError):
            kept.attribute("guided_backprop", 77)
    assert torch.equal(kept.attribute("rectgrad", 1), first)


# --- propagate ---------------------------------------------------------------------------------------------


def failing_rule(op: Any, R: Tensor) -> Tensor:
    torch.rand(1)
    raise FaultError(op.name)


@pytest.mark.parametrize("error", [None, "rule", "body", "interrupt"])
def test_propagate_leaves_no_mode_and_no_gradient(error: str | None) -> None:
    model, x = Eventful().eval(), images().requires_grad_()
    before = Snapshot(*model.parameters())
    modes = torch._C._len_torch_function_stack()

    def run() -> None:
        rule = failing_rule if error == "rule" else lambda op, R: R
        with rectgrad.propagate({"relu": rule}):
            score = model(x.clone()).sum()
            if error == "body":
                raise FaultError("body")
            if error == "interrupt":
                raise KeyboardInterrupt("interrupt")
            score.backward()

    raised = {None: (), "interrupt": (KeyboardInterrupt,)}.get(error, (FaultError,))
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        run()
    assert torch._C._len_torch_function_stack() == modes
    assert torch.is_grad_enabled()
    assert not before.differences(Snapshot(*model.parameters()))


def test_propagate_treats_all_statistics_of_a_norm_alike() -> None:
    """Running mean and count belong together: both move or neither does."""
    norm = nn.BatchNorm1d(5)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.ReLU()).train()
    with rectgrad.propagate({"relu": lambda op, R: R}):
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert bool(norm.num_batches_tracked != 0) == bool((norm.running_mean != 0).any())


def test_a_rule_that_fails_in_one_backward_pass_leaves_the_next_one_alone() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    layer = nn.Linear(5, 5)
    with pytest.raises(FaultError), rectgrad.propagate({"relu": failing_rule}):
        layer(x).relu().sum().backward()
    (plain,) = torch.autograd.grad(layer(x).relu().sum(), x)
    expected = (layer(x) > 0).float() @ layer.weight
    torch.testing.assert_close(plain, expected)
