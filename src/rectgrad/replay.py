"""A model that is asked again: its pass is followed instead of recorded (script.py), and its way back is gone
again (way_back.py, device_graph.py). The model itself runs every time.

The first pass is linked, the second noted as well, and from the third on they are followed: to record ops
anew takes the host time.
"""

from __future__ import annotations

import operator
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rectgrad import kernels
from rectgrad import target as targets
from rectgrad.device_graph import Graph, most, room_of, rooms, worth_it
from rectgrad.linked import Unlinked
from rectgrad.linked_pass import Arrived, LinkedPass, can_be_linked
from rectgrad.memory import out_of_memory
from rectgrad.passes import Maps, Observe, tensors_in
from rectgrad.script import Call, Following, Noting
from rectgrad.trace import Trace
from rectgrad.way_back import Again, Links

if TYPE_CHECKING:
    from rectgrad.methods import Method
    from rectgrad.subject import Subject

QUESTIONS = 64  # of one model, that are remembered
USES = 16  # of a replay, that make up for another one


class Replay(NamedTuple):
    """A script and its way back."""

    calls: list[Call]
    root: int  # the number of the tensor that the way back begins at
    way: Again | Graph
    device: torch.device
    weights: list[Tensor]
    lying: list[Any]  # where they lay, and how
    mixes: bool | None
    trace: Trace


class Known:
    """What is known of a question: its replay, if there is one, how often one was made and used."""

    def __init__(self) -> None:
        self.replay: Replay | None = None
        self.made = self.used = 0


_known: weakref.WeakKeyDictionary[Any, dict[Any, Known]] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def _questions(subject: Subject, method: Method) -> tuple[dict[Any, Known], Any]:
    """What is known of a model by the questions that it was asked, and this question."""
    lie = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in subject.inputs])
    question = (method, lie, _climate())
    try:
        hash(question)
        with _guard:
            return _known.setdefault(subject.model, {}), question
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
    passed, tape = None, replay.way.follow(replay.calls)
    if not replay.way.turn.take(tape):
        return None
    try:
        passed = FollowedPass(subject, replay, known, tape)
    except Exception as error:
        if out_of_memory(error):
            raise
        known.replay = None  # another pass will meet the error again, if it was not for the script
    finally:
        if passed is None:
            replay.way.end(tape)
    return passed


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
    with _guard:
        every = [known for questions in _known.values() for known in list(questions.values())]
    for known in every:
        replay = known.replay
        if replay is not None and (device is None or replay.device == device):
            known.replay, found = None, True
    return found


def do_without() -> bool:
    """Memory ran out: give back what replays hold, and make no more; whether there were any."""
    for room in rooms.values():
        room.closed = True
    return release()


class FollowedPass(LinkedPass):
    """As noted, and its way back is gone again."""

    tape: Following

    def __init__(self, subject: Subject, replay: Replay, known: Known, tape: Following) -> None:
        self._replay, self._known = replay, known
        before = _writes(replay.weights)
        super().__init__(subject, tape)
        self._check_weights()
        if _writes(replay.weights) != before:
            raise Unlinked("a weight was written")
        replay.way.give(tape, _answer(self.outputs))
        self.tape.trace = replay.trace
        self.mixes = replay.mixes

    def _check_weights(self) -> None:
        if _lying(self._replay.weights) != self._replay.lying:
            raise Unlinked("a weight lies elsewhere")

    def _start(self, inputs: Maps) -> None:
        if isinstance(self._replay.way, Graph):
            self._check_weights()  # what is launched reads them where they lay
        self._replay.way.start(inputs)

    def _begin_at(self, made: Tensor, R: Tensor) -> None:
        tape, replay = self.tape, self._replay
        if not tape.finished() or made is not tape.made[replay.root]:
            raise Unlinked("not all was as noted")
        replay.way.give(tape, made)
        self._R = R
        tape.made.clear()

    def scores(self, target: targets.Scores) -> Tensor:
        try:
            return super().scores(target)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise Unlinked("another pass will meet the error again, if it was not for this one") from None

    def backward(
        self, method: Method, scores: Tensor, once: bool = True, observe: Observe | None = None
    ) -> Maps:
        try:
            with torch.inference_mode(False), torch.no_grad():
                arrived, self.sums = self._replay.way(self._R, self.tape)
        except BaseException as error:
            self._known.replay = None  # it stopped half-way
            if not isinstance(error, Exception) or out_of_memory(error):
                raise
            raise Unlinked("the way back failed: another pass will meet the error again") from None
        self._known.used += 1
        return self._maps(arrived)

    def give_up(self, model: Any) -> None:
        self._known.replay = None

    def end(self) -> None:
        self.outputs = None
        self._replay.way.end(self.tape)


def _answer(outputs: Any) -> tuple[Any, Any]:
    """What may hold the tensors that a model answers with."""
    return outputs, getattr(outputs, "logits", None)


def _lying(weights: list[Tensor]) -> list[Any]:
    asked = (Tensor.data_ptr, Tensor.stride, Tensor.size, operator.attrgetter("dtype"))
    return [list(map(each, weights)) for each in asked]


def _writes(weights: list[Tensor]) -> int:
    """How often they were written, all together."""
    return sum(map(operator.attrgetter("_version"), weights))


def by_graph(R: Tensor) -> bool:
    return R.is_cuda


class NotedPass(LinkedPass):
    """A linked pass whose calls are noted and whose way back is kept, for the next ones."""

    tape: Noting

    def __init__(self, subject: Subject, tape: Noting, known: Known) -> None:
        super().__init__(subject, tape)
        self._known = known
        self._made: Replay | None = None
        given = any(True for _ in tensors_in((subject.args, subject.kwargs)))
        tape.steady &= not given  # they are others in every call

    def backward(
        self, method: Method, scores: Tensor, once: bool = True, observe: Observe | None = None
    ) -> Maps:
        maps = super().backward(method, scores, once, observe)
        self._known.replay = self._made  # now others may use it
        return maps

    def _start(self, inputs: Maps) -> None:
        self._given = inputs

    def _way_back(self) -> Arrived:
        if not self.tape.steady:
            return super()._way_back()
        links = Links(self.tape.ops, self.entries, self._root, self.tape.current)
        left = self._left()
        self.tape.end(left.keys())
        if by_graph(self._R):
            return self._captured(links, left)
        self._made = self._replay(Again(links))
        return links.back(self._R).arrived

    def _left(self) -> dict[int, Tensor]:
        """What is read when the pass is over, by its number: its outputs and the score."""
        made = {}
        for x in tensors_in((_answer(self.outputs), self._begun_at)):
            op = getattr(x, "_rectgrad", None)
            if op is not None and op.current is self.tape.current:
                made[self.tape.number_of(op)] = x
        return made

    def _begin_at(self, made: Tensor, R: Tensor) -> None:
        super()._begin_at(made, R)
        self._begun_at = made

    def _captured(self, links: Links, left: dict[int, Tensor]) -> Arrived:
        device = self._R.device
        room = room_of(device)
        if room.closed or not worth_it(self.tape.calls, links.ops, device):
            return super()._way_back()
        if not room.turn.take(self.tape):
            self._known.made -= 1  # another time
            return super()._way_back()
        room.enter()
        arrived, sums = links.back(self._R)
        graph = Graph(self.tape.calls, self._given, self._R, list(left), room)
        done = graph.capture(links, arrived, left)
        if done and graph.memory.size <= most(device):
            self._made = self._replay(graph)
        elif done and release(device):
            self._known.made -= 1  # the others go, and it is tried again without them
        for op in links.ops:
            op.release()
        self.tape.current.sums = sums
        return arrived

    def _replay(self, way: Again | Graph) -> Replay:
        calls, root = self.tape.calls, self.tape.number_of(self._root)
        weights = [weight for call in calls for weight in call.weights]
        device = self._R.device
        return Replay(calls, root, way, device, weights, _lying(weights), self.mixes, self.tape.trace)
