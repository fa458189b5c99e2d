"""A stand-in for CUDA graphs, so that what uses captures is tested without a GPU."""

from inspect import getclosurevars

from rectgrad.api import preserved
from rectgrad.engine import capture
from rectgrad.explanation import captures


class Graph:
    """Replays by running the captured work again. `replays` counts them, for all graphs together."""

    replays = 0

    def __init__(self, work, places):
        self.work, self.places, self.result = work, places, work()

    def replay(self, values):
        Graph.replays += 1
        for place, value in zip(self.places, values, strict=True):
            place.copy_(value) if hasattr(value, "shape") else place.fill_(value)
        self.result = preserved(getclosurevars(self.work).nonlocals["request"], self.work)
        return self.result


def on_the_cpu(monkeypatch, after=1):
    """Makes captures pay on the CPU, from the call after so many ordinary ones on."""
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(captures, "AFTER", after)
    monkeypatch.setattr(capture, "Graph", Graph)
    for module in (capture, captures):
        monkeypatch.setattr(module, "has_graphs", lambda device: True)
