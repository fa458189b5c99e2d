"""The library's warnings, for the map that they concern.

`rectgrad.explain` collects them under a lock of the whole process, which would make a fast map wait for a
slow one. The explorer is a process of its own: it may set the process's hook once and listen in each thread.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from rectgrad.explanation.heard import Heard, _caller

_here = threading.local()
_show = warnings.showwarning


def listen() -> None:
    """Warnings go to the thread that they came from, from now on."""
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = _route  # type: ignore[assignment]


def _route(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
    log = getattr(_here, "log", None)
    if log is None:
        _show(message, category, filename, lineno, *rest)
    else:
        log.append(warnings.WarningMessage(message, category, filename, lineno))


class HeardHere(Heard):
    """The warnings of this thread inside a `with` block, after `listen`."""

    def __enter__(self) -> HeardHere:
        self._outer = getattr(_here, "log", None)
        self._log = _here.log = []
        self._caller = _caller()
        return self

    def __exit__(self, *error: object) -> None:
        _here.log = self._outer
        for each in self._log:
            if not self._own(each):  # of the model or torch: for the terminal
                _show(each.message, each.category, each.filename, each.lineno)
