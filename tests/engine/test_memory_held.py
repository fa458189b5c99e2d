"""A call keeps nothing for the next one: no weights, no activations, no records of its own.

Where the garbage collector is off, memory must be freed by reference counting alone: activations in a
reference cycle would fill a GPU before Python looks for cycles.
"""

import dataclasses
import gc
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rectgrad
from rectgrad.bench.memory import status

pytestmark = pytest.mark.filterwarnings("ignore:the model is in training mode", "ignore:the map of sample")

OPTIONS = {
    "rectgrad": {"q": 80.0},
    "guided_backprop": {},
    "saliency": {},
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2},
    "epsilon_lrp": {},
    "lrp": {},
    "deeplift": {},
}


class Triple(torch.autograd.Function):
    """Linear, and out of the recorder's sight: the model needs the autograd bridge."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 3 * grad


class Bridged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Triple.apply(x)


def net(middle: nn.Module | None = None, inplace: bool = False) -> nn.Sequential:
    """Modules that call torch's functions, so that a hook on them sees every activation."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace),
        middle or nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: net().eval(),
    "graph of its own": lambda: net(nn.Softsign()).eval(),
    "in-place": lambda: net(inplace=True).eval(),
    "bridged": lambda: net(Bridged()).eval(),
    "training": lambda: net().train(),
}
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The garbage collector is off during a test."""
    gc.disable()
    yield
    gc.enable()


class Activations:
    """Weak references to the outputs of a model's layers, and to their storages: a detached alias would keep
    the one without the other."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[weakref.ref] = []
        self.storages: list[StorageWeakRef] = []
        for layer in model.children():
            layer.register_forward_hook(self.note)

    def note(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.tensors.append(weakref.ref(output))
        with torch._C.DisableTorchFunction():  # out of the recorder's sight
            self.storages.append(StorageWeakRef(output.untyped_storage()))

    def alive(self) -> tuple[int, int]:
        """Tensors and storages."""
        tensors = sum(ref() is not None for ref in self.tensors)
        return tensors, sum(not ref.expired() for ref in self.storages)


def test_replaced_weights_are_freed():
    torch.manual_seed(0)
    side = 256
    model = nn.Sequential(nn.Linear(side, side), nn.ReLU(), nn.Linear(side, 4)).eval()
    replaced: list[weakref.ref] = []
    for i, method in zip(range(20), itertools.cycle(OPTIONS)):
        replaced.append(weakref.ref(model[0].weight))
        model[0].weight = nn.Parameter(torch.full((side, side), 1e-3 * (i + 1)))
        rectgrad.attribute(model, torch.ones(i + 1, side), method, 1, **OPTIONS[method])
    gc.collect()
    assert [ref() for ref in replaced if ref() is not None] == []


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_call_frees_its_activations(name, method):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    seen = Activations(model)
    for _ in range(2):  # the second call may know something of the first, but holds none of its memory
        maps = rectgrad.attribute(model, X, method, 1, **OPTIONS[method])
        assert seen.tensors
        assert seen.alive() == (0, 0)
        del maps


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", NETWORKS)
def test_activations_are_freed_as_the_gradient_goes_back(name):
    """Half-way down, the memory of the layers above is free for the gradients of those below."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    seen, alive = Activations(model), []

    class Watched(rectgrad.GuidedBackprop):
        def rules(self):
            def watched(op, R):
                last = seen.storages[-len(model) :]  # a model that needs the bridge runs twice
                alive.append({layer for layer, ref in enumerate(last) if not ref.expired()})
                return rule(op, R)

            rule = super().rules()["relu"]
            return {"relu": dataclasses.replace(rule, apply=watched)}

    rectgrad.attribute(model, X, Watched(), 1)
    at_the_later, at_the_earlier = alive
    assert 5 in at_the_later  # the instrument: what the later ReLU made is still there
    assert at_the_earlier <= {0, 1, 2, 8}  # made by the earlier one and the layers before it, and the outputs


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_call_that_fails_frees_its_activations(name):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    seen = Activations(model)
    with pytest.raises(ValueError, match="99"):
        rectgrad.attribute(model, X, "rectgrad", 99, q=80.0)
    assert seen.tensors
    assert seen.alive() == (0, 0)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_deleted_record_frees_everything(name):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    seen = Activations(model)
    kept = rectgrad.record(model, X)
    for method in OPTIONS:
        kept.attribute(method, 1, **OPTIONS[method])
    assert seen.alive()[1] > 0  # the instrument: a record does keep activations
    ref = weakref.ref(kept)
    del kept
    assert ref() is None
    assert seen.alive() == (0, 0)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_record_does_not_collect_what_its_targets_compute(name):
    torch.manual_seed(0)
    kept, head = rectgrad.record(NETWORKS[name](), X), nn.Sequential(nn.Linear(5, 7), nn.ReLU()).eval()
    seen, alive = Activations(head), []
    for _ in range(4):
        kept.attribute("guided_backprop", lambda outputs: head(outputs).sum(1))
        alive.append(seen.alive()[1])
    assert alive[-1] <= alive[0]


def engine_objects() -> Counter[str]:
    """The live objects of each class of the engine. The kernels may cache geometries."""
    gc.collect()
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, gc.get_objects()))
    return Counter(name for name in names if name.startswith("rectgrad.engine."))


def short_lived(seed: int) -> None:
    """All methods and a record on a model that nobody keeps. A pass has 250 kB of activations."""
    torch.manual_seed(seed)
    name = list(NETWORKS)[seed % len(NETWORKS)]
    model, x = NETWORKS[name](), X.repeat(1, 1, 4, 4)
    for method in OPTIONS:
        rectgrad.attribute(model, x, method, 1, **OPTIONS[method])
    rectgrad.record(model, x).attribute("rectgrad", 1, q=80.0)


def test_short_lived_models_leave_nothing():
    for seed in range(10):  # every network with every method: what the process allocates once
        short_lived(seed)
    objects = engine_objects()
    resident = status("VmRSS") if sys.platform.startswith("linux") else 0
    for seed in range(40):
        short_lived(seed)
    assert engine_objects() == objects
    if sys.platform.startswith("linux"):
        assert status("VmRSS") - resident < 30e6
