"""Schedules computations.

Fast computations never wait for slow ones, identical requests share one computation, and a computation is
stopped when no request waits for it anymore.

Two threads do all the work (every thread that runs a network keeps its own buffers): one for maps that need
a single backward pass, one for maps that need many. `join` and `leave` are only called on the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rectgrad.app.controls import check_count
from rectgrad.methods.method import progress

_running = threading.local()


class Stopped(BaseException):
    """Stops a computation that no request waits for. Not an Exception, so that no library handles it as a
    failed pass."""


class Task:
    """A computation, shared by all requests for it. `done` counts the inputs evaluated so far; `total` is
    their number, once it is known."""

    def __init__(self, key: Hashable) -> None:
        self.key, self.waiting, self.done = key, 0, 0
        self.total: int | None = None
        self.stopped = False
        self.future: Future[Any]

    def run(self, compute: Callable[[], Any]) -> Any:
        _running.task, token = self, progress.set(self._told)
        try:
            self.check()
            return compute()
        finally:
            progress.reset(token)
            _running.task = None

    def _told(self, done: int, count: int) -> None:
        check_count(count)
        self.total = count

    def check(self) -> None:
        if self.stopped:
            raise Stopped


class Work:
    def __init__(self) -> None:
        self._threads = {slow: ThreadPoolExecutor(1) for slow in (False, True)}
        self._tasks: dict[Hashable, Task] = {}

    def join(self, key: Hashable, compute: Callable[[], Any], slow: bool) -> Task:
        """Starts a computation, or shares the running one. Every caller must call `leave` later."""
        task = self.running(key)
        if task is None:
            task = self._tasks[key] = Task(key)
            task.future = self._threads[slow].submit(task.run, compute)
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
            if self._tasks.get(task.key) is task:
                del self._tasks[task.key]

    def close(self) -> None:
        for task in self._tasks.values():
            task.stopped = True
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)


def evaluated(inputs: int) -> None:
    """Counts the inputs that the running computation evaluates, and stops it if no request waits for it."""
    task = getattr(_running, "task", None)
    if task is not None:
        task.done += inputs
        task.check()
