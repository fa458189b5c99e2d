"""The way back of a linked pass in one launch: a CUDA graph, for a model that is asked again.

The model itself runs every time. But where it does what it did before (script.py), so does the way back: its
launches are captured in the second pass, and from the third on they are replayed, on copies of what the pass
kept. To launch them one by one takes the host longer than the device takes to run them.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rectgrad import kernels
from rectgrad.linked import Unlinked
from rectgrad.linked_pass import Arrived, LinkedPass, can_be_linked, pass_on
from rectgrad.memory import out_of_memory
from rectgrad.op import Op
from rectgrad.passes import Maps, Observe
from rectgrad.script import Call, Following, Noting
from rectgrad.trace import Trace

if TYPE_CHECKING:
    from rectgrad.methods import Method
    from rectgrad.subject import Subject

SHARE = 20  # all replays together hold at most one part in so many of a device's memory
AT_ONCE, BYTES_AT_ONCE = 16, 1 << 28  # tensors that are copied by one launch, at most
BYTES_OF_AN_OP = 1 << 25  # kept, on average: on an H200 they are copied in some 20 us
CHUNK = 1 << 26  # bytes of memory that are asked for at a time
QUESTIONS = 64  # of one model, that are remembered
USES = 16  # of a replay, that make up for another capture
ALIGNED = 512  # bytes, as torch's own tensors on a GPU are


class Found(NamedTuple):
    """What a way back leaves: what arrives at the inputs, and a number that is finite if all was."""

    arrived: Arrived
    seen: Tensor


class Memory:
    """What the replays of a device share, as they run one at a time; it goes with the last of them."""

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
        self.memory: Callable[[], Memory | None] = lambda: None
        self.stream: Any = None
        # Torch keeps memory for each stream apart, and workspaces for as long as the process lives.
        self.captures = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(self.captures):
            torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)


_rooms: dict[torch.device, Room] = {}


def _room(device: torch.device) -> Room:
    if device not in _rooms:
        _rooms[device] = Room(device)
    return _rooms[device]


class Replay(NamedTuple):
    """A script and its way back."""

    calls: list[Call]
    root: int  # the number of the tensor that the way back begins at
    begins: Tensor  # what arrives there
    memory: Memory
    places: list[Tensor]  # for what a pass keeps
    run: Callable[[], Any]
    found: Found  # where a run leaves it
    weights: list[Tensor]
    lying: list[int]  # where they lay
    mixes: bool | None
    trace: Trace


class Known:
    """What is known of a question: its replay, if there is one, how often one was made and used."""

    def __init__(self) -> None:
        self.replay: Replay | None = None
        self.made = self.used = 0


_known: weakref.WeakKeyDictionary[Any, dict[Any, Known]] = weakref.WeakKeyDictionary()


def _questions(subject: Subject, method: Method) -> tuple[dict[Any, Known], Any]:
    """What is known of a model by the questions that it was asked, and this question."""
    lie = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in subject.inputs])
    try:
        return _known.setdefault(subject.model, {}), (method, lie, _climate())
    except TypeError:  # not everything that can be called can be remembered
        return {}, None


def _climate() -> tuple[Any, ...]:
    """Settings that decide which kernels torch takes."""
    cudnn: Any = torch.backends.cudnn
    flags = (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        return (*flags, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # they were set in the newer way
        return (*flags, cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)


def _replayable(subject: Subject, method: Method) -> bool:
    return method.steady and kernels.replays(subject.inputs)


def followed(subject: Subject, method: Method) -> FollowedPass | None:
    """The forward pass of a subject's model, where it does as noted."""
    if not _replayable(subject, method):
        return None
    questions, question = _questions(subject, method)
    known = questions.get(question)
    replay = known.replay if known is not None else None
    if known is None or replay is None or not can_be_linked(subject):
        return None
    room = _rooms[replay.begins.device]
    if not room.lock.acquire(blocking=False):
        return None
    try:
        return FollowedPass(subject, replay, known, room)
    except BaseException as error:
        room.lock.release()
        if not isinstance(error, Exception) or out_of_memory(error):
            raise
        known.replay = None  # another pass will meet the error again, if it was not for the script
    return None


def noted(subject: Subject, method: Method) -> Known | None:
    """Where to leave a replay, if the coming pass should make one: the second time that a question is asked,
    and again where replays were of use."""
    if not _replayable(subject, method):
        return None
    questions, question = _questions(subject, method)
    known = questions.get(question)
    if known is None:
        if len(questions) >= QUESTIONS:
            questions.clear()
        questions[question] = Known()
        return None
    if known.replay is not None or known.used < USES * (known.made - 1):
        return None
    known.made += 1
    return known


def release(device: torch.device | None = None) -> bool:
    """Give back what replays hold, on a device or everywhere; whether there were any."""
    found = False
    for known in [known for questions in list(_known.values()) for known in list(questions.values())]:
        replay = known.replay
        if replay is not None and (device is None or replay.begins.device == device):
            known.replay, found = None, True
    return found


def do_without() -> bool:
    """Memory ran out: give back what replays hold, and make no more; whether there were any."""
    for room in _rooms.values():
        room.closed = True
    return release()


class FollowedPass(LinkedPass):
    """As noted, and its way back is a replay."""

    def __init__(self, subject: Subject, replay: Replay, known: Known, room: Room) -> None:
        self._replay, self._known, self._room = replay, known, room
        self._waiting: list[Tensor] = []
        self._kept = self._bytes = 0
        _in_order(room, replay.begins.device)
        before = _writes(replay.weights)
        super().__init__(subject, Following(replay.calls, self._save))
        self.tape.trace = replay.trace
        self.mixes = replay.mixes
        if _lying(replay.weights) != replay.lying or _writes(replay.weights) != before:
            raise Unlinked("a weight lies elsewhere or was written")

    def _save(self, x: Tensor) -> None:
        self._waiting.append(x)
        self._bytes += x.nbytes
        if len(self._waiting) == AT_ONCE or self._bytes > BYTES_AT_ONCE:
            self._copy()

    def _copy(self) -> None:
        """What waits, to its places: many at once, as each launch takes its time."""
        waiting = self._waiting
        places = self._replay.places[self._kept : self._kept + len(waiting)]
        self._kept, self._waiting, self._bytes = self._kept + len(waiting), [], 0
        if [(x.shape, x.stride()) for x in waiting] != [(x.shape, x.stride()) for x in places]:
            raise Unlinked("other shapes than noted")
        if waiting:
            torch._foreach_copy_(places, waiting)

    def _begin_at(self, made: Tensor, R: Tensor) -> None:
        tape = self.tape
        assert isinstance(tape, Following)
        if not tape.finished() or made is not tape.made[self._replay.root]:
            raise Unlinked("not all was as noted")
        self._R = R
        tape.made.clear()

    def backward(
        self, method: Method, scores: Tensor, once: bool = True, observe: Observe | None = None
    ) -> Maps:
        replay = self._replay
        with torch.inference_mode(False), torch.no_grad():
            self._copy()
            if self._kept != len(replay.places):
                raise Unlinked("not all was kept")
            replay.begins.copy_(self._R)
            replay.run()
            arrived, seen = replay.found
            self.sums = [seen.clone()]
            maps = self._maps([None if R is None else R.clone() for R in arrived])
        self._known.used += 1
        return maps

    def give_up(self, model: Any) -> None:
        self._known.replay = None

    def end(self) -> None:
        self._room.lock.release()


def _in_order(room: Room, device: torch.device) -> None:
    """One use after the other, also where they are on different streams."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        if room.stream is not None and room.stream != stream:
            stream.wait_stream(room.stream)
        room.stream = stream


def _lying(weights: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, weights))


def _writes(weights: list[Tensor]) -> int:
    """How often they were written, all together."""
    return sum(map(operator.attrgetter("_version"), weights))


class NotedPass(LinkedPass):
    """A linked pass whose calls are noted and whose way back is captured, for the next ones."""

    tape: Noting

    def __init__(self, subject: Subject, tape: Noting, known: Known) -> None:
        super().__init__(subject, tape)
        self._known = known

    def _way_back(self) -> Arrived:
        device = self._R.device
        room = _room(device)
        possible = self.tape.steady and not room.closed and _worth_it(self.tape.ops, device)
        if not possible or not room.lock.acquire(blocking=False):
            return super()._way_back()
        try:
            _in_order(room, device)
            memory = room.memory() or Memory(device, room.captures)
            room.memory = weakref.ref(memory)
            return self._captured(memory)
        finally:
            room.lock.release()

    def _captured(self, memory: Memory) -> Arrived:
        begins, places = self._R.clone(), list[Tensor]()
        place = memory.places()

        def moved(x: Tensor) -> Tensor:
            places.append(place(x).copy_(x))
            return places[-1]

        for op in self.tape.ops:  # one after the other: there is no room for all of them twice
            _move(op, moved)
        first = self._run_once(begins)
        self._known.replay = self._replay(begins, memory, places, first.arrived)
        for op in self.tape.ops:
            op.release()
        self.tape.current.sums = [first.seen]
        return first.arrived

    def _run_once(self, begins: Tensor) -> Found:
        """The way back, and all that was recorded is there still."""
        current = self.tape.current
        current.sums, self._root.R = [], begins
        for op in reversed(self.tape.ops):
            if op.R is not None:
                pass_on(op)
        arrived: Arrived = []
        for entry in self.entries:
            arrived.append(entry.R)
            entry.R = None
        sums = [torch.as_tensor(s, device=begins.device).reshape(()) for s in current.sums]
        return Found(arrived, torch.stack(sums).sum() if sums else torch.zeros((), device=begins.device))

    def _replay(
        self, begins: Tensor, memory: Memory, places: list[Tensor], arrived: Arrived
    ) -> Replay | None:
        """None where it takes too much memory, or asks the device something on its way."""
        calls, root = self.tape.script(self._root)
        weights = [weight for call in calls for weight in call.weights]
        try:
            run, found, more = captured(lambda: self._run_once(begins), memory)
            run()
            alike = all(_alike(a, b) for a, b in zip(arrived, found.arrived, strict=True))
        except RuntimeError:
            return None
        memory.of_graphs += more
        if memory.size > most(begins.device) and release(begins.device):
            self._known.made -= 1  # the others go, and it is tried again without them
            return None
        if not alike or memory.size > most(begins.device):
            return None
        lying, trace = _lying(weights), self.tape.trace
        return Replay(calls, root, begins, memory, places, run, found, weights, lying, self.mixes, trace)


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
                found = way_back()
        finally:
            graph.capture_end()
    return graph.replay, found, max(torch.cuda.memory_reserved(memory.device) - before, 0)


def _worth_it(ops: list[Op], device: torch.device) -> bool:
    """Whether there can be copies of all that is kept, that lie as it does, and to make them takes less time
    than to launch the ops."""
    size = 0
    for x in (x for op in ops for x in op.held()):
        if x.device != device or torch.empty_like(x, device="meta").stride() != x.stride():
            return False
        size += x.nbytes
    return size <= most(device) and size <= BYTES_OF_AN_OP * len(ops)


def _move(op: Op, moved: Callable[[Tensor], Tensor]) -> None:
    """Let an op read copies from now on, made in the order of `Op.held`."""
    op.inputs, op.needed = tuple(map(moved, op.inputs)), tuple(map(moved, op.needed))
    op._output = moved(op._output) if op._output is not None else None
    op.versions = ()


def most(device: torch.device) -> int:
    """Bytes that all replays on a device may hold."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """But for the order of sums, which some of torch's kernels leave open, and the few units that it moves
    over a threshold."""
    if a is None or b is None:
        return a is b
    return bool((a - b).norm() <= 0.01 * b.norm())
