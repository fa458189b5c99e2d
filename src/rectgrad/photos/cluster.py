"""Ray, an optional dependency: a session, and the results of its tasks as they complete.

RAY_ADDRESS is the address of a cluster. Without it, Ray is started on this machine and stopped at the end of
the session.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Yields the `ray` module, initialised. Shuts Ray down at the end if it was started here."""
    ray = _import_ray()
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        if started_here:
            ray.shutdown()


def as_completed(ray: Any, tasks: dict[Any, Item]) -> Iterator[tuple[Item, Any]]:
    """Yields (item, result) for each task in order of completion; `tasks` maps a task to its item."""
    waiting = dict(tasks)
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        yield waiting.pop(done), ray.get(done)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs Ray: pip install 'rectgrad[ray]'") from None
    return ray
