"""Progress of long-running work on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each item."""
    if total < 2:
        yield lambda: None
    elif sys.stderr.isatty():
        with _bar(total, what) as advance:
            yield advance
    else:
        yield _lines(total, what)


@contextlib.contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task, started = shown.add_task(what, total=total, rate=""), time.monotonic()

        def advance() -> None:
            shown.advance(task)
            done = shown.tasks[0].completed
            shown.update(task, rate=_rate(done / max(time.monotonic() - started, 1e-9)))

        yield advance


def _lines(total: int, what: str, every: float = 10.0) -> Callable[[], None]:
    started = printed = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal printed, done
        done += 1
        now = time.monotonic()
        if now - printed >= every or done == total:
            printed, rate = now, done / max(now - started, 1e-9)
            left = f", {(total - done) / rate:.0f} s left" if done < total else ""
            print(f"{what}: {done}/{total}, {_rate(rate)}{left}", file=sys.stderr, flush=True)

    return advance


def _rate(rate: float) -> str:
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
