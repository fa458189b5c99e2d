"""The way back of a linked pass in one launch: a CUDA graph, for a model that is asked again.

The model itself runs every time. But where it does what it did before (script.py), so does the way back: its
launches are captured in the second pass, and from the third on they are replayed, on copies of what the pass
kept. To launch them one by one takes the host longer than the device takes to run them.
"""

from __future__ import annotations

import operator
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
AT_ONCE = 16  # tensors that are copied by one launch
QUESTIONS = 64  # of one model, that are remembered
USES = 16  # of a replay, that make up for another capture


class Found(NamedTuple):
    """What a way back leaves: what arrives at the inputs, and a number that is finite if all was."""

    arrived: Arrived
    seen: Tensor


class Replay(NamedTuple):
    """A script and its way back."""

    calls: list[Call]
    root: int  # the number of the tensor that the way back begins at
    begins: Tensor  # what arrives there
    places: list[Tensor]  # for what a pass keeps
    run: Callable[[], Any]
    found: Found  # where a run leaves it
    weights: list[Tensor]
    lying: list[int]  # where they lay
    bytes: int
    mixes: bool | None
    trace: Trace


class Known:
    """What is known of a question: its replay, if there is one, how often one was made and used."""

    def __init__(self) -> None:
        self.replay: Replay | None = None
        self.made = self.used = 0
        self.stream: Any = None  # that it was used on

    def take(self) -> Replay | None:
        """For one pass alone; whoever ends it well puts it back."""
        replay, self.replay = self.replay, None
        return replay

    def put_back(self, replay: Replay) -> None:
        self.replay = replay
        self.used += 1


_known: weakref.WeakKeyDictionary[Any, dict[Any, Known]] = weakref.WeakKeyDictionary()


def questions_of(subject: Subject, method: Method) -> tuple[dict[Any, Known], Any]:
    """What is known of a model by the questions that it was asked, and this question."""
    lie = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in subject.inputs])
    try:
        return _known.setdefault(subject.model, {}), (method, lie, _climate())
    except TypeError:  # not everything that can be called can be remembered
        return {}, None


def replayable(subject: Subject, method: Method) -> bool:
    return method.steady and kernels.replays(subject.inputs)


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


def followed(subject: Subject, method: Method) -> FollowedPass | None:
    """The forward pass of a subject's model, where it does as noted."""
    if not replayable(subject, method):
        return None
    questions, question = questions_of(subject, method)
    known = questions.get(question)
    if known is None or known.replay is None or not can_be_linked(subject):
        return None
    replay = known.take()
    if replay is None:
        return None
    try:
        return FollowedPass(subject, replay, known)
    except Exception as error:  # another pass will meet it again, if it was not for the script
        if out_of_memory(error):
            raise
    return None


def noted(subject: Subject, method: Method) -> Known | None:
    """Where to leave a replay, if the coming pass should make one: the second time that a question is asked,
    and again where replays were of use."""
    if not replayable(subject, method):
        return None
    questions, question = questions_of(subject, method)
    known = questions.get(question)
    if known is None:
        if len(questions) >= QUESTIONS:
            questions.clear()
        questions[question] = Known()
        return None
    if known.used < USES * (known.made - 1):
        return None
    known.made += 1
    return known


def release() -> bool:
    """Give back the memory of all replays; whether there were any."""
    held = [of for questions in list(_known.values()) for of in questions.values() if of.replay is not None]
    for of in held:
        of.replay = None
    return bool(held)


class FollowedPass(LinkedPass):
    """As noted, and its way back is a replay."""

    def __init__(self, subject: Subject, replay: Replay, known: Known) -> None:
        self._replay, self._known = replay, known
        self._waiting: list[Tensor] = []
        self._kept = 0
        _in_order(known, replay.begins.device)
        before = _writes(replay.weights)
        super().__init__(subject, Following(replay.calls, self._save))
        self.tape.trace = replay.trace
        self.mixes = replay.mixes
        if _lying(replay.weights) != replay.lying or _writes(replay.weights) != before:
            raise Unlinked("a weight lies elsewhere or was written")

    def _save(self, x: Tensor) -> None:
        self._waiting.append(x)
        if len(self._waiting) == AT_ONCE:
            self._copy()

    def _copy(self) -> None:
        """What waits, to its places: many at once, as each launch takes its time."""
        waiting = self._waiting
        places = self._replay.places[self._kept : self._kept + len(waiting)]
        self._kept, self._waiting = self._kept + len(waiting), []
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
        self._known.put_back(replay)
        return maps

    def give_up(self, model: Any) -> None:
        """The replay was taken, and is not put back."""


def _in_order(known: Known, device: torch.device) -> None:
    """A replay has one place for everything: one use after the other, also on another stream."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        if known.stream is not None and known.stream != stream:
            stream.wait_stream(known.stream)
        known.stream = stream


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
        ops, begins = self.tape.ops, self._R
        kept = [x for op in ops for x in op.held()]
        if not self.tape.steady or not _can_be_placed(kept, begins.device):
            return super()._way_back()
        places: list[Tensor] = []
        for op in ops:
            _place(op, places)
        found = self._run_once(begins)
        self._known.replay = self._captured(begins.clone(), places, found.arrived)
        for op in ops:
            op.release()
        self.tape.current.sums = [found.seen]
        return found.arrived

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

    def _captured(self, begins: Tensor, places: list[Tensor], arrived: Arrived) -> Replay | None:
        """None where it takes too much memory, or asks the device something on its way."""
        calls, root = self.tape.script(self._root)
        weights = [weight for call in calls for weight in call.weights]
        try:
            run, found, more = captured(lambda: self._run_once(begins), begins.device)
            run()
            alike = all(_alike(a, b) for a, b in zip(arrived, found.arrived, strict=True))
        except RuntimeError:
            return None
        size = more + sum(x.nbytes for x in places)
        if not alike or not _make_room(size, begins.device):
            return None
        return Replay(
            calls,
            root,
            begins,
            places,
            run,
            found,
            weights,
            _lying(weights),
            size,
            self.mixes,
            self.tape.trace,
        )


def captured(way_back: Callable[[], Found], device: torch.device) -> tuple[Callable[[], Any], Found, int]:
    """What does on the device again what `way_back` does, where that leaves its results, and its bytes."""
    from rectgrad.kernels.cuda import one_scratch

    before = torch.cuda.memory_reserved(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with one_scratch():
                found = way_back()
        finally:
            graph.capture_end()
    return graph.replay, found, max(torch.cuda.memory_reserved(device) - before, 0)


def _can_be_placed(kept: list[Tensor], device: torch.device) -> bool:
    """Whether there can be copies of all that lie as they do, and there is room for them."""
    dense = all(
        x.device == device and torch.empty_like(x, device="meta").stride() == x.stride() for x in kept
    )
    return dense and sum(x.nbytes for x in kept) <= most(device)


def _place(op: Op, places: list[Tensor]) -> None:
    """Let an op read copies from now on."""

    def placed(x: Tensor) -> Tensor:
        places.append(x.clone())
        return places[-1]

    op.inputs, op.needed = tuple(map(placed, op.inputs)), tuple(map(placed, op.needed))
    op._output = placed(op._output) if op._output is not None else None
    op.versions = ()


def most(device: torch.device) -> int:
    """Bytes that all replays on a device may hold."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE


def _make_room(size: int, device: torch.device) -> bool:
    """Those that were used least often go first."""
    if size > most(device):
        return False
    held = [of for questions in list(_known.values()) for of in questions.values() if of.replay is not None]
    for of in sorted(held, key=lambda of: of.used):
        if size + sum(of.replay.bytes for of in held if of.replay is not None) <= most(device):
            break
        of.replay = None
    return True


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """But for the order of sums, which some of torch's kernels leave open, and the few units that it moves
    over a threshold."""
    if a is None or b is None:
        return a is b
    return bool((a - b).norm() <= 0.01 * b.norm())
