"""Progress of long-running work on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[..., None]  # called after each item, or with the number of items that were done
SOON = 2.0  # seconds after which the progress of a single map is shown


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Advance]:
    if total < 2:
        yield lambda done=1: None
    elif sys.stderr.isatty():
        with _bar(total, what) as advance:
            yield advance
    else:
        yield _lines(total, what)


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Shows the progress of single maps that take many passes of the network, if they take long."""
    from rectgrad.methods.method import progress as told

    started = 0.0
    shown: Advance | None = None
    with contextlib.ExitStack() as display:

        def tell(done: int, count: int) -> None:
            nonlocal started, shown
            if done == 1:  # another map begins
                display.close()
                started, shown = time.monotonic(), None
            if shown is not None:
                shown()
            elif done < count and time.monotonic() - started > SOON:
                shown = display.enter_context(progress(count, "evaluating"))
                shown(done)

        token = told.set(tell)
        try:
            yield
        finally:
            told.reset(token)


_live: list[Any] = []  # the display on the terminal; there can be only one


@contextlib.contextmanager
def _bar(total: int, what: str) -> Iterator[Advance]:
    with contextlib.nullcontext(_live[0]) if _live else _display() as shown:
        task, started, done = shown.add_task(what, total=total, rate=""), time.monotonic(), 0

        def advance(items: int = 1) -> None:
            nonlocal done
            done += items
            shown.update(task, completed=done, rate=_rate(done / max(time.monotonic() - started, 1e-9)))

        yield advance
        if len(shown.tasks) > 1:
            shown.remove_task(task)


@contextlib.contextmanager
def _display() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    what, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    columns = (what, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        _live.append(shown)
        try:
            yield shown
        finally:
            _live.clear()


def _lines(total: int, what: str, every: float = 10.0) -> Advance:
    started = printed = time.monotonic()
    done = 0

    def advance(items: int = 1) -> None:
        nonlocal printed, done
        done += items
        now = time.monotonic()
        if now - printed >= every or done == total:
            printed, rate = now, done / max(now - started, 1e-9)
            left = f", {(total - done) / rate:.0f} s left" if done < total else ""
            print(f"{what}: {done}/{total}, {_rate(rate)}{left}", file=sys.stderr, flush=True)

    return advance


def _rate(rate: float) -> str:
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
