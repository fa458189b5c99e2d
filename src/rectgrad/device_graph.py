"""A noted pass and its way back on a GPU: two CUDA graphs, each of them all launches in one.

To launch kernels one by one takes the host longer than a GPU takes to run them. The first graph runs ahead,
and meanwhile the model runs as it always does, but for its kernels, so that whatever it does otherwise than
noted is noticed; then nothing of what the graph made is used.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rectgrad.linked import Unlinked
from rectgrad.linked_pass import Arrived
from rectgrad.op import Op
from rectgrad.passes import Maps, copied
from rectgrad.script import Call, Following, Rehearsing, share
from rectgrad.steps import constants_used
from rectgrad.way_back import Found, Links

SHARE = 10  # all graphs together hold at most one part in so many of a device's memory
ALIGNED = 16  # bytes: of every type of tensor a whole number

Results = list[Tensor | None]


class Memory:
    """What the graphs of a device share, as they run one at a time; it goes with the last of them."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.device, self.stream = device, stream
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.of_graphs = 0  # bytes
        self.behind = torch.empty(0, dtype=torch.uint8, device=device)  # what stand-ins lie in

    @property
    def size(self) -> int:
        return self.of_graphs + self.behind.nbytes

    def reserve(self, size: int) -> None:
        """Bytes to lie in, for the largest stand-in."""
        if size > self.behind.nbytes:
            self.behind = torch.empty(size, dtype=torch.uint8, device=self.device)


def _extent(x: Tensor) -> int:
    """Bytes from its first element to its last, and some."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return -(-(last + 1) * x.element_size() // ALIGNED) * ALIGNED


def _stand_in(x: Tensor | None, behind: Tensor) -> Tensor | None:
    """A tensor that lies as x does. Nobody reads its values."""
    return None if x is None else behind.view(x.dtype).as_strided(x.shape, x.stride())


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
            one = torch.ones(1, 1, device=device)
            torch.addmm(one, one, one) @ one

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
    """All launches of a noted pass on places for its inputs, and all of its way back.

    lasting: the numbers of the tensors that are read when the pass is over.
    """

    def __init__(self, calls: Sequence[Call], inputs: Maps, R: Tensor, lasting: Sequence[int], room: Room):
        self.lock, self._room, self.memory = room.lock, room, room.memory()
        self._calls, self._inputs = calls, [x.detach().clone() for x in inputs]
        self._begins, self._lasting = R.clone(), [n for n in lasting if n >= len(inputs)]
        self._index, self._behind = R.get_device(), torch.empty(0)

    def capture(self, links: Links, arrived: Arrived, left: dict[int, Tensor]) -> bool:
        """Whether it could be done, and gives what the pass left and what arrived when it was noted."""
        try:
            with constants_used() as self._constants:
                self._forth, self._left, taken = captured(self._pass, self.memory)
                self._back, found, more = captured(lambda: _together(links.back(self._begins)), self.memory)
            self._forth()
            self._back()
            before = [*arrived, *(left[n] for n in self._lasting)]
            self._arrived, self._sums = found[: len(arrived)], found[len(arrived) :]
            alike = all(_alike(a, b) for a, b in zip(before, [*self._arrived, *self._left], strict=True))
        except RuntimeError:  # it asks the device something on its way, or takes too much memory
            return False
        self.memory.of_graphs += taken + more
        self.memory.reserve(max([_extent(x) for x in self._lie if x is not None], default=0))
        return alike

    def _pass(self) -> Results:
        made: list[Any] = list(self._inputs)
        lie: list[Any] = [None] * len(made)
        for call in self._calls:
            op = call.op
            if op is None:
                continue
            y, op.needed = call.again(made)
            if call.saves_input:
                op.inputs = (made[call.source],)
            if call.saves_output:
                op._output = y
            made.append(y)
            lie.append(torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta"))
            for number in call.done:
                made[number] = None
        self._lie = lie
        return [made[number] for number in self._lasting]

    def follow(self, calls: Sequence[Call]) -> Rehearsing:
        """A tape for a pass that should be as noted."""
        self._room.enter()
        self._stream, behind = _stream(self._index), self.memory.behind
        if self._behind is not behind:
            self._behind, self._stand_ins = behind, [_stand_in(x, behind) for x in self._lie]
        return Rehearsing(calls, self._stand_ins)

    def start(self, inputs: Maps) -> None:
        """On its way, while the model is asked what it does."""
        with torch.no_grad():
            for place, x in zip(self._inputs, inputs, strict=True):
                place.copy_(x)
        self._forth()

    def give(self, tape: Following, answer: Any) -> None:
        """Their values, to tensors that are read when the pass is over. answer: what holds them."""
        assert isinstance(tape, Rehearsing)
        held = tape.held()
        for number, place in zip(self._lasting, self._left, strict=True):
            if number in held:
                assert place is not None
                held[number].data = place.clone()
        copied(answer, self._has_values)

    def _has_values(self, x: Tensor) -> Tensor:
        if share(x, self._behind):
            raise Unlinked("another answer than noted")
        return x

    def __call__(self, R: Tensor) -> Found:
        if _stream(self._index) != self._stream:
            raise Unlinked("a stream of the model's own")
        self._begins.copy_(R)
        self._back()
        arrived, sums = ([None if x is None else x.clone() for x in xs] for xs in (self._arrived, self._sums))
        return Found(arrived, [x for x in sums if x is not None])

    def end(self, tape: Following) -> None:
        """What somebody has kept of the pass gets values of its own."""
        assert isinstance(tape, Rehearsing)
        try:
            tape.made.clear()
            held = tape.held()
            if held:
                with contextlib.suppress(RuntimeError), torch.inference_mode(False), torch.no_grad():
                    self._give_all(held)
        finally:
            self.lock.release()

    def _give_all(self, held: dict[int, Tensor]) -> None:
        made: list[Any] = [x.clone() for x in self._inputs]
        for call in self._calls:
            if call.op is None:
                continue
            number = len(made)
            made.append(call.again(made)[0])
            if number in held:
                held[number].data = made[number]
            for read in call.done:
                made[read] = None


def _stream(device: int) -> int:
    """The current one; 0 on a CPU."""
    return _current_stream(device) if device >= 0 else 0


_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def _together(found: Found) -> Results:
    """What arrived, and one sum for all."""
    arrived, sums = found
    return [*arrived, *([torch.stack([torch.as_tensor(s).reshape(()) for s in sums]).sum()] if sums else [])]


def captured(todo: Callable[[], Results], memory: Memory) -> tuple[Callable[[], Any], Results, int]:
    """What does on the device again what `todo` does, where that leaves its results, and the bytes that it
    took."""
    from rectgrad.kernels.cuda import one_scratch

    if torch.cuda.mem_get_info(memory.device)[0] < most(memory.device):
        torch.cuda.empty_cache()  # a capture cannot take what torch has put by
    before = torch.cuda.memory_reserved(memory.device)
    graph = torch.cuda.CUDAGraph()
    memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
    with torch.cuda.stream(memory.stream):
        graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
        try:
            with one_scratch():
                results = todo()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what happened is said, not what comes of it
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay, results, max(torch.cuda.memory_reserved(memory.device) - before, 0)


def fits(ops: Sequence[Op], device: torch.device) -> bool:
    """Whether all that is kept is on a device, and no more than graphs may hold."""
    kept = [x for op in ops for x in op.held()]
    return all(x.device == device for x in kept) and sum(x.nbytes for x in kept) <= most(device)


def most(device: torch.device) -> int:
    """Bytes that all graphs on a device may hold."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """But for the order of sums, which some of torch's kernels leave open, and the few units that it moves
    over a threshold."""
    if a is None or b is None:
        return a is b
    return bool((a - b).norm() <= 0.01 * b.norm())
