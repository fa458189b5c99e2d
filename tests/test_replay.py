"""A model asked again: its calls are followed and its way back is replayed, here without a CUDA graph."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rectgrad
from networks import NETWORKS
from rectgrad import kernels, replay
from rectgrad.op import Op

METHODS = ("rectgrad", "rectgrad_mod", "guided_backprop", "deconv")


def run_again(way_back, device):
    """As a graph does it: the same steps on the same places, and the results where they were."""
    found = way_back()

    def run():
        arrived, seen = way_back()
        found.seen.copy_(seen)
        for place, R in zip(found.arrived, arrived, strict=True):
            if place is not None:
                place.copy_(R)

    found = replay.Found([None if R is None else R.clone() for R in found.arrived], found.seen.clone())
    return run, found, 0


@pytest.fixture
def passes(monkeypatch):
    """Replays on a CPU; and of which kind every pass was."""
    kinds = []
    for kind in (replay.FollowedPass, replay.NotedPass, replay.LinkedPass):

        def watched(self, *args, _backward=kind.backward, **kwargs):
            maps = _backward(self, *args, **kwargs)
            kinds.append(type(self).__name__)
            return maps

        if "backward" in vars(kind):
            monkeypatch.setattr(kind, "backward", watched)
    monkeypatch.setattr(kernels, "replays", lambda inputs: True)
    monkeypatch.setattr(kernels, "carries", lambda x: False)
    monkeypatch.setattr(replay, "captured", run_again)
    monkeypatch.setattr(Op, "release", lambda op: None)  # a graph needs none of it; to run again does
    monkeypatch.setattr(replay, "most", lambda device: 1 << 30)
    monkeypatch.setattr(replay, "_known", weakref.WeakKeyDictionary())
    return kinds


THREE = ["LinkedPass", "NotedPass", "FollowedPass"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.filterwarnings("ignore")
def test_the_same_maps_again(name, method, passes):
    model, inputs = NETWORKS[name](0)
    others = tuple(x.flip(0) * 1.1 for x in inputs) if isinstance(inputs, tuple) else inputs.flip(0) * 1.1
    options = {"q": 60.0} if method.startswith("rectgrad") else {}
    ask = lambda x: rectgrad.attribute(model, x, method, target=0, **options)
    first, other = ask(inputs), None
    second, third = ask(inputs), ask(inputs)
    replayed = ask(others)
    replay.release()
    replay._known.clear()
    other = ask(others)
    print(name, passes)
    for a, b in ((first, second), (first, third), (other, replayed)):
        for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (a, b)), strict=True):
            assert torch.equal(x, y)
