"""Scheduling: how computations are shared, ordered and stopped."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import rectgrad
from rectgrad.app.cache import Cache
from rectgrad.app.work import Stopped, Work, evaluated


@pytest.fixture
def work():
    found = Work()
    yield found
    found.close()


def test_a_cache_keeps_the_last_and_makes_each_once():
    made: list[int] = []
    cache: Cache[int] = Cache(2)

    def make(n: int) -> int:
        made.append(n)
        time.sleep(0.02)
        return n

    threads = [threading.Thread(target=lambda: cache.get(1, lambda: make(1))) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert made == [1]
    cache.get(2, lambda: make(2))
    cache.get(3, lambda: make(3))
    cache.get(1, lambda: make(1))
    assert made == [1, 2, 3, 1]


def slow_map(log: list[int], began: threading.Event) -> str:
    """A map that needs many passes, counted as by the model's hook."""
    for i in range(10_000):
        evaluated(2)
        log.append(i)
        began.set()
        time.sleep(0.001)
    return "whole"


def test_a_computation_that_everybody_left_is_stopped(work):
    log, began = [], threading.Event()
    first = work.join("key", lambda: slow_map(log, began), slow=True)
    second = work.join("key", lambda: pytest.fail("computed twice"), slow=True)
    assert first is second
    assert began.wait(10)
    work.leave(first)
    time.sleep(0.05)
    assert not first.future.done()  # another request still waits for it
    assert first.done >= 2
    work.leave(second)
    with pytest.raises(Stopped):
        first.future.result(10)
    assert len(log) < 10_000


def test_fast_computations_do_not_wait_for_slow_ones(work):
    began = threading.Event()
    slow = work.join("slow", lambda: slow_map([], began), slow=True)
    assert began.wait(10)
    assert work.join("fast", lambda: "fast", slow=False).future.result(10) == "fast"
    assert not slow.future.done()
    work.leave(slow)


def test_what_waits_in_line_and_is_left_never_runs(work):
    began = threading.Event()
    running = work.join("running", lambda: slow_map([], began), slow=True)
    assert began.wait(10)
    line = work.join("line", lambda: pytest.fail("ran"), slow=True)
    work.leave(line)
    assert line.future.cancelled()
    again = work.join("line", lambda: "new", slow=True)  # requested again: a new computation
    work.leave(running)
    assert again.future.result(10) == "new"


def test_a_computation_of_too_many_inputs_is_refused(work):
    """However many windows an occlusion has is known only when it runs."""
    model, x = torch.nn.Flatten(), torch.rand(1, 1, 101, 101)
    task = work.join("many", lambda: rectgrad.attribute(model, x, "occlusion", 0, window=1), slow=True)
    with pytest.raises(ValueError, match="at most 10000 inputs for one map, not 10202"):
        task.future.result()
    task = work.join("few", lambda: rectgrad.attribute(model, x, "occlusion", 0, window=50), slow=True)
    task.future.result()
    assert task.total == 1 + 4 * 4
