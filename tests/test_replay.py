"""A model asked again: its calls are followed, and its way back is replayed.

On a CUDA device by a graph. Elsewhere by the ops themselves; and once more as on a CUDA device, but the same
steps are run again on the same places, so that everything but the graph is tested.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rectgrad
from networks import NETWORKS
from rectgrad import device_graph, kernels, replay, steps, way_back
from rectgrad.linked import LinkedTape
from rectgrad.op import Op
from rectgrad.preserve import Region
from rectgrad.script import Following
from rectgrad.subject import Subject

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
METHODS = ("rectgrad", "rectgrad_mod", "guided_backprop", "deconv")
# What these hold has no closed form, or is made anew in every pass.
NOT_REPLAYED = frozenset(
    "activations attention conv1d conv3d division library_attention mixer shared strided".split()
)


def run_again(todo, memory):
    """As a graph does it: the same steps on the same places, and the results where they were."""

    def again():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "unchanged", lambda weight: weight[0])  # a graph reads what is there
            return todo()

    found = [None if x is None else x.clone() for x in again()]

    def run():
        for place, x in zip(found, again(), strict=True):
            if place is not None:
                place.copy_(x)

    return run, found, 0


@pytest.fixture(params=["graph"] if CUDA else ["graph", "ops"])
def kind(request):
    return request.param


@pytest.fixture
def passes(monkeypatch, kind):
    """Of which kind every pass was that gave a map."""
    kinds = []
    for passing in (replay.FollowedPass, replay.LinkedPass):

        def watched(self, *args, _backward=passing.backward, **kwargs):
            maps = _backward(self, *args, **kwargs)
            kinds.append(type(self).__name__.removesuffix("Pass"))
            return maps

        monkeypatch.setattr(passing, "backward", watched)
    if not CUDA:
        monkeypatch.setattr(kernels, "replays", lambda inputs: True)
    if not CUDA and kind == "graph":
        monkeypatch.setattr(kernels, "carries", lambda x: False)
        monkeypatch.setattr(replay, "by_graph", lambda R: True)
        monkeypatch.setattr(device_graph, "captured", run_again)
        for module in (device_graph, replay):
            monkeypatch.setattr(module, "most", lambda device: 1 << 30)
        monkeypatch.setattr(Op, "release", lambda op: None)  # a graph needs none of it; to run again does
    monkeypatch.setattr(replay, "_known", weakref.WeakKeyDictionary())
    rooms = {}
    for module in (device_graph, replay):
        monkeypatch.setattr(module, "rooms", rooms)
    return kinds


graphs = pytest.mark.parametrize("kind", ["graph"], indirect=True)
THREE = ["Linked", "Noted", "Followed"]


def each(value):
    return value if isinstance(value, tuple) else (value,)


def same(a, b):
    """On a GPU the order of some sums is open."""
    far = 1e-5 if CUDA else 0.0
    return all(
        torch.allclose(x, y, rtol=0, atol=far * float(y.abs().max()))
        for x, y in zip(each(a), each(b), strict=True)
    )


def afresh(*args, **kwargs):
    """Without a replay."""
    replay.release()
    replay._known.clear()
    return rectgrad.attribute(*args, **kwargs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.filterwarnings("ignore")
def test_the_same_maps_again(name, method, passes):
    model, inputs = NETWORKS[name](0)
    model, inputs = model.to(DEVICE).float(), tuple(x.to(DEVICE).float() for x in each(inputs))
    others = tuple(x.flip(0) * 1.1 for x in inputs)
    options = {"q": 60.0} if method.startswith("rectgrad") else {}

    def ask(x):
        return rectgrad.attribute(model, x, method, target=0, **options)

    first, second, third, other = ask(inputs), ask(inputs), ask(inputs), ask(others)
    if name != "folded":  # which runs sample by sample
        assert ("Followed" in passes) == (name not in NOT_REPLAYED)
    assert same(first, second)
    assert same(first, third)
    assert same(afresh(model, others, method, target=0, **options), other)


class Net(nn.Module):
    def __init__(self, step=None):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.step, self.factor, self.held = step, 1.5, []

    def forward(self, x):
        x = F.dropout(F.max_pool2d(self.norm(self.conv(x)).relu(), 2), 0.5, self.training)
        x = self.step(self, x) if self.step is not None else x
        return self.fc(x.relu().mean((2, 3)))


def net(step=None):
    torch.manual_seed(3)
    model, x = Net(step).eval().to(DEVICE), torch.randn(4, 3, 12, 12, device=DEVICE)
    model.norm.running_var.uniform_(0.5, 2)
    return model, x


def asked(model, x, times=3, **options):
    for _ in range(times):
        maps = rectgrad.attribute(model, x, target=1, **{"q": 70.0, **options})
    return maps


def test_one_call_one_note_then_replays(passes):
    model, x = net()
    asked(model, x, 5)
    assert passes == [*THREE, "Followed", "Followed"]


def test_each_question_has_its_own(passes):
    model, x = net()
    asked(model, x)
    asked(model, x, q=60.0)
    asked(model, x[:2])
    asked(model, x.to(memory_format=torch.channels_last))
    assert passes == THREE * 4
    del passes[:]
    rectgrad.attribute(model, x, target=[0, 1, 2, 3], q=70.0)  # a class is no part of it
    rectgrad.attribute(model, x, q=70.0)
    assert passes == ["Followed"] * 2


def test_each_class_gets_its_map(passes):
    model, x = net()
    asked(model, x)
    maps = rectgrad.attribute(model, x, target=3, q=70.0)
    assert passes[-1] == "Followed"
    assert same(maps, afresh(model, x, target=3, q=70.0))
    assert not same(maps, afresh(model, x, target=1, q=70.0))


def test_weights_that_learned(passes):
    """Written where they are, they need no other graph."""
    model, x = net()
    before = asked(model, x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7).add_(0.01)
        model.norm.running_var.mul_(3)
    maps = asked(model, x, 1)
    assert passes[-1] == "Followed"
    assert not same(maps, before)
    assert same(maps, afresh(model, x, target=1, q=70.0))


def test_weights_that_lie_elsewhere(passes):
    model, x = net()
    before = asked(model, x)
    model.conv.weight.data = model.conv.weight.data * -1
    maps = asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert not same(maps, before)
    assert same(maps, afresh(model, x, target=1, q=70.0))
    model.fc.weight = nn.Parameter(model.fc.weight.detach().flip(0))
    assert same(asked(model, x, 1), afresh(model, x, target=1, q=70.0))


def test_an_attribute_that_changed(passes):
    model, x = net(lambda net, x: x * net.factor)
    before = asked(model, x)
    assert passes == THREE
    model.factor = -0.5
    maps = asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert not same(maps, before)
    assert same(maps, afresh(model, x, target=1, q=70.0))


def test_another_way_through_the_model(passes):
    """Taken by the values of a picture, or by a mode that a caller set."""
    model, x = net(lambda net, x: x.sigmoid() * x if net.factor > 1 else x * x.sigmoid())
    asked(model, x)
    model.factor = 0.5
    maps = asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert same(maps, afresh(model, x, target=1, q=70.0))


def test_the_same_calls_on_other_tensors(passes):
    """Which are all there still, and of one shape."""

    def step(net, x):
        left, right = x * 2, x.tanh()
        return (left if net.factor > 1 else right).relu() + left + right

    model, x = net(step)
    before = asked(model, x)
    assert passes == THREE
    model.factor = 0.5
    maps = asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert not same(maps, before)
    assert same(maps, afresh(model, x, target=1, q=70.0))


def turned_at(limit):
    def step(net, x):
        with torch.no_grad():
            if net.factor > limit:
                return x.relu()
        return x.relu()

    return step


def test_a_part_without_gradients(passes):
    """Where it was noted with them."""
    model, x = net(turned_at(2))
    model.conv.requires_grad_(False)
    asked(model, x)
    assert passes == THREE
    model.factor = 3
    with pytest.raises(ValueError, match="does not depend on the input"):
        asked(model, x, 1)


def test_a_model_that_catches_what_it_meets(passes):
    def step(net, x):
        try:
            return x * net.factor
        except Exception:
            return x

    model, x = net(step)
    asked(model, x)
    model.factor = 2.5
    assert same(asked(model, x, 1), afresh(model, x, target=1, q=70.0))


def test_a_model_that_keeps_what_it_made(passes):
    """It has its own tensors in every call, and they keep their values."""
    held = []

    def step(net, x):
        held.append(x)
        return x

    model, x = net(step)
    asked(model, x, 3)
    asked(model, x * 2, 1)
    assert passes == [*THREE, "Followed"]
    assert torch.equal(held[0], held[2])
    assert torch.allclose(held[2], F.max_pool2d(model.norm(model.conv(x)).relu(), 2), atol=1e-5)
    assert not torch.equal(held[2], held[3])


def test_what_hooks_keep_has_its_values(passes):
    """Also where it is written on later, seen from another side, or what the model answers."""
    model, x = net(lambda net, x: F.relu(net.wide(x), inplace=True).flatten(1).unflatten(1, x.shape[1:]))
    model.wide = nn.Conv2d(8, 8, 1).eval().to(DEVICE)
    kept = {}
    for module in (model.conv, model.norm, model.wide, model.fc, model):
        module.register_forward_hook(lambda module, given, out: kept.setdefault(module, []).append(out))
    asked(model, x)
    asked(model, x * 2, 1)
    assert passes == [*THREE, "Followed"]
    seen, kept = kept, {}
    expected = model(x), model(x * 2)
    for module, (first, _, third, other) in seen.items():
        assert torch.equal(first, third)
        assert torch.allclose(third, kept[module][0], atol=1e-5)
        assert torch.allclose(other, kept[module][1], atol=1e-5)
    assert torch.allclose(seen[model][3], expected[1], atol=1e-5)


def test_what_is_kept_of_a_pass_that_was_not_as_noted(passes):
    model, x = net(lambda net, x: x * net.factor)
    seen = []
    model.norm.register_forward_hook(lambda module, given, out: seen.append(out))
    asked(model, x)
    model.factor = 3.0
    asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert len(seen) > 4
    expected = F.batch_norm(
        model.conv(x), *list(model.norm.buffers())[:2], model.norm.weight, model.norm.bias
    )
    assert all(torch.allclose(out, expected, atol=1e-5) for out in seen)


def test_a_score_of_ones_own(passes):
    """Its calls are the pass's too."""
    model, x = net()

    def score(out):
        return (out * out).mean(1)

    maps = [rectgrad.attribute(model, x * k, target=score, q=70.0) for k in (1, 1, 1, 2)]
    assert passes == [*THREE, "Followed"]
    assert same(maps[0], maps[2])
    assert same(maps[3], afresh(model, x * 2, target=score, q=70.0))
    asked(model, x, 1)
    assert passes[-1] != "Followed"


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()[0]

    def forward(self, x):
        features = self.net.conv(x).relu()
        return {"logits": self.net.fc(features.mean((2, 3))), "features": features, "given": x}


def test_one_of_several_answers(passes):
    model, x = Several(), net()[1]
    model, score = (
        model.eval(),
        lambda out: out["logits"].mul(out["features"].mean((1, 2, 3)).view(-1, 1)).mean(1),
    )
    maps = [rectgrad.attribute(model, x * k, target=score, q=70.0) for k in (1, 1, 1, 2)]
    assert passes[-1] == "Followed"
    assert same(maps[0], maps[2])
    assert same(maps[3], afresh(model, x * 2, target=score, q=70.0))


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda out: out, Answer])
def test_the_answer_stays(wrap, passes, monkeypatch):
    """Also where a score is made of it, and after another pass."""
    answers = []

    def finish(self, *args, _finish=Subject.finish):
        maps = _finish(self, *args)
        answers.append(self.answer)
        return maps

    monkeypatch.setattr(Subject, "finish", finish)
    model, x = net()
    wrapped = Wrapped(model, wrap).eval()
    for k in (1, 1, 1, 2):
        rectgrad.attribute(wrapped, x * k, target=lambda out: getattr(out, "logits", out).mean(1), q=70.0)
    assert passes == [*THREE, "Followed"]
    for k, answer in zip((1, 1, 1, 2), answers, strict=True):
        assert torch.allclose(answer, model(x * k), atol=1e-5)


class Wrapped(nn.Module):
    def __init__(self, model, wrap):
        super().__init__()
        self.model, self.wrap = model, wrap

    def forward(self, x):
        return self.wrap(self.model(x))


class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.both = net()[0], True

    def forward(self, x):
        out = self.net(x)
        return out - self.net.fc.bias if self.both else out


def test_another_answer(passes):
    """All calls are as noted, but the last one is not made."""
    model, x = Early().eval(), net()[1]
    for _ in range(3):
        rectgrad.attribute(model, x, q=70.0)
    model.both = False
    maps = rectgrad.attribute(model, x, q=70.0)
    assert passes[-1] != "Followed"
    assert same(maps, afresh(model, x, q=70.0))


def out_of_sight(func):
    with torch._C.DisableTorchFunction():
        func()


def test_a_weight_that_the_model_writes(passes):
    def step(net, x):
        if net.factor > 2:
            out_of_sight(lambda: net.fc.weight.detach().mul_(0.5))
        return x

    model, x = net(step)
    asked(model, x)
    model.factor = 3.0
    asked(model, x, 1)
    assert passes[-1] != "Followed"


@graphs
def test_what_is_written_out_of_sight(passes):
    """A graph does not do it again: it is not used."""
    model, x = net()
    model.conv.register_forward_hook(lambda *call: out_of_sight(lambda: call[-1].detach().mul_(-2)))
    maps = asked(model, x, 4)
    assert "Followed" not in passes
    assert same(maps, afresh(model, x, target=1, q=70.0))


@graphs
def test_another_stream_than_at_first(passes, monkeypatch):
    model, x = net()
    expected = asked(model, x)
    others = itertools.count()
    monkeypatch.setattr(device_graph, "_stream", lambda device: next(others))
    assert same(asked(model, x, 1), expected)
    assert passes[-1] != "Followed"


@graphs
def test_the_pass_is_run_once(passes, monkeypatch):
    """Nobody keeps anything, also where it is not as noted: there is nothing to run for them."""
    again = []
    monkeypatch.setattr(device_graph.Graph, "_give_all", lambda self, held: again.append(held))
    model, x = net(lambda net, x: x * net.factor)
    asked(model, x, 4)
    model.factor = 3.0
    asked(model, x, 1)
    assert passes == [*THREE, "Followed", passes[-1]]
    assert passes[-1] != "Followed"
    assert again == []


def scripted(func):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        return torch.jit.script(func)


@scripted
def large(x: torch.Tensor) -> bool:
    return bool(x.abs().max() > 50.0)


@scripted
def capped(x: torch.Tensor):
    x.clamp_(max=20.0)


def in_another_thread(func):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(func).result()


def read_by_a_script(net, x):
    return x.tanh() if large(x) else x * 2.0


def read_in_another_thread(net, x):
    return x.tanh() if in_another_thread(lambda: float(x.detach().abs().max())) > 50 else x * 2.0


def written_by_a_script(net, x):
    with torch.no_grad():
        capped(x)
    return x


@pytest.mark.skipif(not CUDA, reason="stand-ins refuse to be read in torch's builds for CUDA")
@pytest.mark.parametrize("step", [read_by_a_script, read_in_another_thread, written_by_a_script])
def test_values_that_are_read_out_of_sight(step, passes):
    model, x = net(step)
    asked(model, x)
    for _ in range(3):
        assert same(asked(model, x * 500, 1), afresh(model, x * 500, target=1, q=70.0))
    assert "Followed" not in passes


@pytest.mark.skipif(not CUDA, reason="stand-ins refuse to be read in torch's builds for CUDA")
def test_what_is_kept_out_of_sight_cannot_be_read(passes):
    """Another tensor on the same storage: its values are not there, and that is said."""
    model, x = net()
    seen = []
    model.norm.register_forward_hook(lambda module, given, out: seen.append(nn.Parameter(out)))
    asked(model, x, 4)
    if passes[-1] == "Followed":
        with pytest.raises(RuntimeError, match="stands for one that a CUDA graph makes"):
            seen[-1].sum()


class Turned(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return -found if "convolution" in str(func) else found


def test_a_mode_that_changes_what_torch_does(passes):
    def step(net, x):
        with Turned() if net.factor > 2 else contextlib.nullcontext():
            return F.conv2d(x, net.kernel)

    model, x = net(step)
    model.kernel = torch.ones(8, 8, 1, 1, device=DEVICE)
    before = asked(model, x)
    model.factor = 3.0
    maps = asked(model, x, 1)
    assert not same(maps, before)
    assert same(maps, afresh(model, x, target=1, q=70.0))


@graphs
def test_no_memory_for_what_hooks_keep(passes, monkeypatch):
    """It is said, and not left without values."""

    def fails(self, held):
        raise RuntimeError("no place for these")

    model, x = net()
    model.norm.register_forward_hook(lambda module, given, out, seen=[]: seen.append(out))
    asked(model, x)
    monkeypatch.setattr(device_graph.Graph, "_give_all", fails)
    with pytest.raises(RuntimeError, match="no place for these"):
        asked(model, x, 1)


def test_what_was_kept_before_a_pass_went_another_way(passes):
    """What would have been written on it is not."""

    def step(net, x):
        x = net.second(x)
        return F.relu(x, inplace=True) if net.factor < 2 else x.tanh()

    model, x = net(step)
    model.second = nn.BatchNorm2d(8).eval().to(DEVICE)
    nn.init.constant_(model.second.bias, -0.5)
    seen = []
    model.second.register_forward_hook(lambda module, given, out: seen.append(out))
    asked(model, x)
    assert passes == THREE
    del seen[:]
    model.factor = 3.0
    asked(model, x, 1)
    assert all(bool((out < 0).any()) for out in seen)


class Pair(collections.namedtuple("Pair", "logits scale")):
    """Not to be built from its parts."""

    def __new__(cls, logits):
        return super().__new__(cls, logits, 1.0)


def round_about(out):
    found = {"out": out}
    found["self"] = found
    return found


@pytest.mark.parametrize("wrap", [Pair, lambda out: [out, (out, {"a": out})], round_about])
def test_answers_of_all_kinds(wrap, passes):
    model, x = Wrapped(net()[0], wrap).eval(), net()[1]
    target = 1 if wrap is Pair else "a score"

    def score(out):
        return out[0].mean(1) if isinstance(out, list) else out["out"].mean(1)

    for _ in range(4):
        try:
            maps = rectgrad.attribute(model, x, target=score if target != 1 else 1, q=70.0)
        except RecursionError:  # a score is asked of copies
            assert wrap is round_about
            return
    assert same(maps, afresh(model, x, target=score if target != 1 else 1, q=70.0))


@pytest.mark.skipif(not CUDA, reason="needs two devices")
def test_a_number_on_another_device(passes):
    """A graph would know it by its value."""
    model, x = net(lambda net, x: x - net.shift)
    model.shift = torch.tensor(0.25)
    asked(model, x)
    model.shift.fill_(0.9)
    assert same(asked(model, x, 1), afresh(model, x, target=1, q=70.0))


def test_arguments_by_name(passes):
    def step(net, x):
        return torch.flatten(input=x, start_dim=2).unflatten(2, x.shape[2:])

    model, x = net(step)
    maps = asked(model, x, 3)
    assert passes == THREE
    assert same(maps, afresh(model, x, target=1, q=70.0))
    joined, _ = net(lambda net, x: torch.cat(tensors=[x, x], dim=0)[: len(x)])
    assert same(asked(joined, x, 3), afresh(joined, x, target=1, q=70.0))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part(passes):
    model, x = net()
    expected = asked(model, x, 1)
    model.conv = torch.compile(model.conv, backend="eager")
    try:
        for _ in range(5):
            assert same(asked(model, x, 1), expected)
    finally:
        torch._dynamo.reset()


def test_an_interrupt_when_a_pass_ends(passes, monkeypatch):
    """The tape may be left on torch's stack of modes: it lets everything through."""
    model, x = net()
    expected = asked(model, x)

    def interrupted(self, *error):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LinkedTape, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            asked(model, x, 1)
    try:
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    finally:
        torch.overrides._pop_mode()
    assert same(asked(model, x, 3), expected)
    assert passes[-1] == "Followed"


def test_a_turn_ends_with_its_tape():
    turn, tape, other = way_back.Turn(), LinkedTape({}), LinkedTape({})
    assert turn.take(tape)
    assert not turn.take(other)
    tape.ended = True
    assert turn.take(other)
    del other
    assert turn.take(LinkedTape({}))


def test_calls_that_could_not_be_noted_do_not_count(passes):
    model, x = net()
    with torch.autocast(DEVICE):
        asked(model, x, 3)
    del passes[:]
    asked(model, x, 5)
    assert passes[-1] == "Followed"


def where_it_lies(net, x):
    net.held.append(x.data_ptr())
    return x


def shown(net, x):
    net.held.append(str(x))
    return x


def made_anew(net, x):
    return x * torch.full((), net.factor, device=x.device)


def copied(net, x):
    y = x.relu()
    y += x
    return y


def counted(net, x):
    net.held.append(float(x.sum()))
    return x


@pytest.mark.parametrize("step", [made_anew, copied, counted, where_it_lies, shown])
def test_what_is_not_replayed(step, passes):
    model, x = net(step)
    maps = asked(model, x, 4)
    assert "Followed" not in passes
    assert model.held == []
    assert same(maps, afresh(model, x, target=1, q=70.0))


def test_a_pass_is_not_noted_for_ever(passes):
    """Replays that are of no use are made twice."""
    model, x = net(lambda net, x: x * torch.full((), net.factor, device=x.device))
    asked(model, x, 6)
    assert passes == ["Linked", "Noted", "Noted", "Linked", "Linked", "Linked"]


@dataclasses.dataclass(frozen=True)
class Mine(rectgrad.RectGrad):
    """Its rules may be others in every pass."""

    seen: list = dataclasses.field(default_factory=list)

    def rules(self):
        self.seen.append(1)
        return super().rules()


def test_a_method_of_somebodys_own_is_not_replayed(passes):
    model, x = net()
    method = Mine(q=70.0)
    for _ in range(4):
        maps = rectgrad.attribute(model, x, method, target=1)
    assert passes == ["Linked"] * 4
    assert same(maps, asked(model, x, 1))


def test_replays_go_with_their_model(passes, monkeypatch):
    if not CUDA:  # a graph holds none of what it was captured from
        monkeypatch.setattr(device_graph, "captured", lambda todo, memory: (int, todo(), 0))
    model, x = net()
    asked(model, x)
    (known,) = (known for questions in replay._known.values() for known in questions.values())
    gone = weakref.ref(known.replay.way), weakref.ref(model)
    del known, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def held():
    every = (known for questions in replay._known.values() for known in questions.values())
    return [known.replay for known in every if known.replay is not None]


@graphs
def test_replays_share_their_memory(passes):
    models, x = [net()[0] for _ in range(3)], net()[1]
    for model in models:
        asked(model, x)
    assert passes == THREE * 3
    assert len({id(replay.way.memory) for replay in held()}) == 1
    del passes[:]
    expected = [afresh(model, x * 2, target=1, q=70.0) for model in models]
    for model in models:
        asked(model, x, 2)
    del passes[:]
    assert same(tuple(asked(model, x * 2, 1) for model in models), tuple(expected))
    assert passes == ["Followed"] * 3


@graphs
def test_memory_has_a_limit(passes, monkeypatch):
    monkeypatch.setattr(device_graph, "most", lambda device: 10_000)
    model, x = net()
    asked(model, x)
    assert held() == []
    assert passes == ["Linked", "Noted", "Noted"]


@graphs
def test_layers_so_large_that_there_is_no_time_to_gain(passes, monkeypatch):
    model, x = net()
    monkeypatch.setattr(device_graph, "BYTES_OF_AN_OP", 100)
    asked(model, x, 4)
    assert held() == []
    assert "Followed" not in passes


@pytest.mark.skipif(not CUDA, reason="fills the memory of a CUDA device")
def test_where_torch_has_put_by_all_memory(passes):
    model, x = net()
    free, _ = torch.cuda.mem_get_info()
    del_me = torch.empty(max(free - (1 << 28), 0), dtype=torch.uint8, device=DEVICE)
    del del_me
    asked(model, x)
    assert passes == THREE


def test_what_a_pass_kept_goes_on_its_way_back(passes, kind, monkeypatch):
    """Not all at its end."""
    model, x = net(lambda net, x: x.relu() * net.factor)
    kept, alive, back, pass_on = [], [], way_back.Links.back, way_back.pass_on

    def watched_back(links, R):
        kept.append([weakref.ref(x) for op in links.ops for x in op.held()])
        alive.append([])
        return back(links, R)

    def watched(op):
        alive[-1].append(sum(ref() is not None for ref in kept[-1]))
        pass_on(op)

    monkeypatch.setattr(way_back.Links, "back", watched_back)
    monkeypatch.setattr(way_back, "pass_on", watched)
    asked(model, x)
    for counts in [alive[0], alive[-1]] if kind == "ops" else [alive[0]]:
        assert counts[0] == 5
        assert counts[-1] <= 1
        assert counts == sorted(counts, reverse=True)


def test_an_error_about_the_class(passes):
    model, x = net()
    asked(model, x)
    with pytest.raises(ValueError, match="out of range"):
        rectgrad.attribute(model, x, target=99, q=70.0)
    asked(model, x, 1)
    assert passes[-1] == "Followed"


def test_threads(passes):
    """Who comes while a replay is in use goes another way."""
    model, x = net()
    expected = {i: afresh(model, x * (i + 1), target=1, q=70.0) for i in range(4)}
    asked(model, x)
    wrong = []

    def work(i):
        for _ in range(8):
            if not same(asked(model, x * (i + 1), 1), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert "Followed" in passes


def interrupted(monkeypatch, at, error):
    """The way back stops at its `at`-th op."""
    left, pass_on = [at], way_back.pass_on

    def stopping(op):
        left[0] -= 1
        if left[0] == 0:
            raise error
        pass_on(op)

    monkeypatch.setattr(way_back, "pass_on", stopping)


@pytest.mark.skipif(CUDA, reason="a graph has no ops to stop at")
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("modified by an inplace operation")])
def test_a_way_back_that_stopped(error, at, passes, monkeypatch):
    """What was on its way does not arrive in the next pass."""
    model, x = net(lambda net, x: x * net.factor + x)
    asked(model, x)
    with monkeypatch.context() as patch:
        interrupted(patch, at, error)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                asked(model, x * 2, 1)
        else:
            assert same(asked(model, x * 2, 1), afresh(model, x * 2, target=1, q=70.0))
    assert same(asked(model, x, 4), afresh(model, x, target=1, q=70.0))


class Heads(nn.Module):
    """Two answers, one added to the other in its place."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv(x).relu().mean((2, 3))
        out = self.first(x)
        out.add_(self.second(x))
        return out


def test_what_is_added_in_place_is_written(passes):
    """The class that is explained is that of the sum."""
    torch.manual_seed(0)
    model, seen = Heads().eval().to(DEVICE), []
    x = torch.randn(16, 3, 6, 6, device=DEVICE)
    model.first.register_forward_hook(lambda module, given, out: seen.append(out))
    for _ in range(4):
        maps = rectgrad.attribute(model, x, q=70.0)
    assert passes[-1] == "Followed"
    assert same(maps, afresh(model, x, q=70.0))
    assert torch.allclose(seen[0], seen[3])


@pytest.mark.parametrize("change", ["turned", "fewer"])
def test_weights_that_lie_there_otherwise(change, passes):
    """At the same address, turned round or fewer of them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(200, 5),
    )
    model, x = model.eval().to(DEVICE), torch.randn(2, 3, 7, 7, device=DEVICE)
    asked(model, x)
    if change == "turned":
        model[2].weight.data = model[2].weight.data.transpose(0, 1)
    else:
        model[0].weight.data, model[0].bias.data = model[0].weight.data[:4], model[0].bias.data[:4]
        model[2].weight.data = model[2].weight.data[:, :4]
    maps = asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert same(maps, afresh(model, x, target=1, q=70.0))
    assert same(asked(model, x, 3), maps)


def bounded(net, x):
    return x.sub(0.3).clamp(min=net.low, max=net.high)


def sixth(net, x):
    return x * (F.relu6(x * 4) / net.low)


@pytest.mark.parametrize("step", [bounded, sixth])
def test_what_a_call_is_by_the_numbers_in_a_tensor(step, passes):
    """A buffer that is written where it lies makes another activation of it."""
    model, x = net(step)
    model.register_buffer("low", torch.tensor(0.0 if step is bounded else 6.0, device=DEVICE))
    model.register_buffer("high", torch.tensor(6.0, device=DEVICE))
    asked(model, x)
    model.low.fill_(-0.25 if step is bounded else 3.0)
    maps = asked(model, x, 1)
    assert same(maps, afresh(model, x, target=1, q=70.0))


def test_a_weight_of_one_number_is_that_very_one(passes):
    model, x = net(lambda net, x: F.prelu(x - 0.2, net.slope))
    model.slope = nn.Parameter(torch.tensor([0.25], device=DEVICE))
    asked(model, x)
    model.slope = nn.Parameter(model.slope.detach().clone())
    maps = asked(model, x, 1)
    assert passes[-1] != "Followed"
    assert same(maps, afresh(model, x, target=1, q=70.0))


@pytest.mark.parametrize("by", ["hook", "attribute"])
def test_a_weight_that_holds_its_model(by, passes):
    """It would never go: there is no replay."""
    model, x = net()
    if by == "hook":
        model.conv.weight.register_hook(lambda grad, model=model: None)
    else:
        model.conv.weight.owner = model
    asked(model, x)
    assert "Followed" not in passes
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_is_not_finite_is_said(passes):
    model, x = net(lambda net, x: x * net.factor)
    asked(model, x)
    with torch.no_grad():
        model.fc.weight[1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        asked(model, x, 1)


def test_after_an_error_all_goes_on(passes):
    def step(net, x):
        if net.factor == 0:
            raise KeyError("mine")
        return x

    model, x = net(step)
    expected = asked(model, x)
    model.factor = 0
    with pytest.raises(KeyError, match="mine"):
        asked(model, x, 1)
    model.factor = 1.5
    assert same(asked(model, x), expected)


def test_following_counts_its_calls():
    """A pass that ends before the script does is not the noted one."""
    tape = Following([])
    assert tape.finished()
    tape.failed = True
    assert not tape.finished()


@graphs
def test_when_memory_runs_out_replays_go_first(passes):
    """And all samples are explained at once all the same."""
    full = []

    def step(net, x):
        if full and held():
            raise MemoryError("out of memory")
        return x

    model, x = net(step)
    expected = asked(model, x)
    full.append(True)
    assert same(asked(model, x, 1), expected)
    assert held() == []


def test_a_call_that_was_interrupted_at_its_beginning(passes):
    """What it remembers of the model goes with it."""
    model, x = net()
    Region(model, 1, [x], x.device)
    assert not Region._active
    model.factor = 2.5
    asked(model, x, 1)
    assert model.factor == 2.5
