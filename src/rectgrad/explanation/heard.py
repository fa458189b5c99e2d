"""The library's warnings while a picture is explained, for the result that they concern."""

from __future__ import annotations

from rectgrad.engine.diagnose import listening, warn


class Heard:
    """Collects the library's warnings inside a `with` block, in this thread, and raises them after it; quiet:
    does not raise them."""

    def __init__(self, quiet: bool = False) -> None:
        self.sentences: list[str] = []
        self._quiet = quiet

    def __enter__(self) -> Heard:
        self._token = listening.set(self.sentences)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        listening.reset(self._token)
        for sentence in self.sentences if kind is None and not self._quiet else ():
            warn(sentence)
