"""Fair shares of computing time.

A lane runs one computation at a time. Visitors that have used it least in the last minute come first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

HALF_LIFE = 30  # seconds after which a visitor's use of a lane counts half
NICE = 5  # of the threads of a background lane

Owner = tuple[str, str]  # network address and session


class Item(Protocol):
    """A computation: who waits for it, how long it has run, and what to run."""

    owners: list[Owner]
    seconds: float

    def work(self) -> None: ...


class Usage:
    """Seconds that each visitor used recently, with exponential decay."""

    def __init__(self) -> None:
        self._used: dict[str, float] = defaultdict(float)
        self._at = time.monotonic()

    def add(self, owner: Owner, seconds: float) -> None:
        now = time.monotonic()
        factor, self._at = 0.5 ** ((now - self._at) / HALF_LIFE), now
        kept = {name: used * factor for name, used in self._used.items() if used * factor > 1e-3}
        self._used = defaultdict(float, kept)
        for name in {*owner}:
            self._used[name] += seconds

    def of(self, item: Item) -> tuple[float, float]:
        """Time is shared among addresses, then among their sessions: many sessions get no more."""
        return min((self._used.get(a, 0.0), self._used.get(s, 0.0)) for a, s in item.owners)


class Lane:
    """Runs one computation at a time, in `threads` threads.

    With several threads, as many computations can be begun. They take turns: at every `checkpoint`, a visitor
    that has used less comes first. The threads of a `background` lane have a low priority, where the system
    supports that for single threads (Linux).
    """

    def __init__(self, threads: int = 1, background: bool = False) -> None:
        self.idle = threading.Event()  # nothing runs or waits
        self.idle.set()
        self._threads, self._background = threads, background
        self._started = 0
        self._usage = Usage()
        self._queue: list[Item] = []
        self._begun: list[Item] = []
        self._paused: list[Item] = []  # of those begun
        self._turn: Item | None = None
        self._since = 0.0
        self._changed = threading.Condition()

    def submit(self, item: Item) -> None:
        with self._changed:
            self._queue.append(item)
            self.idle.clear()
            if self._started < self._threads:
                self._started += 1
                threading.Thread(target=self._serve, daemon=True).start()
            self._changed.notify_all()

    def discard(self, item: Item) -> None:
        """Removes a computation that has not begun."""
        with self._changed:
            if item in self._queue:
                self._queue.remove(item)
                self._rest()

    def full(self) -> bool:
        """Whether something waits and every thread is taken."""
        return len(self._queue) > 0 and len(self._begun) == self._threads

    def checkpoint(self, item: Item) -> None:
        """Called by a running computation between two passes. Others may go first."""
        with self._changed:
            self._release(item)
            self._changed.wait_for(lambda: self._is_next(item))
            self._take(item)

    @contextlib.contextmanager
    def paused(self, item: Item) -> Iterator[None]:
        """For a running computation that waits for another one, perhaps in this lane: others run
        meanwhile."""
        with self._changed:
            self._paused.append(item)
            self._release(item)
        try:
            yield
        finally:
            with self._changed:
                self._paused.remove(item)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_next(item))
                self._take(item)

    def _serve(self) -> None:
        if self._background:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() in self._queue)
                item = self._next()
                assert item is not None
                self._queue.remove(item)
                self._begun.append(item)
                self._take(item)
            try:
                item.work()
            finally:
                with self._changed:
                    self._begun.remove(item)
                    self._release(item)
                    self._rest()
            del item

    def _next(self) -> Item | None:
        """Whose turn it is: of those begun, and of those that wait if a thread is free."""
        if self._turn is not None:
            return None
        free = len(self._begun) < self._threads
        ready = [item for item in self._begun if item not in self._paused]
        return min([*ready, *(self._queue if free else ())], key=self._usage.of, default=None)

    def _is_next(self, item: Item) -> bool:
        return self._next() is item

    def _take(self, item: Item) -> None:
        self._turn, self._since = item, time.monotonic()

    def _release(self, item: Item) -> None:
        seconds = time.monotonic() - self._since
        item.seconds += seconds
        for owner in item.owners:
            self._usage.add(owner, seconds / len(item.owners))
        self._turn = None
        self._changed.notify_all()

    def _rest(self) -> None:
        if not self._queue and not self._begun:
            self.idle.set()
