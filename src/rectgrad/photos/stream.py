"""Prefetching: applies a function to many items in background threads, with a bounded lookahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int = 2,
    depth: int = 16,
    prompt: bool = False,
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """Yields (item, finished future) in order. At most `depth` results are held at a time.

    By default, `depth` items are started before the first is yielded. With `prompt`, each is yielded as soon
    as it is finished.
    """
    pool = ThreadPoolExecutor(workers)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            while len(waiting) >= depth or (prompt and waiting and waiting[0][1].done()):
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Future[Result]]:
    item, future = waiting.popleft()
    future.exception()  # blocks until the future is done
    return item, future


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
