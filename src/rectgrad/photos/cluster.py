"""Ray, where it is installed: a session, and results of tasks as they come. What tasks do lives elsewhere.

RAY_ADDRESS names a cluster; without it, Ray starts on this machine's cores and ends with the session.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, TypeVar

What = TypeVar("What")


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Ray, started where it was not: its module."""
    ray = _imported()
    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def as_they_come(ray: Any, tasks: dict[Any, What]) -> Iterator[tuple[What, Any]]:
    """(what a task was about, its result), the first finished first."""
    waiting = dict(tasks)
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        yield waiting.pop(done), ray.get(done)


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs Ray: pip install 'rectgrad[ray]'") from None
    return ray
