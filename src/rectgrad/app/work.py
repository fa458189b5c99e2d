"""Schedules computations.

Fast computations never wait for slow ones, identical requests share one computation, and visitors get equal
shares (`lanes.py`). A computation is stopped when no request waits for it anymore or when it takes too long.

Each lane computes one thing at a time. `join` and `leave` are only called on the event loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

from rectgrad.app.controls import check_count
from rectgrad.app.lanes import Lane, Owner
from rectgrad.methods.method import progress

SECONDS = 300  # limit of the computing time of one result
SECONDS_BUSY = 30  # the same while others wait for a thread
THREADS = 4  # slow maps that are begun; every thread that runs a network keeps its own buffers

LaneName = Literal["fast", "slow", "photos", "large photos", "models", "downloads"]
_running = threading.local()


class Stopped(BaseException):
    """Stops a computation that no request waits for. Not an Exception, so that no library handles it as a
    failed pass."""


class Task:
    """A computation, shared by all requests for it. `done` counts the inputs evaluated so far; `total` is
    their number, once it is known."""

    def __init__(self, key: Hashable, compute: Callable[[], Any], lane: Lane) -> None:
        self.key, self.waiting, self.done = key, 0, 0
        self.total: int | None = None
        self.stopped = False
        self.owners: list[Owner] = []
        self.seconds = 0.0
        self.lane = lane
        self.future: Future[Any] = Future()
        self._compute = compute

    def work(self) -> None:
        """Runs the computation and sets the future."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.run(self._compute)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def run(self, compute: Callable[[], Any]) -> Any:
        _running.task, token = self, progress.set(self._told)
        try:
            self.check()
            return compute()
        except Stopped:
            if self.stopped:
                raise
            raise ValueError(
                f"This takes too long: it was stopped after {self.seconds:.0f} seconds. "
                "Reduce the number of samples, steps or masks."
            ) from None
        finally:
            progress.reset(token)
            _running.task = None

    def _told(self, done: int, count: int) -> None:
        check_count(count)
        self.total = count

    def check(self) -> None:
        if self.stopped or self.seconds > (SECONDS_BUSY if self.lane.full() else SECONDS):
            raise Stopped

    def evaluated(self, inputs: int) -> None:
        self.done += inputs
        self.lane.checkpoint(self)
        self.check()


class Work:
    def __init__(self) -> None:
        self._lanes: dict[LaneName, Lane] = {
            "fast": Lane(),
            "slow": Lane(THREADS, background=True),
            "photos": Lane(2),
            "large photos": Lane(background=True),
            "models": Lane(background=True),
            "downloads": Lane(background=True),
        }
        self._tasks: dict[Hashable, Task] = {}

    def join(self, key: Hashable, compute: Callable[[], Any], lane: LaneName, owner: Owner) -> Task:
        """Starts a computation, or shares the running one. Every caller must call `leave` later."""
        task = self.running(key)
        if task is None:
            task = self._tasks[key] = Task(key, compute, self._lanes[lane])
            task.owners = [owner]
            task.lane.submit(task)
        else:
            task.owners = [*task.owners, owner]
        task.waiting += 1
        return task

    def running(self, key: Hashable) -> Task | None:
        """The computation with this key if it is queued or running, and has not been stopped."""
        task = self._tasks.get(key)
        return None if task is None or task.stopped or task.future.done() else task

    def leave(self, task: Task) -> None:
        task.waiting -= 1
        if task.waiting == 0:
            task.stopped = True
            task.future.cancel()
            task.lane.discard(task)
            if self._tasks.get(task.key) is task:
                del self._tasks[task.key]

    def close(self, seconds: float = 1.0) -> bool:
        """Stops everything. Returns whether all has ended within this time."""
        for task in self._tasks.values():
            task.stopped = True
        until = time.monotonic() + seconds
        return all(lane.idle.wait(max(until - time.monotonic(), 0)) for lane in self._lanes.values())


def evaluated(inputs: int) -> None:
    """Counts the inputs that the running computation evaluates, lets others go first, and stops it if no
    request waits for it or if it has taken too long."""
    task = getattr(_running, "task", None)
    if task is not None:
        task.evaluated(inputs)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While the running computation waits for another one, it does not keep the others of its lane waiting.
    Otherwise the one that it waits for would never get its turn."""
    task = getattr(_running, "task", None)
    if task is None:
        yield
        return
    with task.lane.paused(task):
        yield
    task.check()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The running computation keeps its turn: for a single pass whose result other lanes may wait for."""
    task, _running.task = getattr(_running, "task", None), None
    try:
        yield
    finally:
        _running.task = task
