"""The way back of a noted pass, to be gone again by others that do the same: by its ops, on what another pass
kept. On a GPU device_graph.py does it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rectgrad.linked import LinkedTape, Unlinked
from rectgrad.linked_pass import Arrived, pass_on
from rectgrad.op import Current, Op
from rectgrad.passes import Maps
from rectgrad.script import Call, Following


class Found(NamedTuple):
    """What a way back leaves: what arrives at the inputs, and numbers that are finite if all was."""

    arrived: Arrived
    sums: list[Any]


class Links(NamedTuple):
    """The ops of a pass, those that stand for its inputs, and the one that the way back begins at."""

    ops: Sequence[Op]
    entries: Sequence[Op]
    root: Op
    current: Current

    def back(self, R: Tensor) -> Found:
        """The way back from R. Of the record, what was kept of the data is gone then."""
        self.current.sums, self.root.R = [], R
        for op in reversed(self.ops):
            if op.R is not None:
                pass_on(op)
            op.forget()
        arrived: Arrived = []
        for entry in self.entries:
            arrived.append(entry.R)
            entry.R = None
        return Found(arrived, self.current.sums)


class Turn:
    """Who may use what only one can: a tape, until all is done or it is gone."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._whose: Callable[[], LinkedTape | None] = lambda: None

    def take(self, tape: LinkedTape) -> bool:
        with self._guard:
            other = self._whose()
            if other is not None and not other.ended:
                return False
            self._whose = weakref.ref(tape)
            return True


class Again:
    """The ops themselves, on what another pass kept."""

    def __init__(self, links: Links) -> None:
        self.turn, self._links = Turn(), links
        self._keeping = [op for op in links.ops if any(True for _ in op.held())]
        self._numbers = [(len(op.inputs), len(op.needed), op._output is not None) for op in self._keeping]
        self._total = sum(map(sum, self._numbers))
        self._steps = [op.step for op in links.ops if op.step is not None]

    def follow(self, calls: Sequence[Call]) -> Following:
        """A tape for a pass that should be as noted."""
        return Following(calls)

    def start(self, inputs: Maps) -> None:
        """Nothing: the model does all."""

    def give(self, tape: Following, answer: Any) -> None:
        """Nothing: what the model made has its values."""

    def __call__(self, R: Tensor, tape: Following) -> Found:
        if len(tape.kept) != self._total:
            raise Unlinked("not all was kept")
        coming = iter([x.detach() for x in tape.kept])
        for op, (inputs, needed, output) in zip(self._keeping, self._numbers, strict=True):
            op.inputs = tuple([next(coming) for _ in range(inputs)])
            op.needed = tuple([next(coming) for _ in range(needed)])
            op._output = next(coming) if output else None
        del coming  # on the way back, each op lets go what is its
        tape.kept.clear()
        for step in self._steps:
            step.meet_again()
        return self._links.back(R)

    def end(self, tape: Following) -> None:
        """Also of a pass that did not come so far."""
        tape.over = tape.ended = True
