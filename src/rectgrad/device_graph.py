"""A noted pass and its way back on a GPU: two CUDA graphs, each of them all launches in one.

To launch kernels one by one takes the host longer than a GPU takes to run them. The first graph runs ahead,
and meanwhile the model runs as it always does, but for its kernels, so that whatever it does otherwise than
noted is noticed; then nothing of what the graph made is used.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rectgrad.linked import Unlinked
from rectgrad.linked_pass import Arrived
from rectgrad.op import Op
from rectgrad.passes import Maps, tensors_in
from rectgrad.script import Call, Following, Rehearsing
from rectgrad.steps import constants_used
from rectgrad.way_back import Found, Links, Turn

SHARE = 10  # all graphs together hold at most one part in so many of a device's memory
BYTES_OF_AN_OP = 1 << 26  # kept, on average: of more than that, launches take no time beside the kernels

Results = list[Tensor | None]


class Memory:
    """What the graphs of a device share, as they run one at a time; it goes with the last of them."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.device, self.stream = device, stream
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.size = 0  # bytes


class Room:
    """One for each device: who uses its memory, which stream did last, and which one captures."""

    closed = False  # it is needed for something else

    def __init__(self, device: torch.device) -> None:
        self.turn = Turn()
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
_guard = threading.Lock()


def room_of(device: torch.device) -> Room:
    with _guard:
        if device not in rooms:
            rooms[device] = Room(device)
        return rooms[device]


class Graph:
    """All launches of a noted pass on places for its inputs, and all of its way back.

    lasting: the numbers of the tensors that are read when the pass is over.
    """

    def __init__(self, calls: Sequence[Call], inputs: Maps, R: Tensor, lasting: Sequence[int], room: Room):
        self.turn, self._room, self.memory = room.turn, room, room.memory()
        self._calls, self._inputs = calls, [x.detach().clone() for x in inputs]
        self._begins, self._lasting = R.clone(), [n for n in lasting if n >= len(inputs)]
        self._stand_ins: list[Any] = [None] * len(inputs)
        self._index = R.get_device()

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
            self._stand_ins += [stand_in(*lies, self._room.device) for lies in self._lie]
        except RuntimeError:  # it asks the device something on its way, or takes too much memory
            return False
        self.memory.size += taken + more
        return alike

    def _pass(self) -> Results:
        made: list[Any] = list(self._inputs)
        self._lie = []
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
            self._lie.append((y.shape, y.stride(), y.dtype))
            for number in call.done:
                made[number] = None
        return [made[number] for number in self._lasting]

    def follow(self, calls: Sequence[Call]) -> Rehearsing:
        """A tape for a pass that should be as noted."""
        return Rehearsing(calls, self._stand_ins)

    def start(self, inputs: Maps) -> None:
        """On its way, while the model is asked what it does."""
        self._room.enter()
        self._stream = _stream(self._index)
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
                tape.give(number, place.clone())
        without = {id(x) for x in tape.held().values()}
        if any(id(x) in without for x in tensors_in(answer)):
            raise Unlinked("another answer than noted")

    def __call__(self, R: Tensor, tape: Following) -> Found:
        if _stream(self._index) != self._stream:
            raise Unlinked("a stream of the model's own")
        self._begins.copy_(R)
        self._back()
        arrived, sums = ([None if x is None else x.clone() for x in xs] for xs in (self._arrived, self._sums))
        return Found(arrived, [x for x in sums if x is not None])

    def end(self, tape: Following) -> None:
        """What somebody has kept of the pass gets values of its own."""
        assert isinstance(tape, Rehearsing)
        failing = sys.exc_info()[0] is not None
        try:
            tape.made.clear()
            held = tape.held()
            if held:
                with torch.inference_mode(False), torch.no_grad():
                    self._give_all(held)
        except RuntimeError:
            if not failing:
                raise
        finally:
            tape.over = tape.ended = True

    def _give_all(self, held: dict[int, Tensor]) -> None:
        made, last = list[Any](x.clone() for x in self._inputs), max(held)
        for call in self._calls:
            if call.op is None:
                continue
            number = len(made)
            made.append(call.again(made)[0])
            if number in held:
                held[number].data = made[number]
            if number == last:
                break
            for read in call.done:
                made[read] = None


def stand_in(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that lies as another one does, and that nobody can read or write."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    refuse(x, "rectgrad: this tensor stands for one that a CUDA graph makes; it has no values of its own")
    return x


# In builds of torch without CUDA there is none: it is for graphs.
refuse: Callable[[Tensor, str], None] = getattr(
    torch._C, "_set_storage_access_error_msg", lambda x, say: None
)


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


def worth_it(calls: Sequence[Call], ops: Sequence[Op], device: torch.device) -> bool:
    """Whether all weights and all that is kept are on a device, and that is no more than graphs may hold, and
    not so much that there is no time to gain."""
    kept = [x for op in ops for x in op.held()]
    there = all(x.device == device for x in (*kept, *(w for call in calls for w in call.weights)))
    return there and sum(x.nbytes for x in kept) <= min(most(device), BYTES_OF_AN_OP * len(ops))


def most(device: torch.device) -> int:
    """Bytes that all graphs on a device may hold."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """But for the order of sums, which some of torch's kernels leave open, and the few units that it moves
    over a threshold."""
    if a is None or b is None:
        return a is b
    return bool((a - b).norm() <= 0.01 * b.norm())
