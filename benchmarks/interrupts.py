"""Interrupts calls at random moments: each KeyboardInterrupt must be raised and leave nothing behind.

    OMP_NUM_THREADS=1 python benchmarks/interrupts.py [--count 4000] [--seed 0] [--out FILE]

Half of the interrupts are raised by the handler of a timer signal, like Ctrl-C; the others are sent to the
thread with `PyThreadState_SetAsyncExc`. Every call is interrupted at a time drawn uniformly from [0, 1.1 *
its usual duration]; calls that have finished by then are not counted. Afterwards torch's modes, the garbage
collector, the random states, the model and the inputs must be unchanged; the next two calls, first from
another thread, then from this one, must return the expected map; and freeing the traceback must change
nothing. A call that does not return within --wait seconds is stuck, and the rest runs in a new process. The
exit status is 1 if anything was wrong. Takes about three minutes on one core. Needs `signal.setitimer`, which
is not available on Windows. Writes results/bench/interrupts.json by default.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rectgrad
from rectgrad.bench.environment import commit, environment
from rectgrad.photos import files

TOLERANCE = 1e-6  # of a map's largest value
MOST_ATTEMPTS = 10  # per interrupt: on a busy machine, a call may finish before it is interrupted
MOST_PROCESSES = 20  # a new one is needed after each stuck call
MOST_FAULTS = 50  # written to the record; the others are only counted
LEAD = 1e-3  # seconds, enough for a thread to start
RECORD = "record"  # stands for `rectgrad.record` among the names of methods
OPTIONS: dict[str, dict[str, Any]] = {
    "rectgrad": {"q": 80.0},
    "guided_backprop": {},
    "saliency": {},
    "smoothgrad": {"samples": 3},
    "epsilon_lrp": {},
    "deeplift": {},
    RECORD: {"q": 80.0},
}


# --- the networks ------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    """A linear function that the recorder cannot link, so that the model needs the autograd bridge."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WriteOnView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :2][..., 0] = 0.0
        return y


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(x)


class Net(nn.Module):
    """Convolutions, batch norm, a ReLU module that is used twice, and a sum; forward modifies attributes."""

    def __init__(self, middle: nn.Module | None = None, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.middle, self.second = middle or nn.Identity(), nn.Conv2d(8, 8, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace), nn.Linear(8, 5)
        self.calls, self.shapes = 0, list[torch.Size]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        x = self.middle(self.relu(self.norm(self.first(x))))
        return self.head(self.relu(self.second(x) + x).mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net().eval(),
    "in-place": lambda: Net(inplace=True).eval(),
    "autograd function": lambda: Net(Doubled()).eval(),
    "write on a view": lambda: Net(WriteOnView()).eval(),
    "training mode": lambda: Net().train(),
}
CASES = tuple(itertools.product(NETWORKS, OPTIONS))


def network(name: str) -> nn.Module:
    """A network with fixed weights; the global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name]()


def compute(model: nn.Module, x: Tensor, method: str) -> Tensor:
    if method == RECORD:
        return rectgrad.record(model, x).attribute("rectgrad", 1, **OPTIONS[method])
    return rectgrad.attribute(model, x, method, 1, **OPTIONS[method])


# --- the two kinds of interrupt ----------------------------------------------------------------------------


class BySignal:
    """Uses a timer signal whose handler raises KeyboardInterrupt in the main thread."""

    def __init__(self) -> None:
        self.stopped, self.sent, self._open = True, False, False
        self.where = ""  # what the main thread was doing
        self._former = signal.signal(signal.SIGALRM, self._raise)

    def start(self, delay: float) -> None:
        self.stopped, self.sent, self._open, self.where = False, False, True, ""
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self.sent, self._open, self.where = True, False, place(frame)
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Nothing is raised after this returns. Must be called again if it was interrupted itself."""
        self._open = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.stopped = True

    def close(self) -> None:
        signal.signal(signal.SIGALRM, self._former)


class ByThread:
    """Uses another thread, which sets an exception for the main thread to raise.

    The two threads communicate through plain attributes: a lock or event that the main thread holds when it
    is interrupted could remain locked.
    """

    def __init__(self) -> None:
        self.stopped, self.sent, self._open, self._done = True, False, False, True
        self.where = ""
        self._main = threading.get_ident()
        # The other thread needs the GIL to interrupt. With the default interval it may wait 5 ms for it.
        self._former = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)

    def start(self, delay: float) -> None:
        """Returns after LEAD seconds. Busy-waits, because a sleep may take longer than requested."""
        self.stopped, self.sent, self._open, self._done = False, False, False, False
        begin = time.perf_counter() + LEAD
        _thread.start_new_thread(self._send, (begin + delay,))
        while time.perf_counter() < begin:
            pass
        self._open = True

    def _send(self, moment: float) -> None:
        # On a busy machine, an ordinary thread wakes up late, and more calls finish before the interrupt.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        time.sleep(max(moment - time.perf_counter(), 0))
        if self._open:
            self.sent = True
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), interrupt)
        self._done = True

    def stop(self) -> None:
        """As above. An exception that was set is raised here at the latest."""
        self._open = False
        while not self._done:
            time.sleep(1e-5)
        for _ in range(100):
            pass
        self.stopped = True

    def close(self) -> None:
        sys.setswitchinterval(self._former)


KINDS: dict[str, Callable[[], BySignal | ByThread]] = {"signal": BySignal, "thread": ByThread}


class Interrupted:
    """One interrupted call. outcome: "surfaced", "swallowed", "converted" into another exception, or "late"
    if the call had finished. Holds the exception with its traceback, like an interactive interpreter."""

    def __init__(self, interrupt: BySignal | ByThread, delay: float, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        returned = False
        try:
            interrupt.start(delay)
            call()
            returned = True
            interrupt.stop()
        except BaseException as error:
            self.error = error
        while not interrupt.stopped:
            with contextlib.suppress(KeyboardInterrupt):  # it arrived after the call had already failed
                interrupt.stop()
        self.outcome = self._outcome(interrupt.sent, returned)
        self.where = interrupt.where or (place_of(self.error.__traceback__) if self.error is not None else "")
        self.message = f"{type(self.error).__name__}: {self.error}" if self.outcome == "converted" else ""

    def _outcome(self, sent: bool, returned: bool) -> str:
        if isinstance(self.error, KeyboardInterrupt):
            return "late" if returned else "surfaced"
        if self.error is not None:
            return "converted"
        return "swallowed" if sent else "late"


def place(frame: FrameType | None) -> str:
    """The innermost line, and the line in rectgrad that it was called from."""
    lines: list[str] = []
    while frame is not None and len(lines) < 2:
        module = str(frame.f_globals.get("__name__"))
        if not lines or module.startswith("rectgrad."):
            lines.append(f"{module}:{frame.f_lineno} {frame.f_code.co_name}")
            if module.startswith("rectgrad."):
                break
        frame = frame.f_back
    return " < ".join(lines)


def place_of(trace: TracebackType | None) -> str:
    """The same for the place where an exception was raised."""
    lines = [
        (str(frame.f_globals.get("__name__")), f":{line} {frame.f_code.co_name}")
        for frame, line in traceback.walk_tb(trace)
    ][::-1]
    ours = next((line for line in lines if line[0].startswith("rectgrad.")), None)
    return " < ".join("".join(line) for line in dict.fromkeys([*lines[:1], ours]) if line is not None)


# --- what must not change ----------------------------------------------------------------------------------


def tensor_hooks() -> Any:
    """The innermost saved-tensor hooks; whether there are any on torch 2.4, which does not report them."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(False)
    with torch.enable_grad():
        node: Any = torch.zeros(1, requires_grad=True).exp().grad_fn
    try:
        node._raw_saved_result.register_hooks(lambda x: x, lambda x: x)
    except RuntimeError:  # it already has hooks
        return True
    return False


def surroundings(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Everything that an interrupted call must not change, by name."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch function": torch._C._is_torch_function_enabled(),
        "saved-tensor hooks": tensor_hooks(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "garbage collector": gc.isenabled(),
        "warning filters": list(warnings.filters),
        "torch's random state": values(torch.get_rng_state()),
        "Python's random state": random.getstate(),
        "NumPy's random state": numpy_state(),
        "model": attribute_state(model),
        "inputs": attribute_state(x),
    }


def numpy_state() -> tuple:
    _, keys, *rest = np.random.get_state(legacy=True)
    return keys.tobytes(), *rest


def attribute_state(value: Any) -> Any:
    """The state of a value; for a module, all attributes with submodules, parameters, buffers and hooks."""
    if isinstance(value, nn.Module):
        return id(value), attribute_state(vars(value))
    if isinstance(value, dict):
        return {key: attribute_state(item) for key, item in value.items()}
    return tensor_state(value) if isinstance(value, Tensor) else repr(value)


def tensor_state(x: Tensor) -> tuple:
    return id(x), x.shape, x.stride(), x.requires_grad, x.grad, x.grad_fn, sorted(vars(x)), values(x)


def values(x: Tensor) -> bytes:
    with torch.no_grad():
        return x.detach().numpy().tobytes()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before if before[key] != after[key]]


class RandomStates:
    """The random states, to restore them if a call changed them."""

    def __init__(self) -> None:
        self.torch, self.python, self.numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def repair(states: RandomStates) -> None:
    """Undoes what was left behind, so that the next interrupt is judged on its own. Modes come first, because
    they would intercept the other calls."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    torch.set_grad_enabled(True)
    gc.enable()
    states.restore()


# --- the run -----------------------------------------------------------------------------------------------


@dataclass
class Part:
    """The results of one process."""

    counts: dict[str, Counter[str]]
    faults: list[dict[str, str]]
    models_held: int

    def __add__(self, other: Part) -> Part:
        counts = {kind: counts + other.counts[kind] for kind, counts in self.counts.items()}
        return Part(counts, self.faults + other.faults, self.models_held + other.models_held)


class Run:
    """Interrupts calls and counts the outcomes for each kind of interrupt."""

    def __init__(self, seed: int, wait: float) -> None:
        self.moments, self.wait = random.Random(seed), wait
        self.stuck = False  # True: a lock is held, and no call in this process would return
        self.counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.faults: list[dict[str, str]] = []
        self.x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        self.models = {name: network(name) for name in NETWORKS}
        self.born: list[weakref.ref] = []
        self.expected = {case: compute(self.models[case[0]], self.x, case[1]) for case in CASES}
        gc.collect()
        gc.freeze()  # makes the collection after each interrupt fast: it skips existing objects
        self.durations = self._durations()
        self.states = RandomStates()
        self._notes: list[str] = []  # about the current attempt

    def _durations(self) -> dict[tuple[tuple[str, str], bool], float]:
        """The median duration of each case, with a fresh model and with one that was explained before, which
        the engine may know to need the bridge. Measured in turn and between checks, like the interrupted
        calls, because a call that is repeated immediately is faster."""
        seconds: dict[tuple[tuple[str, str], bool], list[float]] = {}
        for _, fresh, case in itertools.product(range(3), (False, True), CASES):
            model = network(case[0]) if fresh else self.models[case[0]]
            surroundings(model, self.x)
            gc.collect()
            surroundings(model, self.x)
            started = time.perf_counter()
            compute(model, self.x, case[1])
            seconds.setdefault((case, fresh), []).append(time.perf_counter() - started)
        return {key: statistics.median(times) for key, times in seconds.items()}

    def interrupts(self, kind: str, count: int) -> Iterator[int]:
        """Interrupts `count` calls, all cases in turn. Yields the number of interrupts after each."""
        counts, interrupt = self.counts[kind], KINDS[kind]()
        former, sys.unraisablehook = sys.unraisablehook, self._note_unraisable
        try:
            for case in itertools.islice(itertools.cycle(CASES), count * MOST_ATTEMPTS):
                before = counts["interrupts"]
                self._attempt(kind, interrupt, *case)
                if counts["interrupts"] > before:
                    yield counts["interrupts"]
                if counts["interrupts"] >= count or self.stuck:
                    break
        finally:
            interrupt.close()
            sys.unraisablehook = former

    def _attempt(self, kind: str, interrupt: BySignal | ByThread, name: str, method: str) -> None:
        fresh = self.moments.random() < 0.5
        if fresh:
            self._renew(name)
        model, x = self.models[name], self.x
        delay = self.moments.uniform(0, 1.1 * self.durations[(name, method), fresh])
        torch.set_grad_enabled(self.moments.random() < 0.5)
        self._notes.clear()
        before = surroundings(model, x)
        done = Interrupted(interrupt, delay, lambda: compute(model, x, method))
        faults = [f"changed: {key}" for key in differences(before, surroundings(model, x))]
        if done.outcome in ("swallowed", "converted"):
            faults.append(done.outcome)
        counts = self.counts[kind]
        counts["late" if done.outcome == "late" else "interrupts"] += 1
        counts["surfaced"] += done.outcome == "surfaced"
        faults += self._next_calls(counts, name, method)
        if "stuck" not in faults:
            faults += self._freed(done, model)
        counts["faulty"] += bool(faults)
        for fault in faults:
            counts[fault] += 1
            message = "; ".join(filter(None, (done.message, *self._notes)))
            about = {"kind": kind, "network": name, "method": method, "fault": fault}
            self.faults.append({**about, "at": done.where, "message": message})
        self.stuck = "stuck" in faults
        if self.stuck:
            return
        repair(self.states)
        if faults:
            self._renew(name)

    def _freed(self, done: Interrupted, model: nn.Module) -> list[str]:
        """Frees the traceback, which ends suspended generators. This may happen at any later time and must
        not restore the state from before the call."""
        torch.set_grad_enabled(not torch.is_grad_enabled())
        torch.rand(1), random.random(), np.random.random()
        vars(model)["calls"] = -1
        before = surroundings(model, self.x)
        done.error = None
        gc.collect()
        after = surroundings(model, self.x)
        vars(model)["calls"] = 0
        return [f"changed when freed: {key}" for key in differences(before, after)]

    def _renew(self, name: str) -> None:
        self.models[name] = network(name)
        self.born.append(weakref.ref(self.models[name]))

    def _next_calls(self, counts: Counter[str], name: str, method: str) -> list[str]:
        """Faults of the next call from another thread, which no lock may block, and of one from this one."""
        found: list[Tensor | BaseException] = []

        def call() -> None:
            try:
                found.append(compute(self.models[name], self.x, method))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(self.wait)
        if thread.is_alive():
            self._notes.append(f"waiting at {place(sys._current_frames()[thread.ident])}")
            return ["stuck"]
        call()
        faults = []
        for whose, got in zip(("another thread", "this thread"), found, strict=True):
            same = isinstance(got, Tensor) and torch.equal(got, self.expected[name, method])
            counts["bit-equal maps"] += same
            counts["maps"] += 1
            if not same and not self._close(got, self.expected[name, method]):
                what = "another map" if isinstance(got, Tensor) else type(got).__name__
                faults.append(f"next call, {whose}: {what}")
        return faults

    def _close(self, got: Tensor | BaseException, expected: Tensor) -> bool:
        within = TOLERANCE * float(expected.abs().max())
        return isinstance(got, Tensor) and bool((got - expected).abs().max() <= within)

    def _note_unraisable(self, unraisable: Any) -> None:
        """Records an exception from a destructor or a weak reference's callback, which Python drops."""
        what = getattr(unraisable.object, "__qualname__", type(unraisable.object).__qualname__)
        self._notes.append(f"dropped in {what} at {place_of(unraisable.exc_traceback)}")

    def models_held(self) -> int:
        """The number of models that are still alive because the library refers to them."""
        self.models.clear()
        gc.collect()
        return sum(ref() is not None for ref in self.born)


def part(counts: dict[str, int], seed: int, wait: float) -> Part:
    """Runs up to `counts` interrupts of each kind in a new process; fewer if a call is stuck."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(_part, counts, seed, wait).result()


def _part(counts: dict[str, int], seed: int, wait: float) -> Part:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = Run(seed, wait)
    for kind, count in counts.items():
        if run.stuck:
            break
        for done in run.interrupts(kind, count):
            if done % 500 == 0:
                print(f"{kind}: {done} interrupts", flush=True)
    return Part(run.counts, run.faults, 0 if run.stuck else run.models_held())


def run(count: int, seed: int, wait: float) -> dict[str, Any]:
    """Runs `count` interrupts, half of each kind, and returns the record."""
    started, total = time.perf_counter(), Part({kind: Counter() for kind in KINDS}, [], 0)
    for attempt in range(MOST_PROCESSES):
        left = {kind: count // len(KINDS) - done["interrupts"] for kind, done in total.counts.items()}
        if not any(left.values()):
            break
        total += part(left, seed + attempt, wait)
    return {
        "environment": environment("cpu"),
        "commit": commit(),
        "seed": seed,
        "networks": list(NETWORKS),
        "methods": list(OPTIONS),
        "kinds": {kind: dict(counts) for kind, counts in total.counts.items()},
        "models_held": total.models_held,
        "faulty": sum(counts["faulty"] for counts in total.counts.values()),
        "faults": total.faults[:MOST_FAULTS],
        "seconds": time.perf_counter() - started,
    }


def table(record: dict[str, Any]) -> str:
    """The counts as a table with a column for each kind of interrupt."""
    kinds = record["kinds"]
    names = dict.fromkeys(["interrupts", "surfaced", "late", "maps", "bit-equal maps", "faulty"])
    names |= dict.fromkeys(sorted(name for counts in kinds.values() for name in counts if name not in names))
    width = max(map(len, names))
    head = " " * width + "".join(f"{kind:>10}" for kind in kinds)
    rows = [
        f"{name:<{width}}" + "".join(f"{counts.get(name, 0):>10}" for counts in kinds.values())
        for name in names
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=4000, help="number of interrupts, half of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds after which a call counts as stuck")
    parser.add_argument("--out", type=Path, default=Path("results/bench/interrupts.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = run(given.count, given.seed, given.wait)
    files.save_json(record, given.out)
    print(table(record))
    for fault, times in Counter(map(str, record["faults"])).most_common(20):
        print(f"{times} x {fault}")
    print(f"{record['faulty']} faulty, {record['models_held']} models held, {record['seconds']:.0f} s")
    sys.exit(1 if record["faulty"] or record["models_held"] else 0)


if __name__ == "__main__":
    main()
