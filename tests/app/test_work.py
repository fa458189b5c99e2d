"""Scheduling: how computations are shared, ordered and stopped."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest
import torch

import rectgrad
from rectgrad.app import work as scheduling
from rectgrad.app.cache import Cache
from rectgrad.app.work import Stopped, Work, evaluated

ME, OTHER = ("10.0.0.1", "me"), ("10.0.0.2", "other")  # network address and session


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
    first = work.join("key", lambda: slow_map(log, began), "slow", ME)
    second = work.join("key", lambda: pytest.fail("computed twice"), "slow", ME)
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
    slow = work.join("slow", lambda: slow_map([], began), "slow", ME)
    assert began.wait(10)
    assert work.join("fast", lambda: "fast", "fast", ME).future.result(10) == "fast"
    assert not slow.future.done()
    work.leave(slow)


def test_what_waits_in_line_and_is_left_never_runs(work):
    began = threading.Event()
    running = work.join("running", lambda: slow_map([], began), "slow", ME)
    assert began.wait(10)
    line = work.join("line", lambda: pytest.fail("ran"), "slow", ME)
    work.leave(line)
    assert line.future.cancelled()
    again = work.join("line", lambda: "new", "slow", ME)  # requested again: a new computation
    work.leave(running)
    assert again.future.result(10) == "new"


def test_a_computation_of_too_many_inputs_is_refused(work):
    """However many windows an occlusion has is known only when it runs."""
    model, x = torch.nn.Flatten(), torch.rand(1, 1, 101, 101)
    task = work.join("many", lambda: rectgrad.attribute(model, x, "occlusion", 0, window=1), "slow", ME)
    with pytest.raises(ValueError, match="at most 10000 inputs for one map, not 10202"):
        task.future.result()
    task = work.join("few", lambda: rectgrad.attribute(model, x, "occlusion", 0, window=50), "slow", ME)
    task.future.result()
    assert task.total == 1 + 4 * 4


def test_a_computation_that_takes_too_long_is_stopped_with_an_error_message(work, monkeypatch):
    monkeypatch.setattr(scheduling, "SECONDS", 0.05)
    log = []
    task = work.join("long", lambda: slow_map(log, threading.Event()), "slow", ME)
    with pytest.raises(ValueError, match=r"takes too long: it was stopped after \d+ seconds"):
        task.future.result(30)
    assert len(log) < 10_000
    assert work.join("next", lambda: "next", "slow", OTHER).future.result(10) == "next"


def test_a_computation_may_take_longer_only_while_nobody_waits_for_its_thread(work, monkeypatch):
    monkeypatch.setattr(scheduling, "SECONDS_BUSY", 0.02)
    starts = [threading.Event() for _ in range(scheduling.THREADS)]
    owners = [("10.0.0.1", f"{i}") for i in range(len(starts))]  # so that they take turns
    long = [work.join(i, lambda i=i: slow_map([], starts[i]), "slow", owners[i]) for i in range(len(starts))]
    assert all(began.wait(10) for began in starts)
    while min(task.seconds for task in long) < 0.05:
        time.sleep(0.01)
    assert not any(task.future.done() for task in long)
    waiting = work.join("waits", lambda: "waits", "slow", OTHER)
    (stopped, *_), _ = wait([task.future for task in long], 30, "FIRST_COMPLETED")
    with pytest.raises(ValueError, match="takes too long"):
        stopped.result()
    assert waiting.future.result(10) == "waits"


def test_the_same_result_is_computed_once_though_asked_for_in_two_ways(work):
    """A second visitor waits for a cached result that the first one's slow map is still computing: that map
    must get its turn, although the second visitor has used the lane less."""
    cache: Cache[str] = Cache(4, scheduling.paused)
    log, began = [], threading.Event()

    def compute() -> str:
        for i in range(20):
            evaluated(1)
            log.append(i)
            began.set()
            time.sleep(0.01)
        return "map"

    first = work.join("shown", lambda: cache.get("map", compute), "slow", ME)
    assert began.wait(10)
    second = work.join("downloaded", lambda: cache.get("map", compute), "slow", OTHER)
    third = work.join("measured", lambda: cache.get("map", compute), "slow", ("10.0.0.3", "third"))
    assert [task.future.result(20) for task in (first, second, third)] == ["map"] * 3
    assert len(log) == 20


def test_one_pass_that_others_wait_for_keeps_its_turn(work):
    """A forward pass is kept for all lanes. A slow map that computes it does not let others go first."""
    passed, began = [], threading.Event()

    def other() -> None:
        evaluated(1)
        passed.append("other")

    def record() -> None:
        evaluated(1)
        with scheduling.undisturbed():
            began.set()
            time.sleep(0.1)  # the other computation is queued meanwhile
            evaluated(1)
            passed.append("pass")
        evaluated(1)
        passed.append("rest")

    first = work.join("first", record, "slow", ME)
    assert began.wait(10)
    second = work.join("second", other, "slow", OTHER)
    [task.future.result(10) for task in (first, second)]
    assert passed == ["pass", "other", "rest"]
