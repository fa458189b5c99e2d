"""A small cache for results that several visitors may request at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cache(Generic[T]):
    """A small LRU cache. Threads that request the same key wait for a single computation.

    They wait inside `pause()`: see `work.paused`.
    """

    def __init__(self, size: int, pause: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.size, self._pause = size, pause
        self._entries: OrderedDict[Hashable, T] = OrderedDict()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._entries

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        while not own.acquire(blocking=False):
            with self._pause(), own:
                pass  # not held while the pause ends, which may take long
        try:
            with self._lock:
                if key in self._entries:
                    self._entries.move_to_end(key)
                    return self._entries[key]
            value = compute()
            with self._lock:
                self._entries[key] = value
                self._evict()
            return value
        finally:
            own.release()

    def discard(self, matches: Callable[[Any], bool]) -> None:
        with self._lock:
            for key in [key for key in self._entries if matches(key)]:
                del self._entries[key]
            self._evict()

    def _evict(self) -> None:
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        self._locks = {
            key: lock for key, lock in self._locks.items() if key in self._entries or lock.locked()
        }
