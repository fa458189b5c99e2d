"""explain through a capture: what an ordinary call gives, and an ordinary call where it cannot be."""

import gc
import weakref

import pytest
import torch
from torch import nn

import graphs
import rectgrad
from rectgrad.api import Capture
from rectgrad.explanation import Network, captures
from tiny_model import tiny

X = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(0))
AT_CAPTURE = 2  # replays that check a new capture


@pytest.fixture
def replayed(monkeypatch):
    """Captures on the CPU. A function: how many replays there were, without those that check a capture."""
    graphs.on_the_cpu(monkeypatch)
    return lambda: graphs.Graph.replays - AT_CAPTURE


@pytest.mark.parametrize("method", ["rectgrad", "saliency", "guided_backprop", "epsilon_lrp", "deeplift"])
@pytest.mark.parametrize("target", [None, 2, [0, 1, 2, 3, 0, 1, 2], "green dog"])
def test_the_explanations_of_ordinary_calls(method, target, monkeypatch):
    expected = rectgrad.explain(X, tiny(), method, target, batch_size=2)
    graphs.on_the_cpu(monkeypatch)
    found = rectgrad.explain(X, tiny(), method, target, batch_size=2)
    # The first batch and the last, smaller one are ordinary calls; a map and its specificity: two replays.
    assert graphs.Graph.replays - AT_CAPTURE == 4
    for a, b in zip(found, expected, strict=True):
        assert (a.map - b.map).abs().max() <= 1e-5 * b.map.abs().max()
        assert torch.allclose(a.outputs, b.outputs, atol=1e-6)
        assert (a.target.index, [guess.index for guess in a.top]) == (
            b.target.index,
            [guess.index for guess in b.top],
        )
        assert a.specificity == b.specificity
        assert (str(a.trace), a.warnings, a.notes) == (str(b.trace), b.warnings, b.notes)


def test_a_cpu_captures_nothing(monkeypatch):
    monkeypatch.setattr(captures, "AFTER", 0)
    monkeypatch.setattr(captures, "capture", lambda *_: pytest.fail("a capture"))
    rectgrad.explain(X, tiny(), batch_size=2)


@pytest.mark.parametrize(
    "given",
    [
        {"target": rectgrad.contrast(0, 1)},
        {"method": "random"},
        {"method": "integrated_gradients", "steps": 3},
    ],
    ids=["callable target", "no pass", "many passes"],
)
def test_what_a_capture_does_not_speed_up_is_an_ordinary_call(given, replayed):
    rectgrad.explain(X, tiny(), batch_size=2, **given)
    assert graphs.Graph.replays == 0


def test_the_first_calls_are_ordinary_ones(monkeypatch):
    graphs.on_the_cpu(monkeypatch, after=3)
    rectgrad.explain(X, tiny(), batch_size=2, specificity=False)
    assert graphs.Graph.replays == 0  # three batches of two, and one of one
    rectgrad.explain(X, tiny(), batch_size=1, specificity=False)
    assert graphs.Graph.replays == AT_CAPTURE + 4


def test_a_model_that_cannot_be_captured_is_explained_by_ordinary_calls(replayed, monkeypatch):
    asked = []

    def refuse(*_):
        asked.append(1)
        raise rectgrad.UnsupportedModelError("no")

    monkeypatch.setattr(captures, "capture", refuse)
    expected = rectgrad.attribute(tiny().module, X[4:6])
    found = rectgrad.explain(X, tiny(), batch_size=2)
    assert asked == [1]
    assert torch.equal(found[4].map, expected[0])


def test_a_stale_capture_is_made_again(replayed):
    network, method = Network.of(tiny()), rectgrad.METHODS["saliency"]

    def ask():
        return network.replay(X, method, None)

    assert ask() is None
    assert ask() is not None
    network.module[2].weight = nn.Parameter(-network.module[2].weight.detach())
    assert (ask(), ask()) == (None, None)  # stale; then counted from the start
    expected = rectgrad.attribute(network.module, X, method)
    assert torch.allclose(ask().attribute(method), expected, atol=1e-6)


def test_warnings_are_those_of_an_ordinary_call(replayed):
    model, x = tiny(), X[:6].clone()
    x[4:] *= 1e-6  # too faint for tau
    with torch.no_grad():
        for layer in (0, 2, 5):
            model.module[layer].bias.zero_()
    with pytest.warns(UserWarning, match="is zero: layer"):
        found = rectgrad.explain(x, model, batch_size=2, tau=1e-4)
    assert replayed() == 2 + 1  # a batch with its specificity, and one that needed an ordinary call
    assert [len(each.warnings) for each in found] == [0, 0, 0, 0, 1, 1]
    model.module.append(nn.Softmax(1))
    with pytest.warns(UserWarning, match="ends in a softmax"):
        found = rectgrad.explain(X[:6], model, "saliency", batch_size=2)
    assert all("ends in a softmax" in each.warnings[0] for each in found)


def test_captures_are_released_after_the_call(replayed, monkeypatch):
    made = []
    monkeypatch.setattr(captures, "capture", lambda *given: made.append(rectgrad.capture(*given)) or made[-1])
    rectgrad.explain(X, tiny(), batch_size=2)
    [captured] = made
    assert captured._graph is None
    with pytest.raises(ValueError, match="out of range"):
        rectgrad.explain(X, tiny(), target=[0] * 6 + [9], batch_size=2)
    assert made[1]._graph is None
    gone = weakref.ref(captured)
    del captured, made[:]
    gc.collect()
    assert gone() is None


def test_few_captures_are_held_and_the_last_ones(replayed, monkeypatch):
    released = []
    monkeypatch.setattr(Capture, "release", lambda self: released.append(self._method.q))
    network = Network.of(tiny())
    methods = [rectgrad.RectGrad(q=q) for q in range(50, 52 + captures.KEPT)]
    for method in methods:
        assert network.replay(X, method, None) is None
        assert network.replay(X, method, None) is not None
    assert released == [50, 51]
    network.close()
    assert released == [each.q for each in methods]
