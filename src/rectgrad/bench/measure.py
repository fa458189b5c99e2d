"""Timing in interleaved rounds, so that a temporary slowdown of the machine affects all contenders."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

Run = Callable[[], Any]
Advance = Callable[[], None]
Progress = Callable[[int, str], AbstractContextManager[Advance]]  # (steps, description)
LEAST = 0.05  # minimum duration of one measurement in seconds


@contextlib.contextmanager
def no_progress(total: int, what: str) -> Iterator[Advance]:
    yield lambda: None


class Times(NamedTuple):
    """Seconds per call for each contender and round; the errors of those that failed; remarks."""

    seconds: dict[str, list[float]]
    failed: dict[str, str]
    notes: dict[str, str]


def race(runs: Mapping[str, Run], rounds: int, device: str, advance: Advance) -> Times:
    """Times every run in every round. The first run is the base: if it fails, nothing is timed. Other runs
    that fail during their warm-up are skipped. `advance` is called `steps` times."""
    failed: dict[str, str] = {}
    notes: dict[str, str] = {}
    base = next(iter(runs))
    for name, run in runs.items():
        if base not in failed:
            _prepare(name, run, failed, notes)
        for _ in range(rounds + 1 if name in failed or base in failed else 1):
            advance()
    if base in failed:
        return Times({}, failed, {})
    racing = {name: run for name, run in runs.items() if name not in failed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = interleaved(racing, rounds, device, advance)
    return Times(times, failed, notes)


def steps(runs: int, rounds: int) -> int:
    """The number of steps of a race: a warm-up and the rounds of each run."""
    return runs * (rounds + 1)


def _prepare(name: str, run: Run, failed: dict[str, str], notes: dict[str, str]) -> None:
    try:
        note = warm_up(run)
    except Exception as error:
        failed[name] = reason(error)
    else:
        notes |= {name: note} if note else {}


def warm_up(run: Run) -> str:
    """Makes one call and returns its first warning in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return " ".join(messages[0].split()) if messages else ""


def reason(error: Exception) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def repeats(run: Run, device: str) -> int:
    """The number of calls per measurement. Determining it is also the second call of the warm-up."""
    return max(1, round(LEAST / max(seconds(run, 1, device), 1e-6)))


def interleaved(
    runs: Mapping[str, Run], rounds: int, device: str, advance: Advance
) -> dict[str, list[float]]:
    """Seconds per call for each run and round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    calls = {name: repeats(run, device) for name, run in runs.items()}
    for number in range(rounds):
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for name in order(list(runs), number):
            taken[name].append(seconds(runs[name], calls[name], device))
            if len(taken[name]) == 1:
                advance()
        for name, values in taken.items():
            found[name].append(statistics.median(values))
    return found


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: shuffled, with the base at the start, in the middle and at the end."""
    base, *others = names
    shuffled = random.Random(number).sample(others, len(others))
    half = len(others) // 2
    return [base, *shuffled[:half], base, *shuffled[half:], base]


def seconds(run: Run, repeats: int, device: str) -> float:
    """Seconds per call, including the work of the device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def ratios(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratios within each round, because a slowdown of the machine affects both."""
    return [a / b for a, b in zip(mine, base, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def rows(times: Times) -> list[dict[str, Any]]:
    """The medians over the rounds and the quartiles of each contender. The first is the base."""
    base = next(iter(times.seconds.values()), [])
    return [_row(name, mine, base, times.notes.get(name)) for name, mine in times.seconds.items()]


def _row(name: str, mine: list[float], base: list[float], note: str | None) -> dict[str, Any]:
    spent, ratio = quartiles(mine), quartiles(ratios(mine, base))
    return {
        "name": name,
        "ms": 1000 * spent[1],
        "ms_quartiles": [1000 * spent[0], 1000 * spent[2]],
        "ratio": ratio[1],
        "ratio_quartiles": [ratio[0], ratio[2]],
        "seconds": mine,
        "note": note,
    }


def failures(times: Times) -> list[dict[str, str]]:
    return [{"name": name, "reason": why} for name, why in times.failed.items()]
