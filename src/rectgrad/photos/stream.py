"""Work ahead: a function applied to many items in other threads, a bounded number of them early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int = 2, depth: int = 16
) -> Iterator[tuple[Item, Future[Result]]]:
    """(item, its finished future) in order; at most `depth` results wait at a time."""
    pool = ThreadPoolExecutor(workers)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) >= depth:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(waiting: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Future[Result]]:
    item, future = waiting.popleft()
    future.exception()  # waits
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
