"""Ray, an optional dependency: a session, and the results of its tasks as they complete.

RAY_ADDRESS is the address of a cluster. Without it, Ray is started on this machine and stopped at the end of
the session.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Yields the `ray` module, initialised. Shuts Ray down at the end if it was started here."""
    ray = _import_ray()
    started_here = not ray.is_initialized()
    if started_here:
        # Without an address, Ray would look for the last cluster of this machine, even if it was killed.
        address = os.environ.get("RAY_ADDRESS") or "local"
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        if started_here:
            ray.shutdown()


class FailedTaskError(RuntimeError):
    """A task that failed, after its retries."""


def as_completed(ray: Any, tasks: dict[Any, Item]) -> Iterator[tuple[Item, Any]]:
    """Yields (item, result) for each task in order of completion; `tasks` maps a task to its item, and tasks
    can be added meanwhile. The result of a task that failed is a `FailedTaskError`: the others go on."""
    while tasks:
        (done,), _ = ray.wait(list(tasks), num_returns=1)
        item = tasks.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayError as error:
            result = FailedTaskError(reason(error))
        yield item, result


def completed(ray: Any, tasks: dict[Any, Item], name: Callable[[Item], str]) -> Iterator[tuple[Item, Any]]:
    """The results of the tasks that succeed. At the end, raises an error that names the others."""
    failed: dict[str, str] = {}
    for item, result in as_completed(ray, tasks):
        if isinstance(result, FailedTaskError):
            failed[name(item)] = str(result)
        else:
            yield item, result
    if failed:
        said = "; ".join(f"{each} ({why})" for each, why in failed.items())
        raise RuntimeError(f"{len(failed)} failed on Ray: {said}. The others are finished and kept.")


def reason(error: BaseException) -> str:
    """The error that a task raised, in one line, without the traceback from its worker."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}".partition("\n")[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0].strip()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs Ray: pip install 'rectgrad[ray]'") from None
    return ray
