"""Streamed responses: fast maps first, then their specificity, then slow maps with their progress.

A stream ends early if a newer request from the same page replaces it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from rectgrad.app import controls, drawing
from rectgrad.app.layer_names import readable
from rectgrad.app.query import Query
from rectgrad.app.service import QS, Prediction, Service
from rectgrad.app.sessions import Request
from rectgrad.app.work import Task, Work
from rectgrad.explanation import Explanation, recommended
from rectgrad.explanation.trust import LOW, caution
from rectgrad.methods import Method
from rectgrad.methods.catalog import describe, name_of

REST = 0.15  # seconds without a newer request before the specificity is computed
TICK = 0.25  # seconds between progress messages


class ReplacedError(Exception):
    """A newer request from the same page has arrived."""


@dataclass
class Wanted:
    """The maps of a request.

    `have`, `known`: methods whose maps or specificities the page already has. `measure`: slow methods whose
    specificity was requested.
    """

    service: Service
    prediction: Prediction
    query: Query
    have: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    measure: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target = self.query.resolve_target(self.prediction.top)
        self.methods = self.query.configured()

    def missing(self) -> list[tuple[str, Method]]:
        """The maps to send."""
        return [(name, method) for name, method in self.methods.items() if name not in self.have]

    def slow(self, method: Method) -> bool:
        return self.service.is_slow(self.prediction, method, self.target)

    def key(self, method: Method) -> Hashable:
        return self.service.key(self.prediction, method, self.target)

    def compute(self, method: Method) -> Callable[[], Any]:
        return lambda: self.service.map(self.prediction, method, self.target)


class Waiting:
    """The computations that a request waits for. It leaves all of them at the end of the `with` block."""

    def __init__(self, work: Work, request: Request) -> None:
        self.work, self.request = work, request
        self._joined: list[Task] = []

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._joined:
            self.work.leave(task)

    def join(self, key: Hashable, compute: Callable[[], Any], slow: bool) -> Task:
        task = self.work.join(key, compute, "slow" if slow else "fast", self.request.owner)
        self._joined.append(task)
        return task

    async def rest(self, seconds: float) -> None:
        """Waits; raises `ReplacedError` if a newer request arrives in the meantime."""
        try:
            await asyncio.wait_for(self.request.replaced.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return
        raise ReplacedError

    async def result(self, task: Task) -> AsyncIterator[Any]:
        """Yields the number of inputs evaluated so far, repeatedly, and finally ("result", value)."""
        future = asyncio.wrap_future(task.future)
        replaced = asyncio.ensure_future(self.request.replaced.wait())
        try:
            while not future.done():
                await asyncio.wait({future, replaced}, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                if self.request.replaced.is_set():
                    raise ReplacedError
                if not future.done():
                    yield task.done
            yield "result", future.result()
        finally:
            replaced.cancel()
            if not future.done():
                future.add_done_callback(lambda done: done.cancelled() or done.exception())


async def maps(work: Work, request: Request, wanted: Wanted) -> AsyncIterator[bytes]:
    """Streams the fast maps, their specificities, and then the slow maps one by one."""
    missing = wanted.missing()
    with Waiting(work, request) as waiting:
        # A slow map that an older request of this page started continues: join it before that request leaves.
        tasks = {
            name: waiting.join(wanted.key(method), wanted.compute(method), wanted.slow(method))
            for name, method in missing
            if not wanted.slow(method) or work.running(wanted.key(method))
        }
        slow = [(name, method) for name, method in wanted.methods.items() if wanted.slow(method)]
        slow.sort(key=lambda each: (each[0] not in tasks, controls.evaluations(each[1]) or 0))  # fewest first
        try:
            for name, method in missing:
                if (name, method) not in slow:
                    async for each in _map(waiting, wanted, name, method, tasks[name]):
                        yield each
            async for each in _specificities(waiting, wanted):
                yield each
            for name, method in slow:
                task = tasks.get(name) or waiting.join(wanted.key(method), wanted.compute(method), slow=True)
                async for each in _map(waiting, wanted, name, method, task):
                    yield each
                async for each in _specificity(waiting, wanted, name, method):
                    yield each
            yield drawing.message({"kind": "end"})
        except ReplacedError:
            return


async def _map(
    waiting: Waiting, wanted: Wanted, name: str, method: Method, task: Task
) -> AsyncIterator[bytes]:
    """Streams progress messages, and then the map or an error."""
    try:
        async for each in waiting.result(task):
            if isinstance(each, int):
                total = task.total or controls.evaluations(method)
                yield drawing.message({"kind": "progress", "method": name, "done": each, "total": total})
                continue
            found = each[1]
            described, data = drawing.packed(drawing.plane(name, found.values, wanted.query))
            described |= {"kind": "map", "method": name, "settings": settings(method)}
            described |= {"seconds": found.seconds, "warnings": found.explanation.warnings}
            yield drawing.message(described, data)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        yield drawing.message({"kind": "error", "method": name, "error": message_of(error)})


async def _specificities(waiting: Waiting, wanted: Wanted) -> AsyncIterator[bytes]:
    """Streams the specificities of the fast maps, once the controls have stopped moving: each needs a second
    map."""
    await waiting.rest(REST)
    for name, method in wanted.methods.items():
        if not wanted.slow(method):
            async for each in _specificity(waiting, wanted, name, method):
                yield each


async def _specificity(waiting: Waiting, wanted: Wanted, name: str, method: Method) -> AsyncIterator[bytes]:
    if name in wanted.known:
        return
    service, prediction, target = wanted.service, wanted.prediction, wanted.target
    content: dict[str, Any] = {"kind": "specificity", "method": name, "value": None, "low": False}
    ready = service.has_specificity(prediction, method, target)
    if controls.is_slow(method) and not ready and name not in wanted.measure:
        yield drawing.message(content | {"note": "", "measurable": True})
        return
    key = ("specificity", wanted.key(method))
    compute = lambda: service.measured(prediction, method, target)  # noqa: E731
    slow = controls.is_slow(method) and not ready
    try:
        task = waiting.join(key, compute, slow)
        async for each in waiting.result(task):
            if not isinstance(each, int):
                found: Explanation = each[1]
                yield drawing.message(content | _described(found))
            elif slow:
                progress = {"done": each, "total": task.total or controls.evaluations(method)}
                yield drawing.message({"kind": "progress", "method": name} | progress)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        yield drawing.message(content | {"note": message_of(error)})


def _described(found: Explanation) -> dict[str, Any]:
    """The specificity as the page shows it. The note does not suggest a better method: a button does."""
    value, note = found.specificity, found.specificity_note
    low = value is not None and value < LOW
    if value is not None and low:
        note = caution(value, recommended("why this class"))
    return {"value": value, "note": note, "low": low}


async def layers(
    work: Work, request: Request, service: Service, prediction: Prediction, query: Query
) -> AsyncIterator[bytes]:
    key = ("layers", prediction.digest, repr(query))
    with Waiting(work, request) as waiting:
        task = waiting.join(key, lambda: service.layers(prediction, query), slow=False)
        try:
            async for each in waiting.result(task):
                for name, values in [] if isinstance(each, int) else each[1]:
                    described, data = drawing.packed(values)
                    described |= {"kind": "layer", "name": name, "title": readable(name)}
                    yield drawing.message(described, data)
            yield drawing.message({"kind": "end"})
        except ReplacedError:
            return
        except (ValueError, TypeError, RuntimeError) as error:
            yield drawing.message({"kind": "error", "error": message_of(error)})


async def sparsity(
    work: Work, request: Request, service: Service, prediction: Prediction, query: Query
) -> AsyncIterator[bytes]:
    """Computes one value of q at a time, so that a map does not have to wait for the whole curve."""
    with Waiting(work, request) as waiting:
        try:
            for q in QS:
                key = ("sparsity", prediction.digest, repr(query), q)
                compute = lambda q=q: service.sparsity(prediction, query, q)  # noqa: E731
                async for each in waiting.result(waiting.join(key, compute, slow=False)):
                    if not isinstance(each, int):
                        yield drawing.message({"kind": "point", "q": q, "gini": each[1]})
            yield drawing.message({"kind": "end"})
        except ReplacedError:
            return
        except (ValueError, TypeError, RuntimeError) as error:
            yield drawing.message({"kind": "error", "error": message_of(error)})


def settings(method: Method) -> str:
    """The options that differ from those of the listed method, for a caption."""
    return describe(method).removeprefix(name_of(method).replace("_", " ")).strip()


def advice() -> dict[str, str]:
    """The method that the page starts with, and the one that it suggests."""
    return {"first": recommended("where"), "recommended": recommended("why this class")}


def message_of(error: BaseException) -> str:
    """The error message for the user, without the folders of files."""
    if isinstance(error, MemoryError):
        return "Not enough memory."
    return _FOLDERS.sub("", str(error)) or type(error).__name__


# The folders of an absolute path. They may contain spaces after a quotation mark.
_FOLDERS = re.compile(
    r"""(?<=['"])(?:[A-Za-z]:)?[\\/][^'"\n]*[\\/]"""
    r"""|(?<![\w.:/])(?:[A-Za-z]:)?[\\/](?:[^\s'"\\/]+[\\/])+"""
)
