"""The way back of a noted pass, to be gone again by others that do the same: the ops on what another pass
kept, or, on a GPU, all their launches in one, a CUDA graph.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rectgrad.linked import Unlinked
from rectgrad.linked_pass import Arrived, pass_on
from rectgrad.op import Current, Op
from rectgrad.steps import constants_used

SHARE = 20  # all graphs together hold at most one part in so many of a device's memory
AT_ONCE, BYTES_AT_ONCE = 16, 1 << 28  # tensors that are copied by one launch, at most
BYTES_OF_AN_OP = 1 << 25  # kept, on average: on an H200 they are copied in some 20 us
CHUNK = 1 << 26  # bytes of memory that are asked for at a time
ALIGNED = 512  # bytes, as torch's own tensors on a GPU are

Save = Callable[[Tensor], None]


class Found(NamedTuple):
    """What a way back leaves: what arrives at the inputs, and numbers that are finite if all was."""

    arrived: Arrived
    sums: list[Any]


class Links(NamedTuple):
    """The ops of a pass, those that stand for its inputs, and the one that the way back begins at."""

    ops: Sequence[Op]
    entries: Sequence[Op]
    root: Op
    current: Current

    def back(self, R: Tensor) -> Found:
        """The way back from R. All that was recorded is there still."""
        self.current.sums, self.root.R = [], R
        for op in reversed(self.ops):
            if op.R is not None:
                pass_on(op)
        arrived: Arrived = []
        for entry in self.entries:
            arrived.append(entry.R)
            entry.R = None
        return Found(arrived, self.current.sums)


class Again:
    """The ops themselves, on what another pass kept."""

    def __init__(self, links: Links) -> None:
        self.lock = threading.Lock()
        self._links, self._kept = links, list[Tensor]()
        self._keeping = [op for op in links.ops if any(True for _ in op.held())]
        self._numbers = [(len(op.inputs), len(op.needed), op._output is not None) for op in self._keeping]
        self._total = sum(map(sum, self._numbers))
        self._steps = [op.step for op in links.ops if op.step is not None]
        self._forget()

    def begin(self) -> Save:
        self._kept = []
        return self._kept.append

    def __call__(self, R: Tensor) -> Found:
        if len(self._kept) != self._total:
            raise Unlinked("not all was kept")
        coming = iter([x.detach() for x in self._kept])
        for op, (inputs, needed, output) in zip(self._keeping, self._numbers, strict=True):
            op.inputs = tuple([next(coming) for _ in range(inputs)])
            op.needed = tuple([next(coming) for _ in range(needed)])
            op._output = next(coming) if output else None
        for step in self._steps:
            step.meet_again()
        try:
            return self._links.back(R)
        finally:
            self._forget()

    def end(self) -> None:
        """Also of a pass that did not come so far."""
        self._kept = []
        self.lock.release()

    def _forget(self) -> None:
        """Nothing of a pass is held until the next one."""
        self._kept = []
        for op in self._keeping:
            op.inputs, op.needed, op._output, op.versions = (), (), None, ()


class Memory:
    """What the graphs of a device share, as they run one at a time; it goes with the last of them."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.device, self.stream, self.chunks = device, stream, list[Tensor]()
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.of_graphs = 0  # bytes

    @property
    def size(self) -> int:
        return self.of_graphs + sum(chunk.nbytes for chunk in self.chunks)

    def places(self) -> Callable[[Tensor], Tensor]:
        """A function that gives each tensor its place, which lies as it does; from the first chunk on."""
        chunk = at = 0

        def place(x: Tensor) -> Tensor:
            nonlocal chunk, at
            while chunk < len(self.chunks) and at + x.nbytes > self.chunks[chunk].nbytes:
                chunk, at = chunk + 1, 0
            if chunk == len(self.chunks):
                size = max(x.nbytes, CHUNK)
                self.chunks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            part = self.chunks[chunk][at : at + x.nbytes].view(x.dtype)
            at += -(-x.nbytes // ALIGNED) * ALIGNED
            return part.as_strided(x.shape, x.stride())

        return place


class Room:
    """One for each device: who uses its memory, which stream did last, and which one captures."""

    closed = False  # it is needed for something else

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._memory: Callable[[], Memory | None] = lambda: None
        self._last: Any = None
        self.device = device
        # Torch keeps memory for each stream apart, and workspaces for as long as the process lives.
        self._captures = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(self._captures):
            torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)

    def memory(self) -> Memory:
        memory = self._memory() or Memory(self.device, self._captures)
        self._memory = weakref.ref(memory)
        return memory

    def enter(self) -> None:
        """One use after the other, also where they are on different streams."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._last is not None and self._last != stream:
                stream.wait_stream(self._last)
            self._last = stream


rooms: dict[torch.device, Room] = {}


def room_of(device: torch.device) -> Room:
    if device not in rooms:
        rooms[device] = Room(device)
    return rooms[device]


class Graph:
    """All launches of the ops in one, on copies of what a pass kept."""

    def __init__(self, links: Links, R: Tensor, room: Room) -> None:
        self.lock, self._room, self.memory = room.lock, room, room.memory()
        self._begins, self._places = R.clone(), list[Tensor]()
        self._waiting, self._kept, self._index = list[Tensor](), 0, R.get_device()
        place = self.memory.places()

        def moved(x: Tensor) -> Tensor:
            self._places.append(place(x).copy_(x))
            return self._places[-1]

        for op in links.ops:  # one after the other: there is no room for all of them twice
            op.inputs, op.needed = tuple(map(moved, op.inputs)), tuple(map(moved, op.needed))
            op._output = moved(op._output) if op._output is not None else None
            op.versions = ()
        largest = max([place.nbytes for place in self._places], default=1)
        self._together = min(AT_ONCE, max(1, BYTES_AT_ONCE // largest))

    def capture(self, links: Links, arrived: Arrived) -> bool:
        """Whether it could be done, and gives what arrived the first time."""
        try:
            with constants_used() as self._constants:
                self._run, self._found, taken = captured(lambda: links.back(self._begins), self.memory)
            self._run()
            alike = all(_alike(a, b) for a, b in zip(arrived, self._found.arrived, strict=True))
        except RuntimeError:  # it asks the device something on its way, or takes too much memory
            return False
        self.memory.of_graphs += taken
        return alike

    def begin(self) -> Save:
        self._room.enter()
        self._waiting, self._kept = [], 0
        self._stream = _stream(self._index)
        return self._save

    def _save(self, x: Tensor) -> None:
        if _stream(self._index) != self._stream:
            raise Unlinked("a stream of the model's own")
        self._waiting.append(x)
        if len(self._waiting) == self._together:
            self._copy()

    def _copy(self) -> None:
        """What waits, to its places: many at once, as each launch takes its time."""
        waiting = self._waiting
        places = self._places[self._kept : self._kept + len(waiting)]
        self._kept, self._waiting = self._kept + len(waiting), []
        if [(x.shape, x.stride()) for x in waiting] != [(x.shape, x.stride()) for x in places]:
            raise Unlinked("other shapes than noted")
        if waiting:
            torch._foreach_copy_(places, waiting)

    def __call__(self, R: Tensor) -> Found:
        self._copy()
        if self._kept != len(self._places):
            raise Unlinked("not all was kept")
        self._begins.copy_(R)
        self._run()
        arrived, sums = self._found
        return Found([None if x is None else x.clone() for x in arrived], [x.clone() for x in sums])

    def end(self) -> None:
        self._waiting = []
        self.lock.release()


def _stream(device: int) -> int:
    """The current one; 0 on a CPU."""
    return _current_stream(device) if device >= 0 else 0


_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def captured(way_back: Callable[[], Found], memory: Memory) -> tuple[Callable[[], Any], Found, int]:
    """What does on the device again what `way_back` does, where that leaves its results, and the bytes that
    it took."""
    from rectgrad.kernels.cuda import one_scratch

    before = torch.cuda.memory_reserved(memory.device)
    graph = torch.cuda.CUDAGraph()
    memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
    with torch.cuda.stream(memory.stream):
        graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
        try:
            with one_scratch():
                arrived, sums = way_back()
                found = Found(arrived, [torch.stack([s.reshape(()) for s in sums]).sum()] if sums else [])
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what happened is said, not what comes of it
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay, found, max(torch.cuda.memory_reserved(memory.device) - before, 0)


def worth_it(ops: Sequence[Op], device: torch.device) -> bool:
    """Whether there can be copies of all that is kept, that lie as it does, and to make them takes less time
    than to launch the ops."""
    size = 0
    for x in (x for op in ops for x in op.held()):
        if x.device != device or torch.empty_like(x, device="meta").stride() != x.stride():
            return False
        size += x.nbytes
    return size <= most(device) and size <= BYTES_OF_AN_OP * len(ops)


def most(device: torch.device) -> int:
    """Bytes that all graphs on a device may hold."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """But for the order of sums, which some of torch's kernels leave open, and the few units that it moves
    over a threshold."""
    if a is None or b is None:
        return a is b
    return bool((a - b).norm() <= 0.01 * b.norm())
