"""Collects the library's warnings while a picture is explained, so that they can be stored in its result."""

from __future__ import annotations

from rectgrad.engine.diagnose import listening, warn


class WarningLog:
    """Collects this thread's warnings from the library inside a `with` block and issues them at its end.

    quiet: collects them only.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.messages: list[str] = []
        self._quiet = quiet

    def __enter__(self) -> WarningLog:
        self._token = listening.set(self.messages)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        listening.reset(self._token)
        for message in self.messages if kind is None and not self._quiet else ():
            warn(message)
