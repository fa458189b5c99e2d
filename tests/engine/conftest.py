"""Which way a map was computed: on the recorder or over the bridge."""

from typing import Any

import pytest

from rectgrad.engine.backward import RecordedPass
from rectgrad.engine.bridge import BridgedPass


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For every backward pass that succeeded, "recorded" or "bridged"."""
    found: list[str] = []

    def watch(kind: Any, name: str) -> None:
        run = kind.backward

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            maps = run(self, *args, **kwargs)
            found.append(name)
            return maps

        monkeypatch.setattr(kind, "backward", watched)

    watch(RecordedPass, "recorded")
    watch(BridgedPass, "bridged")
    return found
