"""Python's search for garbage waits while a pass runs: its many records are none, and to look through them
again and again takes a sixth of the time."""

from __future__ import annotations

import gc
import threading


class Quiet:
    """A pause that threads share: it ends with the last of them."""

    def __init__(self) -> None:
        self._lock, self._users, self._resume = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._resume = gc.isenabled()
                gc.disable()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._resume:
                gc.enable()


quiet = Quiet()
