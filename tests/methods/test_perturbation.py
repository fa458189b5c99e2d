"""Occlusion and RISE: the right maps, from forward passes alone, of as many copies as fit."""

import math
import threading
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rectgrad
from networks import NETWORKS
from rectgrad import RISE, Occlusion
from rectgrad.kernels import device
from rectgrad.kernels.draws import generator_of
from rectgrad.kernels.masks import Masks
from rectgrad.methods.method import progress
from reference.perturbation import rise, rise_mask

HIDING = {"occlusion": Occlusion(window=3, stride=2), "rise": RISE(masks=25, seed=3)}
every_method = pytest.mark.parametrize("method", HIDING.values(), ids=HIDING)


def as_tuple(maps):
    return maps if isinstance(maps, tuple) else (maps,)


def assert_close(maps, expected, tolerance=1e-9):
    for a, b in zip(as_tuple(maps), as_tuple(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bool(b.any())
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def watched(model, *do):
    """The model as a function that notes how many rows it is given, and does something with each call."""
    rows = []

    def run(x, *args, **kwargs):
        rows.append(len(x))
        for step in do:
            step(x)
        return model(x, *args, **kwargs)

    return run, rows


@pytest.fixture
def small():
    """A network in float64 and three inputs: (3, 3, 8, 8)."""
    return NETWORKS["plain_cnn"](0)


# --- the maps -----------------------------------------------------------------------------------------------


def drawn(method, sides):
    """The masks that a RISE draws: cells first, then the shift along each side."""
    random = generator_of(str(method.seed).encode())
    grids = torch.rand(method.masks, *(method.cells,) * len(sides), generator=random) < method.keep
    shifts = [torch.randint(math.ceil(s / method.cells), (method.masks,), generator=random) for s in sides]
    each = zip(grids, *shifts, strict=True)
    return [rise_mask(grid, tuple(map(int, shift)), sides) for grid, *shift in each]


@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("plain_cnn", {}),
        ("mixer", {"cells": 4}),
        ("conv1d", {"cells": 4, "keep": 0.3}),
        ("conv3d", {"cells": 2, "keep": 0.8}),
    ],
)
def test_rise_is_the_formula(network, options):
    model, x = NETWORKS[network](1)
    method = RISE(masks=12, seed=5, **options)
    masks = drawn(method, tuple(x.shape[2:]))
    with torch.no_grad():
        expected = [
            rise(lambda point: float(model(*point)[0, 1]), row[None], masks, method.keep) for row in x
        ]
    assert_close(rectgrad.attribute(model, x, method, 1), torch.cat(expected))


def test_the_masks_are_between_0_and_1_and_keep_their_share():
    masks = Masks((20, 33), 3000, 5, 0.3, generator_of(b"1"), torch.device("cpu")).between(0, 3000)
    assert masks.shape == (3000, 20, 33)
    assert masks.min() >= 0
    assert masks.max() <= 1 + 1e-12
    assert (masks.mean(0) - 0.3).abs().max() < 0.04
    assert len({mask.numpy().tobytes() for mask in masks}) > 2900


def test_another_seed_gives_other_masks(small):
    first, again, other = (rectgrad.attribute(*small, RISE(masks=10, seed=s), 1) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@every_method
@pytest.mark.parametrize("network", ["plain_cnn", "conv1d", "conv3d"])
def test_all_channels_have_one_value(method, network):
    model, x = NETWORKS[network](0)
    maps = rectgrad.attribute(model, x, method, 1)
    assert bool(maps.any())
    assert torch.equal(maps, maps[:, :1].expand_as(maps))


def test_the_channel_sum_is_the_fall_of_the_score(small):
    """Windows side by side: each position belongs to one."""
    model, x = small
    maps = rectgrad.attribute(model, x, Occlusion(window=4, stride=4, baseline=0.5), 2)
    for rows, columns in product([slice(0, 4), slice(4, 8)], repeat=2):
        hidden = x.clone()
        hidden[:, :, rows, columns] = 0.5
        fall = (model(x) - model(hidden))[:, 2].detach()
        own = maps.sum(1)[:, rows, columns]
        torch.testing.assert_close(own, fall[:, None, None].expand_as(own), rtol=1e-9, atol=1e-12)


def test_a_window_is_an_eighth_of_each_side_and_moves_by_half_of_it():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double().eval()
    x = torch.randn(1, 1, 34, 16, dtype=torch.float64)
    model(x)
    seen = []
    rectgrad.attribute(watched(model, lambda x: seen.extend(x.detach()))[0], x, "occlusion", 0)
    sizes = {tuple(map(int, ((hidden == 0).any(2).sum(), (hidden == 0).any(1).sum()))) for hidden in seen}
    assert sizes == {(0, 0), (4, 2)}
    windows = {tuple((hidden == 0).nonzero()[0].tolist()[1:]) for hidden in seen if bool((hidden == 0).any())}
    assert windows == set(product(range(0, 31, 2), range(0, 15)))


SHAPES = {"signal": (40,), "image": (24, 32), "volume": (8, 8, 12)}


@pytest.mark.parametrize("name", ["occlusion", "rise"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_part_that_decides_is_found(name, shape):
    """A network that reads one patch and nothing else."""
    patch = (..., *(slice(side // 2, side // 2 + max(side // 4, 2)) for side in shape))

    def model(x):
        decides = x[patch].flatten(1)
        return torch.stack([decides.mean(1) ** 2, -(decides.mean(1) ** 2)], dim=1)

    x = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0)) + 1
    options = {"masks": 2000} if name == "rise" else {}
    maps = rectgrad.attribute(model, x, name, 0, **options).sum(1)
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[patch[1:]] = True
    assert all(bool(inside.flatten()[m.argmax()]) for m in maps.flatten(1))
    assert maps[:, inside].mean() > 3 * maps[:, ~inside].abs().mean()


@every_method
def test_of_several_inputs_one_is_hidden_at_a_time(method):
    model, (picture, vector) = NETWORKS["two_inputs"](0)
    first, second = rectgrad.attribute(model, (picture, vector), method)
    assert_close(first, rectgrad.attribute(model, picture, method, forward_args=(vector,)))
    swapped = rectgrad.attribute(lambda v, p: model(p, v), vector, method, forward_args=(picture,))
    assert_close(second, swapped)


# --- what is explained --------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize(
    "target", [None, 2, [2, 0, 1], torch.tensor([1, 1, 3]), rectgrad.contrast([0, 1, 2], 3)], ids=str
)
def test_targets(small, method, target):
    model, x = small
    best = model(x).argmax(1).tolist()
    maps = rectgrad.attribute(model, x, method, target)
    for i in range(3):
        own = {None: best[i], 2: 2}.get(target) if target is None or isinstance(target, int) else None
        if isinstance(target, (list, torch.Tensor)):
            own = int(target[i])
        if own is None:
            a, b = (rectgrad.attribute(model, x[i : i + 1], method, c) for c in (target.a[i], target.b))
            alone = a - b
        else:
            alone = rectgrad.attribute(model, x[i : i + 1], method, own)
        assert_close(maps[i : i + 1], alone)


@every_method
def test_outputs_of_one_number_need_no_target(small, method):
    model, x = small
    expected = rectgrad.attribute(model, x, method, 1)
    assert_close(rectgrad.attribute(lambda x: model(x)[:, 1], x, method), expected)
    assert_close(rectgrad.attribute(lambda x: model(x)[:, 1:2], x, method), expected)


@every_method
def test_a_callable_target_sees_the_samples_alone(small, method):
    model, x = small
    run, rows = watched(model)
    maps = rectgrad.attribute(run, x, method, lambda outputs: outputs[:, 1] ** 2)
    assert set(rows) == {3}
    assert_close(maps, rectgrad.attribute(lambda x: model(x)[:, 1] ** 2, x, method))


@every_method
def test_a_network_without_a_gradient(small, method):
    """Votes, numpy, no_grad: the score is all that counts."""
    model, x = small

    @torch.no_grad()
    def votes(x):
        return torch.from_numpy((model(x).numpy() > 0.1).astype("int64"))

    maps = rectgrad.attribute(votes, x, method, lambda out: out.sum(1))
    assert maps.dtype == x.dtype
    assert bool(maps.any())


# --- how it is computed -------------------------------------------------------------------------------------


@every_method
def test_the_model_runs_without_a_graph(small, method):
    model, x = small
    seen = []

    def look(x):
        seen.append((torch.is_grad_enabled(), x.requires_grad))

    maps = rectgrad.attribute(watched(model, look)[0], x.requires_grad_(), method)
    assert set(seen) == {(False, False)}
    assert not maps.requires_grad
    assert x.grad is None


class Calls(TorchDispatchMode):
    """How many operations run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (RISE(masks=8), RISE(masks=60)),
        (Occlusion(window=4, stride=4), Occlusion(window=2, stride=1)),
    ],
)
def test_the_parts_of_a_pass_are_hidden_at_once(small, few, many):
    """The work beside the model's is for each pass, not for each mask or window."""
    counts = []
    for method in (few, many):
        run, rows = watched(small[0])
        with Calls() as calls:
            rectgrad.attribute(run, small[1][:1], method, 1)
        assert len(rows) == 2  # the input alone, then all parts
        counts.append(calls.count)
    assert counts[0] == counts[1]


def test_copies_share_passes(small):
    """The input alone, whose class is explained, then as many as fit: 64 rows are 21 copies of three."""
    run, rows = watched(small[0])
    rectgrad.attribute(run, small[1], Occlusion(window=2), 1)
    assert rows == [3, 63, 63, 24]  # 49 windows, and the input once more
    rows.clear()
    rectgrad.attribute(run, small[1], Occlusion(window=2), 1, batch_size=1)
    assert rows == [1, 50] * 3


def test_the_largest_activation_limits_the_copies(small, monkeypatch):
    """In this network 5 * 64 numbers of eight bytes for each sample."""
    run, rows = watched(small[0])
    expected = rectgrad.attribute(*small, Occlusion(window=2), 1)
    for copies in (1, 4):
        rows.clear()
        monkeypatch.setitem(device.LARGEST, "cpu", copies * 3 * 5 * 64 * 8 + 100)
        assert_close(rectgrad.attribute(run, small[1], Occlusion(window=2), 1), expected)
        assert max(rows) == 3 * copies


@every_method
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, MemoryError])
def test_less_memory_means_fewer_copies(small, method, error):
    model, x = small

    def limited(x):
        if len(x) > 12:
            raise error("out of memory")

    run, rows = watched(model, limited)
    assert_close(rectgrad.attribute(run, x, method, 1), rectgrad.attribute(model, x, method, 1))
    assert rows.count(63) <= 1
    assert max(row for row in rows if row <= 12) > 3


@every_method
def test_arguments_of_each_sample_are_repeated(small, method):
    model, x = small
    shift, scale = torch.randn(3, 1, 1, 1, dtype=x.dtype), torch.rand(4, dtype=x.dtype)

    def shifted(x, shift, *, scale):
        return model(x + shift) * scale

    call = {"forward_kwargs": {"scale": scale}}
    run, rows = watched(shifted)
    maps = rectgrad.attribute(run, x, method, 1, forward_args=(shift,), **call)
    assert max(rows) > 3
    for i in range(3):
        own = {"forward_args": (shift[i : i + 1],), **call}
        assert_close(maps[i : i + 1], rectgrad.attribute(shifted, x[i : i + 1], method, 1, **own))


MIXING = {
    "centred": lambda plain, x: plain(x - x.mean(0)),
    "by the size of the batch": lambda plain, x: plain(x) * len(x),
    "dropout without a module": lambda plain, x: F.dropout(plain(x), 0.5, training=True),
    "fixed size": lambda plain, x: plain(x) + torch.zeros(3, 1),
}


@every_method
@pytest.mark.parametrize("kind", MIXING)
def test_copies_that_would_see_each_other_run_alone(small, method, kind, monkeypatch):
    model, x = small
    run, rows = watched(lambda x: MIXING[kind](model, x))
    maps = rectgrad.attribute(run, x, method, 1)
    assert rows.count(3) > 16
    monkeypatch.setattr("rectgrad.engine.points.separable", lambda *_: False)
    assert torch.equal(maps, rectgrad.attribute(run, x, method, 1))


@every_method
def test_a_record_is_asked_for_the_class_alone(small, method):
    kept = rectgrad.record(*small)
    assert_close(kept.attribute(method), rectgrad.attribute(*small, method))
    assert_close(kept.attribute(method, 3), rectgrad.attribute(*small, method, 3))


@every_method
def test_captured_it_is_an_ordinary_call(small, method):
    model, x = small
    captured = rectgrad.capture(model, x, method)
    assert torch.equal(captured(x, 1), rectgrad.attribute(model, x, method, 1))
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(rectgrad.StaleCaptureError, match="'weight' was replaced"):
        captured(x)


class Eventful(nn.Module):
    """Writes on a buffer and on itself in every pass."""

    def __init__(self):
        super().__init__()
        self.inner = NETWORKS["plain_cnn"](0)[0]
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.scale.mul_(2)
        self.calls += 1
        self.seen.append(len(x))
        return self.inner(x) * self.scale.clone() * self.calls * torch.rand(1, dtype=x.dtype)


@every_method
def test_every_copy_meets_the_state_that_the_call_found(small, method):
    model, x, state = Eventful().eval(), small[1], torch.get_rng_state()
    maps = rectgrad.attribute(model, x, method, 1)
    assert (model.scale.item(), model.calls, model.seen) == (1, 0, [])
    assert torch.equal(torch.get_rng_state(), state)
    factor = 2 * torch.rand(1, dtype=x.dtype, generator=torch.Generator().set_state(state))
    assert_close(maps, factor * rectgrad.attribute(model.inner, x, method, 1))


@every_method
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_interrupt_leaves_no_trace(small, method, call, monkeypatch):
    model, x, state = Eventful().eval(), small[1], torch.get_rng_state()
    monkeypatch.setitem(device.ROWS, "cpu", 24)  # three passes at least
    passes = []

    def interrupt(module, given, out):
        passes.append(len(out))
        if len(passes) == call:
            raise KeyboardInterrupt

    model.inner.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rectgrad.attribute(model, x, method, 1)
    assert len(passes) == call
    assert (model.scale.item(), model.calls, model.seen) == (1, 0, [])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@every_method
def test_threads(small, method):
    model, x = Eventful().eval(), small[1]
    expected, found = rectgrad.attribute(model, x, method, 1), []
    threads = [
        threading.Thread(target=lambda: found.append(rectgrad.attribute(model.inner, x, method, 1)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(maps, found[0]) for maps in found)
    assert expected.shape == found[0].shape


@every_method
def test_progress_is_told(small, method):
    told = []
    token = progress.set(lambda done, count: told.append((done, count)))
    try:
        rectgrad.attribute(*small, method, 1)
    finally:
        progress.reset(token)
    count = 1 + (25 if isinstance(method, RISE) else 16)
    assert told == [(done, count) for done in range(1, count + 1)]


# --- errors -------------------------------------------------------------------------------------------------


@every_method
def test_a_score_that_is_not_finite_names_the_layer(small, method):
    model, x = small
    with torch.no_grad():
        model[3].bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"output of layer '3'.*contains NaN"):
        rectgrad.attribute(model, x, method, 1)


@every_method
def test_a_score_that_is_not_finite_where_something_is_hidden(small, method):
    model, x = small

    def divided(x):
        return model(x) / (x.flatten(1).amin(1, keepdim=True) != 0)

    with pytest.raises(ValueError, match="the score of a partly hidden input is NaN"):
        rectgrad.attribute(divided, x + 9, method)


@pytest.mark.parametrize(
    ("method", "options", "error", "words"),
    [
        ("occlusion", {"window": 2, "stride": 3}, ValueError, "stride must be at most the window, 2, not 3"),
        ("occlusion", {"stride": 2}, ValueError, "stride must be at most the window, 1, not 2"),
        ("occlusion", {"window": 0}, ValueError, "window must be at least 1, not 0"),
        ("occlusion", {"window": 2.5}, TypeError, "window must be an integer, not 2.5"),
        ("occlusion", {"baseline": "grey"}, TypeError, "baseline must be a number or a tensor"),
        ("occlusion", {"baseline": torch.rand(5)}, ValueError, "does not broadcast to the input's"),
        ("rise", {"masks": 0}, ValueError, "masks must be at least 1, not 0"),
        ("rise", {"keep": 0}, ValueError, "keep must be from 0.01 to 1, not 0"),
        ("rise", {"cells": -1}, ValueError, "cells must be at least 1, not -1"),
    ],
)
def test_options_that_make_no_sense(small, method, options, error, words):
    with pytest.raises(error, match=words):
        rectgrad.attribute(*small, method, 1, **options)


def test_a_window_larger_than_the_input_hides_all_of_it(small):
    model, x = small
    maps = rectgrad.attribute(model, x, Occlusion(window=100), 1)
    fall = (model(x) - model(torch.zeros_like(x)))[:, 1].detach()
    assert_close(maps, (fall / 3)[:, None, None, None].expand_as(x))


def test_baselines_of_each_sample_are_cut_with_the_samples(small):
    model, x = small
    method = Occlusion(window=2, baseline=torch.rand_like(x))
    maps = rectgrad.attribute(model, x, method, 1)
    assert_close(rectgrad.attribute(model, x, method, 1, batch_size=2), maps)
