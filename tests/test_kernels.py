"""The CPU kernels against what they replace: selection bit for bit, gradients to rounding."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import rectgrad
from networks import NETWORKS
from rectgrad import kernels, ops
from rectgrad.engine.op import Current, Op
from rectgrad.kernels import linear_ops as steps
from rectgrad.kernels import native, portable
from rectgrad.kernels.linear_ops import AvgPool, Conv, Linear, Scale, outside_zeroed
from rectgrad.kernels.reference import rank, smallest
from rectgrad.kernels.sparse import Survivors, as_they_are, carrier, with_survivors
from rectgrad.ops import Spec
from rectgrad.rules.rectified import SCORES

LIBRARY = native.load()
WHY = "NO NATIVE KERNELS were built (no C compiler?): the fast CPU code is not tested here"
needs_native = pytest.mark.skipif(LIBRARY is None, reason=WHY)
LEVELS = native.LEVELS[: native.LEVELS.index(LIBRARY.level) + 1] if LIBRARY is not None else ()


def library(level):
    path = native.FOLDER / f"_native_{level}.so"
    return native.Library(level, native._declared(ctypes.CDLL(str(path))))


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv("RECTGRAD_KERNELS", "reference")


def ways():
    found = [(level, lambda score, k, at=level: native.smallest(library(at), score, k)) for level in LEVELS]
    return [*found, ("portable", portable.smallest)]


SELECTIONS = pytest.mark.parametrize("smallest", [w for _, w in ways()], ids=[name for name, _ in ways()])

# ---- selection -----------------------------------------------------------------------------------------

special = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, float("inf"), -float("inf")]
values = st.lists(
    st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from(special)), min_size=1, max_size=70
)


@SELECTIONS
@settings(max_examples=200, deadline=None)
@given(values=values, share=st.floats(0, 1))
def test_small_rows(smallest, values, share):
    score = torch.tensor([values, values[::-1]], dtype=torch.float32)
    k = 1 + round(share * (len(values) - 1))
    assert torch.equal(smallest(score, k), score.kthvalue(k, dim=1).values)


KINDS = {
    "normal": lambda d: torch.randn(2, d),
    "half zero": lambda d: torch.randn(2, d).relu() * torch.randn(2, d),
    "few positive": lambda d: (torch.randn(2, d) - 3).relu() * torch.randn(2, d).abs(),
    "ties": lambda d: torch.randint(-3, 4, (2, d)).float(),
    "one value": lambda d: torch.full((2, d), 0.25),
    "zero": lambda d: torch.zeros(2, d),
    "negative": lambda d: -torch.rand(2, d) - 1e-3,
    "tiny": lambda d: torch.randn(2, d) * 1e-42,
    "peaks": lambda d: torch.zeros(2, d).index_fill_(1, torch.arange(0, d, max(d // 50, 1)), 5.0),
    "sorted": lambda d: torch.arange(2 * d).reshape(2, d).float() - d,
    "periodic": lambda d: torch.sin(torch.arange(2 * d).reshape(2, d) * 0.25),
    "alternating": lambda d: torch.tensor([1.0, -2.0]).repeat(d + 1)[: 2 * d].reshape(2, d),
}


@SELECTIONS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 16383, 16384, 65535, 65536, 65537, 200_001])
def test_rows_of_every_size_and_kind(smallest, kind, d):
    torch.manual_seed(d)
    score = KINDS[kind](d)
    for q in (0, 1, 37.5, 50, 80, 98, 99.9, 100):
        k = d - round((d - 1) * (1 - q / 100))
        assert torch.equal(smallest(score, k), score.kthvalue(k, dim=1).values), q


@SELECTIONS
def test_a_bound_that_is_too_high(smallest):
    """All large scores lie where the sample looks: it takes them for many more than they are."""
    d = 2048 * 160
    at = (torch.arange(2048) * 160 + torch.from_numpy(portable._JITTER) * 160).long()
    score = torch.rand(1, d)
    score[0, at] = 10 + torch.rand(2048)
    for k in (d - 2000, d - 2047, d - 2048, d - 3000, 1):
        assert torch.equal(smallest(score, k), score.kthvalue(k, dim=1).values)


@SELECTIONS
def test_more_units_than_float32_counts(smallest):
    d = 2**24 + 3
    score = torch.arange(d).float().unsqueeze(0)
    k = d - round((d - 1) * (1 - 98 / 100))
    assert torch.equal(smallest(score, k), score.kthvalue(k, dim=1).values)


@SELECTIONS
def test_a_nan_does_no_harm(smallest):
    score = torch.randn(3, 50_000)
    score[1, ::7] = torch.nan
    score[2] = torch.nan
    for k in (1, 25_000, 49_000, 50_000):
        assert torch.equal(smallest(score, k)[:1], score[:1].kthvalue(k, dim=1).values)


def test_dispatch_reaches_the_kernels(monkeypatch):
    score = torch.randn(2, 1000)
    expected = score.kthvalue(980, dim=1).values
    for choice in kernels.CHOICES:
        monkeypatch.setenv("RECTGRAD_KERNELS", choice)
        assert torch.equal(smallest(score, 980), expected)
        assert (kernels.smallest(score, 980) is None) == (choice == "reference")


def test_the_choice_is_checked(monkeypatch):
    monkeypatch.setenv("RECTGRAD_KERNELS", "quick")
    with pytest.raises(ValueError, match="'quick'; it can be fast, portable, reference"):
        rectgrad.attribute(nn.ReLU().eval(), torch.ones(1, 60))


# ---- the rectified rule --------------------------------------------------------------------------------


def plainly(a, R, rows, k, tau, rule):
    s = SCORES[rule](a, R)
    limit = s.reshape(rows, -1).kthvalue(k, dim=1).values if tau is None else torch.full((rows,), tau)
    return torch.where(s > limit.reshape(rows, *(1,) * (s.dim() - 1)), R, 0)


@st.composite
def layers(draw):
    shape = draw(st.sampled_from([(3, 5), (1, 7, 4), (2, 3, 4, 5), (4, 16, 30, 31), (1, 8, 80, 80)]))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    a = torch.randn(shape)
    a = draw(st.sampled_from([a, a.relu(), a.clamp(0, 0.5), -a.relu(), a * 0]))
    R = torch.randn(shape)
    R = draw(st.sampled_from([R, R * (torch.rand(shape) < 0.1), R.sign(), torch.ones_like(R)]))
    layout = draw(st.sampled_from(["plain", "slice", "expanded", "transposed", "channels last"]))
    if layout == "slice":
        R = torch.cat([torch.randn_like(R), R, R], dim=1)[:, shape[1] : 2 * shape[1]]
    if layout == "expanded":
        R = R.flatten(1)[:, :1].reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
    if layout == "transposed":
        R = R.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "channels last" and a.dim() == 4:
        a = a.to(memory_format=torch.channels_last)
        R = R.to(memory_format=torch.channels_last) if draw(st.booleans()) else R
    return a, R


@needs_native
@settings(max_examples=300, deadline=None)
@given(
    layer=layers(),
    q=st.sampled_from([0, 10.0, 50, 80, 90, 98, 99.5, 100]),
    tau=st.sampled_from([None, None, None, 0.0, 0.3, -0.2, 50.0]),
    rule=st.sampled_from(list(SCORES)),
    carry=st.sampled_from([None, carrier, as_they_are]),
    level=st.sampled_from(LEVELS or ["base"]),
    one_row=st.booleans(),
)
def test_rectified_as_the_rule_says(layer, q, tau, rule, carry, level, one_row):
    a, R = layer
    rows = 1 if one_row else len(a)
    d = a.numel() // rows
    k = d - round((d - 1) * (1 - q / 100))
    seen = []
    result = native.rectify(
        library(level), a, R, rows, None if tau is not None else k, tau, rule, seen, carry
    )
    assert torch.equal(kernels.dense(result), plainly(a, R, rows, k, tau, rule))
    assert seen[0] == pytest.approx(float(R.double().sum()), abs=1e-3 * float(R.abs().sum()) + 1e-6)
    passed = kernels.survivors_of(result)
    if passed is not None and min(passed.lists.counts) >= 0:
        assert torch.equal(passed.dense(), kernels.dense(result))


@needs_native
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 65_535, 65_536, 99_999])
def test_what_is_not_finite_is_seen(bad, at):
    a, R = torch.zeros(1, 100_000), torch.zeros(1, 100_000)
    R[0, at] = bad
    seen = []
    native.rectify(LIBRARY, a, R, 1, 98_000, None, "PR1", seen, carrier)
    assert not torch.tensor(seen).isfinite().all()


# ---- convolutions and linear layers -------------------------------------------------------------------


def made(kind, op, x, y):
    """A step that ran."""
    step = kind.of(op, x)
    step.made(op, y)
    return step


def op_for(func, family, x, *args):
    op = Op(
        Spec(family, family, func, ("input", "weight", "bias", *CONV), False), family, args, {}, Current()
    )
    op.data_count, op.current.carries = 1, True
    OPS.append(op)
    return op


OPS = []  # a step does not keep its op alive


CONV = ("stride", "padding", "dilation", "groups")


def lists_of(R, level, densest=native.DENSEST):
    """Survivors of R: its units that are not zero."""
    ones = torch.ones_like(R)
    scores = native._Scores(
        ones.data_ptr(), R.data_ptr(), len(R), R[0].numel(), R[0].numel(), R[0].numel(), native.RULES["PR2"]
    )
    return Survivors(native._select(library(level), scores, -1, 0.0, densest, []), R.shape)


def thinned(R, share):
    return R * (torch.rand(R.shape) < share)


@st.composite
def convolutions(draw):
    dims = draw(st.sampled_from([1, 2, 2, 2]))
    kernel = tuple(draw(st.sampled_from([1, 1, 2, 3, 3, 5, 7])) for _ in range(dims))
    if draw(st.booleans()):
        kernel = (kernel[0],) * dims
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    per_group = draw(st.sampled_from([1, 1, 2, 3, 8, 16, 17, 33]))
    out = groups * draw(st.sampled_from([1, 1, 2, 5, 18]))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(dims))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(dims))
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = tuple(draw(st.integers(low, low + 24)) for low in least)
    torch.manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(draw(st.integers(1, 3)), groups * per_group, *size)
    weight = torch.randn(out, per_group, *kernel)
    return x, weight, stride, padding, dilation, groups


def conv_pair(x, weight, stride, padding, dilation, groups, share, level, scale=None, within=None):
    func = F.conv1d if x.dim() == 3 else F.conv2d
    y = func(x, weight, None, stride, padding, dilation, groups)
    step = made(Conv, op_for(func, "conv", x, None, weight, None, stride, padding, dilation, groups), x, y)
    R = thinned(torch.randn_like(y), share)
    passed = lists_of(R, level)
    factor = 1 if scale is None else scale.reshape(1, -1, *(1,) * (y.dim() - 2))
    passed = passed if scale is None else passed.scaled(scale)
    return step.from_lists(passed, R * factor, within), step.gradient(outside_zeroed(R * factor, within))


def close(fast, slow):
    assert (fast - slow).abs().max() <= 1e-5 * slow.abs().max() + 1e-30


@needs_native
@settings(max_examples=400, deadline=None)
@given(
    conv=convolutions(),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.2, 0.6]),
    level=st.sampled_from(LEVELS or ["base"]),
    scaled=st.booleans(),
    data=st.data(),
)
def test_convolutions_of_every_shape(conv, share, level, scaled, data):
    x, weight, stride, padding, dilation, groups = conv
    y = (F.conv1d if x.dim() == 3 else F.conv2d)(x, weight, None, stride, padding, dilation, groups)
    within = None
    if data.draw(st.booleans()):
        ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in y.shape[2:]]
        within = tuple((first, max(last, first + 1)) for first, last in ends if first < y.shape[2])
        within = (
            within
            if len(within) == x.dim() - 2
            and all(b <= n for (_, b), n in zip(within, y.shape[2:], strict=True))
            else None
        )
    scale = torch.randn(len(weight)) if scaled else None
    close(*conv_pair(*conv, share, level, scale, within))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("channels", "size", "out", "kernel", "stride", "padding", "groups"),
    [
        (3, 224, 64, 7, 2, 3, 1),
        (64, 112, 32, 3, 1, 1, 1),
        (70, 150, 20, 3, 2, 1, 1),
        (130, 120, 24, 1, 1, 0, 1),
        (96, 112, 96, 3, 2, 1, 96),
        (40, 61, 40, 5, 1, 2, 40),
        (32, 300, 4, 5, 1, 2, 2),
    ],
)
def test_layers_cut_into_several_tiles(level, channels, size, out, kernel, stride, padding, groups):
    torch.manual_seed(0)
    x, weight = torch.randn(2, channels, size, size), torch.randn(out, channels // groups, kernel, kernel)
    close(*conv_pair(x, weight, (stride,) * 2, (padding,) * 2, (1, 1), groups, 0.02, level))


@needs_native
def test_each_sample_takes_the_path_its_density_asks_for():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, 20, 20), torch.randn(12, 8, 3, 3)
    y = F.conv2d(x, weight, None, 1, 1)
    R = torch.randn_like(y)
    R[0], R[2] = thinned(R[0], 0.05), thinned(R[2], 0.1)
    passed = lists_of(R, LIBRARY.level)
    assert [count < 0 for count in passed.lists.counts] == [False, True, False, True]
    step = made(Conv, op_for(F.conv2d, "conv", x, None, weight, None, 1, 1, 1, 1), x, y)
    close(step.from_lists(passed, R, None), step.gradient(R))


@needs_native
@settings(max_examples=150, deadline=None)
@given(
    conv=convolutions(),
    q=st.sampled_from([0.0, 50.0, 80.0, 98.0, 100.0]),
    tau=st.sampled_from([None, None, 0.0, 1.5]),
    rule=st.sampled_from(["PR1", "PR2", "PR3", "PR4"]),
    normed=st.sampled_from([None, "scale", "bare"]),
)
def test_an_activation_and_its_convolution_in_one_call(conv, q, tau, rule, normed):
    """The bits of the two calls; or none, where too much passes for lists."""
    x, weight, stride, padding, dilation, groups = conv
    func = F.conv1d if x.dim() == 3 else F.conv2d
    y = func(x, weight, None, stride, padding, dilation, groups)
    step = made(Conv, op_for(func, "conv", x, None, weight, None, stride, padding, dilation, groups), x, y)
    a, R = torch.randn_like(y).relu(), torch.randn_like(y)
    n, d = len(y), y[0].numel()
    norm = None
    if normed is not None:
        factor = torch.randn(len(weight)) if normed == "scale" else None
        norm = Scale(torch.rand(len(weight)) + 0.1, factor, 1e-3, torch.float32)
    op = op_for(F.relu, "relu", y)
    op._output, op.shape, op.input_shapes = a, a.shape, (a.shape,)
    k = None if tau is not None else rank(d, q)
    found = step.through(op, R, k, tau, rule, norm, None)
    seen = []
    passed = native.rectify(LIBRARY, a, R, n, k, tau, rule, seen, lambda passed: passed)
    if isinstance(passed, Survivors):
        passed = passed if norm is None else passed.scaled(norm.scale)
        assert torch.equal(found, step.from_lists(passed, R, None))
        assert op.current.sums == seen
    else:
        assert found is None
        assert op.current.sums == []


@needs_native
@pytest.mark.parametrize("seed", range(10))
def test_average_pooling_of_a_gradient_that_is_not_dense(seed):
    """It is copied, and the copy is there until it was read."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.AvgPool2d(2), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(64, 5),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 34, 34)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTGRAD_KERNELS", "portable")
        expected = rectgrad.attribute(model, x, target=1, q=50.0)
    close(rectgrad.attribute(model, x, target=1, q=50.0), expected)


@needs_native
@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 7), (3, 4, 9, 11), (1, 64, 40, 40), (2, 0, 3), (0, 3, 4)])
def test_a_dense_gradient_times_a_scale(shape):
    """One pass, and rounded as often as in two."""
    torch.manual_seed(0)
    R, variance, factor = torch.randn(shape), torch.rand(shape[1]) * 3, torch.randn(shape[1])
    by = (1, -1, *(1,) * (len(shape) - 2))
    inverse = (variance.double() + 1e-3).rsqrt().float().reshape(by)
    assert torch.equal(native.scaled(R, variance, None, 1e-3), R * inverse)
    expected = (R * inverse).mul_(factor.reshape(by))
    assert torch.equal(native.scaled(R, variance, factor, 1e-3), expected)


@needs_native
@settings(max_examples=100, deadline=None)
@given(
    positions=st.sampled_from([(), (1,), (5,), (197,), (3, 70)]),
    inputs=st.sampled_from([1, 7, 64, 128, 129, 300]),
    outputs=st.sampled_from([1, 10, 77]),
    share=st.sampled_from([0.0, 0.02, 0.2]),
    level=st.sampled_from(LEVELS or ["base"]),
)
def test_linear_layers(positions, inputs, outputs, share, level):
    x, weight = torch.randn(3, *positions, inputs), torch.randn(outputs, inputs)
    y = F.linear(x, weight)
    step = made(Linear, op_for(F.linear, "linear", x, None, weight), x, y)
    R = thinned(torch.randn_like(y), share)
    close(step.from_lists(lists_of(R, level, 1.0), R, None), step.gradient(R))


# ---- lists that travel ----------------------------------------------------------------------------------


@needs_native
@settings(max_examples=200, deadline=None)
@given(
    size=st.tuples(st.integers(1, 19), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    padded=st.booleans(),
)
def test_average_pooling(size, kernel, stride, padding, padded):
    assume(all(2 * p <= k <= n + 2 * p for n, k, p in zip(size, kernel, padding, strict=True)))
    x = torch.randn(2, 3, *size)
    y = F.avg_pool2d(x, kernel, stride, padding, False, padded)
    op = Op(ops.lookup(F.avg_pool2d), "avg_pool", (x, kernel, stride, padding, False, padded), {}, Current())
    op.current.carries = True
    R = torch.randn_like(y)
    leaf = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(F.avg_pool2d(leaf, kernel, stride, padding, False, padded), leaf, R)
    close(made(AvgPool, op, x, y).gradient(R), plain)


@needs_native
def test_lists_do_not_outlive_a_write():
    R = thinned(torch.randn(2, 3, 8, 8), 0.1)
    R = with_survivors(R, lists_of(R, LIBRARY.level))
    assert kernels.survivors_of(R) is not None
    assert kernels.survivors_of(R.clone()) is None
    R.add_(1)
    assert kernels.survivors_of(R) is None


@needs_native
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 30), (2, 9, 1), (1, 40, 6, 1), (3, 1, 1, 1), (1, 1)])
def test_nothing_is_computed_from_a_carrier_unnoticed(shape):
    R = torch.randn(shape) if torch.Size(shape).numel() < 4 else thinned(torch.randn(shape), 0.1)
    empty = carrier(lists_of(R, LIBRARY.level, 1.0))
    assert kernels.carried(empty)
    assert torch.equal(kernels.dense(empty), R)
    assert (empty + 1).isnan().all()
    assert not kernels.carried(empty + 1)


# ---- whole networks --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """In-place ReLUs, a sum of two paths, an in-place sum, a path read twice, grouped layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.a = nn.Sequential(
            nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.BatchNorm2d(24), nn.ReLU6(inplace=True)
        )
        self.b = nn.Sequential(nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24))
        self.c = nn.Sequential(nn.Conv2d(24, 20, 3, 2, 1, groups=4), nn.BatchNorm2d(20), nn.ReLU())
        self.d = nn.Sequential(nn.Conv2d(24, 20, 1, 2), nn.BatchNorm2d(20))
        self.head = nn.Sequential(
            nn.Linear(20 * 36, 90), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(90, 10)
        )

    def forward(self, x):
        x = self.stem(x)
        y = self.b(self.a(x))
        y += x
        x = F.relu(y, inplace=True)
        x = F.relu_(F.avg_pool2d(self.c(x) + self.d(x), 2))
        return self.head(F.interpolate(x, size=6).flatten(1))


def calibrated(model, x):
    torch.manual_seed(1)
    model.train()(x)
    return model.eval()


@needs_native
@pytest.mark.parametrize(
    "options", [{}, {"q": 90, "padding_trick": False}, {"rule": "mod", "q": 80}, {"tau": 0.0}]
)
def test_a_network_in_both_ways(options, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 48, 48)
    compare(calibrated(Residual(), x), x, options, monkeypatch)


@needs_native
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_every_kind_in_both_ways(name, monkeypatch):
    model, inputs = NETWORKS[name](3)
    inputs = tuple(x.float() for x in inputs) if isinstance(inputs, tuple) else inputs.float()
    compare(model.float(), inputs, {"q": 70.0}, monkeypatch)


def compare(model, inputs, options, monkeypatch):
    """Maps agree to 1e-5 of their maximum; a unit within rounding of tau may flip, and is counted. A flip
    changes what follows, so then layer by layer, each from the same arriving gradient."""
    options = {**options, "multiply_by_input": False, "positive_only": False}
    flips = Flips()
    monkeypatch.setattr(kernels, "rectify", flips.rectify)
    fast = as_tuple(rectgrad.attribute(model, inputs, **options))
    monkeypatch.undo()
    monkeypatch.setenv("RECTGRAD_KERNELS", "reference")
    slow = as_tuple(rectgrad.attribute(model, inputs, **options))
    assert flips.layers
    for f, s in zip(fast, slow, strict=True):
        if float((f - s).abs().max()) > 1e-5 * float(s.abs().max()):
            assert flips.near_tau, "the maps differ although no unit lies within rounding of tau"


class Flips:
    """Each layer's result is checked bit for bit against the plain rule on the same R; units whose score lies
    within rounding of tau are those that a last bit upstream may flip."""

    def __init__(self):
        self.layers, self.near_tau, self.inner = 0, 0, kernels.rectify

    def rectify(self, a, R, rows, k, tau, rule, seen, carry):
        result = self.inner(a, R, rows, k, tau, rule, seen, carry)
        if result is not None:
            self.layers += 1
            s = SCORES[rule](a, R).reshape(rows, -1)
            limit = s.kthvalue(k, dim=1).values if tau is None else torch.full((rows,), tau)
            assert torch.equal(kernels.dense(result), plainly(a, R, rows, k, tau, rule))
            near = ((s - limit.unsqueeze(1)).abs() < 1e-5 * s.abs().amax()) & (s != limit.unsqueeze(1))
            self.near_tau += int(near.sum())
        return result


def as_tuple(maps):
    return maps if isinstance(maps, tuple) else (maps,)


@needs_native
def test_most_layers_of_a_network_take_the_sparse_path():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 48, 48)
    kept = rectgrad.record(calibrated(Residual(), x), x)
    kept.attribute("rectgrad")
    paths = [row.op.path for row in kept.trace.rows if row.family in ("conv", "linear")]
    # Whole is what comes from the score, and what passes the sum of two paths without an activation.
    assert paths == ["sparse", "sparse", "sparse", "sparse", "dense", "sparse", "dense"]


@needs_native
def test_threads_do_not_share_anything():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 48, 48)
    model = calibrated(Residual(), x)
    expected = [rectgrad.attribute(model, x[i : i + 1]) for i in range(8)]
    wrong = []

    def work(i):
        for _ in range(10):
            if not torch.equal(rectgrad.attribute(model, x[i : i + 1]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_native
def test_a_gradient_that_somebody_looks_at_is_whole():
    seen = []

    class Watched(Residual):
        def forward(self, x):
            y = self.stem[1](self.stem[0](x))
            y.register_hook(lambda R: seen.append(R.clone()))
            z = self.stem[0](x)
            z.retain_grad()
            kept.append(z)
            return self.head(
                F.interpolate(self.c(torch.relu(y) + torch.relu(self.stem[1](z))), size=6).flatten(1)
            )

    kept = []
    torch.manual_seed(0)
    x = torch.randn(2, 3, 48, 48)
    model = calibrated(Watched(), x)
    seen.clear(), kept.clear()
    rectgrad.attribute(model, x)
    assert seen[0].isfinite().all()
    assert (seen[0] != 0).any()
    assert kept[0].grad.isfinite().all()


@needs_native
def test_an_in_place_relu_keeps_no_second_copy():
    storages = []

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            y = F.relu(self.conv(x), inplace=True)
            storages.append(y.untyped_storage().data_ptr())
            return y.flatten(1)

    outputs = []
    inner = kernels.rectify

    def look(a, *rest):
        outputs.append(a.untyped_storage().data_ptr())
        return inner(a, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "rectify", look)
        rectgrad.attribute(Plain().eval(), torch.randn(1, 3, 20, 20))
    assert outputs == storages


def test_without_the_native_part_maps_are_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(3, 3, 48, 48)
    model = calibrated(Residual(), x)
    monkeypatch.setenv("RECTGRAD_KERNELS", "portable")
    portably = rectgrad.attribute(model, x)
    monkeypatch.setenv("RECTGRAD_KERNELS", "reference")
    assert torch.equal(portably, rectgrad.attribute(model, x))


def test_in_use_says_what_runs():
    code = "from rectgrad import kernels; print(kernels.in_use()['cpu'])"
    for choice, words in (("reference", "reference"), ("portable", "portable")):
        env = {**os.environ, "RECTGRAD_KERNELS": choice}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == words


@settings(deadline=None)
@given(data=st.data())
def test_a_transposed_convolution_is_the_gradient(data):
    """As CUDA devices compute it: whatever the windows leave over."""
    numbers = data.draw(st.tuples(*[st.integers(1, 4)] * 4, st.integers(0, 3), st.integers(1, 9)))
    kernel, stride, dilation, channels, padding, room = numbers
    size = max(1, dilation * (kernel - 1) + room - 2 * padding)
    if size + 2 * padding <= dilation * (kernel - 1):
        return
    x = torch.randn(2, 3, size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, 3, kernel, dtype=torch.float64)
    y = F.conv1d(x, weight, None, stride, padding, dilation)
    lies = steps.geometry((kernel,), stride, padding, dilation, 1)
    left = steps._left_over((size,), tuple(y.shape[2:]), lies)
    R = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, R)
    found = steps._TRANSPOSED[1](R, weight, None, lies.stride, lies.padding, left, 1, lies.dilation)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted)
