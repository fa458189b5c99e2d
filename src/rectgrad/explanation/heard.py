"""The library's warnings while a picture is explained, for the result that they concern."""

from __future__ import annotations

import sys
import threading
import warnings

from rectgrad.engine.diagnose import warn

_LOCK = threading.RLock()  # `catch_warnings` changes the whole process: one at a time
_SHOWN: dict[str | tuple[str, type[Warning], int], int] = {}  # as Python's own registry of a module


class Heard:
    """Collects warnings inside a `with` block, and raises them at its end.

    The library's own are `sentences`. Those of the model and of torch are passed on as they are.
    """

    def __enter__(self) -> Heard:
        _LOCK.acquire()
        self._catching = warnings.catch_warnings(record=True)
        log = self._catching.__enter__()
        assert log is not None
        self._log, self._caller = log, _caller()
        warnings.simplefilter("always")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._catching.__exit__(None, None, None)
            if kind is None:
                self._raise_again()  # under the lock: another thread would hear it too
        finally:
            _LOCK.release()

    @property
    def sentences(self) -> list[str]:
        return [str(each.message) for each in self._log if self._own(each)]

    def _own(self, each: warnings.WarningMessage) -> bool:
        """The library's warnings point at the line that called it; those of a model, at the model."""
        return each.category is UserWarning and (each.filename, each.lineno) == self._caller

    def keep(self, count: int) -> None:
        """Drops the library's warnings but the first ones."""
        for each in [each for each in self._log if self._own(each)][count:]:
            self._log.remove(each)

    def _raise_again(self) -> None:
        for each in self._log:
            if self._own(each):
                warn(str(each.message))
            else:
                where = each.filename, each.lineno
                warnings.warn_explicit(each.message, each.category, *where, registry=_SHOWN)


def _caller() -> tuple[str, int]:
    """The file and line that called the library, as `diagnose.warn` finds them."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rectgrad"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
