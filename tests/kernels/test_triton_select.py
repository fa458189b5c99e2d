"""The Triton kernels against kthvalue and the plain rule, bit for bit.

On a CUDA device they run there, on large tensors too. Elsewhere Triton's interpreter runs them on the CPU,
with chunks and samples made smaller so that small tensors go through every branch.
"""

import importlib.util
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import rectgrad
from rectgrad import kernels
from rectgrad.kernels import cuda
from rectgrad.kernels.reference import SCORES, Reference, percentile

if importlib.util.find_spec("triton") is None:
    pytest.skip(
        "THE CUDA KERNELS ARE NOT TESTED: `pip install triton` (Linux) to do so", allow_module_level=True
    )

NATIVE = torch.cuda.is_available()
DEVICE = "cuda" if NATIVE else "cpu"
native = pytest.mark.skipif(not NATIVE, reason="needs a CUDA device")
# The interpreter computes with numpy, which warns where a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    if NATIVE:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        from triton.runtime import interpreter

        # It prepares the language of a module anew at each call inside a kernel, most of its time. Once
        # is enough: the launch does so for the kernel's own.
        prepare, prepared = interpreter._patch_lang, set()

        def call(function, *args, **kwargs):
            if id(function.fn.__globals__) not in prepared:
                prepare(function.fn)
                prepared.add(id(function.fn.__globals__))
            return function.rewrite()(*args, **kwargs)

        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@pytest.fixture
def tune(monkeypatch):
    """Sets numbers or functions of the module for one test."""

    def tune(**values):
        for name, value in values.items():
            monkeypatch.setattr(cuda, name, value)
        cuda._plan.cache_clear()
        cuda._plan_constant.cache_clear()

    yield tune
    monkeypatch.undo()
    tune()


@pytest.fixture(autouse=True)
def small_parts(tune):
    if not NATIVE:
        tune(SMALL=256, CHUNK=512, JOBS=4, PART=2, _tile=lambda d: (512, 128, 64))


def half_zero(x):
    return x.relu()


def with_infinities(x):
    x[:, ::7], x[:, 1::5] = float("inf"), -float("inf")
    return x


def signed_zeros(x):
    x[:, ::3], x[:, 1::3] = 0.0, -0.0
    return x


CONTENTS = {
    "normal": lambda x: x,
    "half zero": half_zero,
    "nearly all zero": lambda x: (x - 2.5).relu(),
    "all zero": lambda x: x * 0,
    "one value": lambda x: x * 0 - 3.25,
    "all negative": lambda x: -x.abs() - 1e-3,
    "few values": lambda x: (x * 3).round(),
    "denormal": lambda x: x * 1e-41,
    "infinities": with_infinities,
    "signed zeros": signed_zeros,
    "close together": lambda x: 1 + x * 1e-6,
    "far apart": lambda x: x.sign() * torch.exp(40 * x.abs().clamp(max=2.2) - 44),
    "sorted": lambda x: x.sort(dim=1).values,
    "half in order": lambda x: x.sort(dim=1, descending=True).values.relu(),
}


def scores(d, *contents):
    """A row for each of the contents, or for each there is."""
    g = torch.Generator().manual_seed(d)
    rows = [CONTENTS[content](torch.randn(1, d, generator=g)) for content in contents or CONTENTS]
    return torch.cat(rows).to(DEVICE)


def ranks(d):
    """The interpreter takes its time: it gets the first and the last of one long row, others of another."""
    ends, inner = {1, d}, {(d + 1) // 2, d - round((d - 1) * 0.02)}
    return sorted(ends | inner if NATIVE or d < 257 else ends if d == 257 else inner)


def check(x, k):
    torch.testing.assert_close(cuda.smallest(x, k), x.kthvalue(k, dim=1).values, rtol=0, atol=0)


@pytest.mark.parametrize("d", [1, 33, 257, 1000] + [2, 256, 9000, 50_001, 802_816] * NATIVE)
def test_smallest_is_kthvalue(d):
    x = scores(d)
    for k in ranks(d):
        check(x, k)


def test_smallest_gives_the_percentile_of_the_specification():
    x = scores(1100, "normal")
    for q in (0, 37.5, 98, 99.9, 100):
        k = 1100 - round((1100 - 1) * (1 - q / 100))
        assert torch.equal(cuda.smallest(x, k), percentile(x, q))


def test_rows_of_a_slice_and_no_rows():
    x = scores(700)[:, 10:-11]
    check(x, 660)
    assert cuda.smallest(x[:0], 3).shape == (0,)


LARGE = 20_000 if NATIVE else 900


def test_bounds_that_do_not_enclose_tau(tune):
    """A sample that misleads must not change the result, only the time."""
    tune(_bounds=lambda p, d, sample: (0, 0))
    x = scores(LARGE, "normal", "normal", "half zero", "infinities", "sorted", "far apart")
    for k in (LARGE // 2, LARGE * 98 // 100):
        check(x, k)


def test_more_candidates_than_places(tune):
    tune(_capacity=lambda share, d: 100)
    x = scores(LARGE, "normal", "few values", "close together")
    check(x, LARGE // 2)


def test_more_candidates_than_a_program_holds(tune):
    tune(_bounds=lambda p, d, sample: (800 if NATIVE else 60, 0))
    x = scores(200_000 if NATIVE else 1500, "normal", "few values", "nearly all zero")
    for k in (x.shape[1] // 2, x.shape[1] * 97 // 100):
        check(x, k)


def test_a_row_of_nan_ends():
    x = scores(LARGE, "normal", "half zero", "normal")
    x[0], x[1, ::2] = float("nan"), float("nan")
    assert cuda.smallest(x, LARGE - 9)[2] == x[2].kthvalue(LARGE - 9).values
    assert cuda.smallest(x[:, :100], 50)[2] == x[2, :100].kthvalue(50).values


def plain(a, R, rows, k, rule):
    """The rule as the paper writes it."""
    s = SCORES[rule](a.float(), R.float())
    tau = s.reshape(rows, -1).kthvalue(k, dim=1).values
    return torch.where(s > tau.reshape(-1, *[1] * (s.dim() - 1)), R, 0)


def same(result, expected):
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def contiguous(g, n, c, h, w):
    return torch.randn(n, c, h, w, generator=g).to(DEVICE)


def channels_last(g, n, c, h, w):
    return contiguous(g, n, c, h, w).to(memory_format=torch.channels_last)


def slice_of_channels(g, n, c, h, w):
    return contiguous(g, n, 3 * c, h, w)[:, c : 2 * c]


def slice_of_channels_last(g, n, c, h, w):
    return channels_last(g, n, 3 * c, h, w)[:, c : 2 * c]


def odd_slice_of_channels_last(g, n, c, h, w):
    return channels_last(g, n, c + 5, h, w)[:, 3 : 3 + c]


def mean(g, n, c, h, w):
    return contiguous(g, n, c, 1, 1).expand(n, c, h, w)


def number(g, n, c, h, w):
    return contiguous(g, n, 1, 1, 1).expand(n, c, h, w)


def transposed(g, n, c, h, w):
    return contiguous(g, n, c, w, h).transpose(2, 3)


def every_second(g, n, c, h, w):
    return contiguous(g, n, c, h, 2 * w)[..., ::2]


LAYOUTS = [
    contiguous,
    channels_last,
    slice_of_channels,
    slice_of_channels_last,
    odd_slice_of_channels_last,
    mean,
    number,
    transposed,
    every_second,
]
SHAPES = [(2, 5, 3, 4), (2, 16, 6, 7)] + [(3, 7, 9, 11), (5, 96, 35, 35), (3, 33, 71, 70)] * NATIVE


def pair(layout_a, layout_R, shape):
    g = torch.Generator().manual_seed(7)
    return layout_a(g, *shape).relu(), layout_R(g, *shape)


def nearest(a, rows, q=90):
    d = a.numel() // rows
    return d - round((d - 1) * (1 - q / 100))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout_R", LAYOUTS)
@pytest.mark.parametrize("layout_a", [contiguous, channels_last])
def test_rectify_is_the_plain_rule_in_every_layout(layout_a, layout_R, shape):
    a, R = pair(layout_a, layout_R, shape)
    for rows in (shape[0], 1):
        result = cuda.rectify(a, R, rows, nearest(a, rows))
        same(result, plain(a, R, rows, nearest(a, rows), "PR1"))
        assert result.stride() == a.stride()
    same(cuda.rectify_constant(a, R, 0.25), torch.where(a * R > 0.25, R, 0))


@pytest.mark.parametrize("layout_a", [slice_of_channels, slice_of_channels_last, transposed, mean])
def test_an_activation_that_is_not_dense(layout_a):
    g = torch.Generator().manual_seed(5)
    a, R = layout_a(g, 2, 16, 6, 7), contiguous(g, 2, 16, 6, 7)
    same(cuda.rectify(a, R, 2, nearest(a, 2)), plain(a, R, 2, nearest(a, 2), "PR1"))
    same(cuda.rectify_constant(a, R, 0.1), torch.where(a * R > 0.1, R, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", SCORES)
def test_rectify_is_the_plain_rule_for_every_rule_and_type(rule, dtype):
    for shape in [(2, 5, 3, 4), (2, 8, 9, 5)] + [(4, 64, 56, 56)] * NATIVE:
        a, R = (x.to(dtype) for x in pair(channels_last, channels_last, shape))
        if dtype == torch.float16:
            a, R = a * 300, R * 300  # a * R exceeds what float16 holds
        k = nearest(a, shape[0])
        same(cuda.rectify(a, R, shape[0], k, rule), plain(a, R, shape[0], k, rule))
        expected = torch.where(SCORES[rule](a.float(), R.float()) > 0.3, R, 0)
        same(cuda.rectify_constant(a, R, 0.3, rule), expected)


BACKEND = cuda.Cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", SCORES)
@pytest.mark.parametrize("k", [100, None])
def test_the_backend_is_the_reference(rule, dtype, k):
    """float64, which has no kernel, included."""
    a, R = (x.to(dtype) for x in pair(channels_last, slice_of_channels_last, (2, 5, 5, 6)))
    tau = None if k else 0.3
    sums = []
    result = BACKEND.rectify(a, R, 2, k, tau, rule, sums)
    same(result, Reference().rectify(a, R, 2, k, tau, rule, []))
    assert all(bool(torch.isfinite(each)) for each in sums)
    if dtype is torch.float32:
        score = R.flatten(1)
        assert torch.equal(BACKEND.smallest(score, 100), Reference().smallest(score, 100))
    assert torch.equal(BACKEND.smallest(R.double().flatten(1), 7), R.double().flatten(1).kthvalue(7).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"q": 75}, {"tau": 1e-6}, {"q": 50, "rule": "PR2"}, {"q": 50, "rule": "PR4"}]
)
def test_a_class_gate_selects_as_the_reference(options, dtype, monkeypatch):
    """Maps of a whole network, whose rectified activations have positions, but for the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(72, 20), nn.ReLU(), nn.Linear(20, 4),
    )  # fmt: skip
    model, x = model.eval().to(DEVICE, dtype), torch.randn(2, 3, 8, 8).to(DEVICE, dtype)
    monkeypatch.setenv("RECTGRAD_KERNELS", "reference")
    expected = rectgrad.attribute(model, x, "rectgrad_gated", 1, **options)
    rectified = []
    rectify = lambda *given: rectified.append(given[0]) or cuda.Cuda.rectify(BACKEND, *given)  # noqa: E731
    monkeypatch.setattr(BACKEND, "rectify", rectify, raising=False)
    monkeypatch.setattr(kernels, "_backend", lambda *_: BACKEND)
    maps = rectgrad.attribute(model, x, "rectgrad_gated", 1, **options)
    assert [tuple(a.shape) for a in rectified] == [(2, 20), (2, 8, 3, 3), (2, 6, 8, 8)]
    assert all(bool((a >= 0).all()) for a in rectified)  # scores, whose percentile is at least 0
    assert maps.flatten(1).any(1).all()
    assert torch.equal(maps != 0, expected != 0)
    torch.testing.assert_close(maps, expected)  # equal, but for the order of sums on a GPU


def test_the_layers_of_a_pass_share_one_number():
    """It says at the end whether all arriving gradients were finite, without one wait for each."""
    a, R = pair(contiguous, contiguous, (2, 5, 3, 4))
    sums = []
    for k in (3, 10, None):
        BACKEND.rectify(a, R, 2, k, 0.1, "PR1", sums)
    assert len(sums) == 1
    assert bool(sums[0].isfinite())
    BACKEND.rectify(a, R.clone().fill_(torch.inf), 2, 3, None, "PR1", sums)
    BACKEND.rectify(a, R, 2, 3, None, "PR1", sums)
    assert len(sums) == 1
    assert not bool(sums[0].isfinite())
    BACKEND.rectify(a.double(), R.double(), 2, 3, None, "PR1", sums)
    BACKEND.rectify(a, R, 2, 3, None, "PR1", sums)
    assert len(sums) == 3


def test_a_negative_bit():
    """Kernels read the memory as it is."""
    a, R = pair(contiguous, contiguous, (2, 5, 6, 7))
    for x, y in ((torch._neg_view(-a), R), (a, torch._neg_view(-R))):
        same(BACKEND.rectify(x, y, 2, 150, None, "PR1", []), plain(a, R, 2, 150, "PR1"))
        same(BACKEND.rectify(x, y, 2, None, 0.2, "PR1", []), torch.where(a * R > 0.2, R, 0))
    assert torch.equal(BACKEND.smallest(torch._neg_view(-R).flatten(1), 7), R.flatten(1).kthvalue(7).values)


def test_only_what_exceeds_tau_passes():
    """Strictly: equals of tau do not; and where tau < 0, a unit with a = 0 passes."""
    a = torch.tensor([[3.0, 2, 1, 0]], device=DEVICE)
    R = torch.tensor([[1.0, 10, -100, 1000]], device=DEVICE)
    alone = {"PR1": 1, "PR2": 2, "PR3": 0, "PR4": 3}
    for rule, unit in alone.items():
        assert cuda.rectify(a, R, 1, 3, rule).nonzero()[:, 1].tolist() == [unit]
    assert cuda.rectify(a, R, 1, 1).tolist() == [[1, 10, 0, 1000]]
    many = torch.ones(2, 900, device=DEVICE)
    many[:, 400:] = 2
    for k, passing in {900: 0, 401: 0, 400: 1000}.items():
        assert cuda.rectify(many, many, 2, k).count_nonzero() == passing
    assert cuda.rectify_constant(many, many, 1.0).count_nonzero() == 1000


def test_shapes_of_other_dimensions():
    for shape in [(3, 70), (2, 5, 120), (600,), (2, 3, 5, 5, 2), (4, 1)]:
        a, R = torch.rand(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
        for rows in {shape[0] if len(shape) > 1 else 1, 1}:
            k = nearest(a, rows)
            same(cuda.rectify(a, R, rows, k), plain(a, R, rows, k, "PR1"))
    empty = torch.empty(0, 3, device=DEVICE)
    assert cuda.rectify(empty, empty, 1, 1).shape == cuda.rectify_constant(empty, empty, 0.0).shape == (0, 3)


@pytest.mark.parametrize("d", [100, 600] + [300_000] * NATIVE)
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_what_is_not_finite_is_seen(value, d):
    a, R = torch.rand(2, d, device=DEVICE), torch.full((2, d), 3e38, device=DEVICE)
    seen = torch.zeros(5, device=DEVICE)
    cuda.rectify(a, R, 2, d // 2, seen=seen[1])
    cuda.rectify_constant(a, R, 0.0, seen=seen[1])
    assert seen.tolist() == [0] * 5  # large, but finite
    R[1, d - 1] = value
    cuda.rectify(a, R, 2, d // 2, "PR3", seen[1])
    cuda.rectify_constant(a, R, 0.0, "PR3", seen=seen[3])
    assert seen.isfinite().tolist() == [True, False, True, False, True]


def test_a_product_too_small_for_a_normal_number():
    g = torch.Generator().manual_seed(3)
    a, R = (torch.rand(2, 600, generator=g).to(DEVICE) * 1e-20 for _ in range(2))
    assert ((a * R).cpu().numpy() > 0).any()
    same(cuda.rectify(a, R, 2, 580), plain(a, R, 2, 580, "PR1"))


def test_what_cannot_be_asked():
    x = torch.rand(2, 300, device=DEVICE)
    with pytest.raises(ValueError, match="k is 301; it can be 1 to 300"):
        cuda.smallest(x, 301)
    with pytest.raises(ValueError, match="3 rows of a tensor of shape"):
        cuda.rectify(x, x, 3, 1)
    with pytest.raises(TypeError, match="float64"):
        cuda.rectify(x.double(), x.double(), 2, 1)


def test_a_division_by_multiplication():
    for n in [2, 3, 5, 7, 96, 255, 256, 257, 1023, 65_535, 65_537, 2**29 + 1]:
        _, magic, shift = cuda.divisor(n)
        for at in [0, 1, n - 1, n, 7 * n - 1, 7 * n, 2**31 - 2, 2**31 - 1]:
            assert (at * magic >> 32) >> shift == at // n


def test_triton_is_not_imported_with_the_module():
    code = "import sys, rectgrad.kernels.cuda as c; c.available(); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_workspace_is_as_large_as_the_kernels_think():
    kernels = cuda._kernels()
    assert (kernels.HEAD.value, kernels.WORDS.value) == (cuda.HEAD, cuda.WORDS)


def test_available_needs_a_device():
    assert cuda.available() == NATIVE


@native
@pytest.mark.parametrize(("rows", "d"), [(64, 802_816), (64, 2**24 + 3), (130, 2**24 + 3)])
def test_large_rows(rows, d):
    x = torch.randn(rows, d, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).relu_()
    k = d - round((d - 1) * 0.02)
    tau = cuda.smallest(x, k)
    for row in range(0, rows, 7):  # counts say it without another selection
        assert (x[row] < tau[row]).sum() < k <= (x[row] <= tau[row]).sum()
    assert tau[-1] == x[-1].kthvalue(k).values


@native
def test_a_whole_batch_of_large_layers():
    g = torch.Generator(DEVICE).manual_seed(1)
    like = {"device": DEVICE, "generator": g}
    a = torch.randn(64, 64, 112, 112, **like).relu_().to(memory_format=torch.channels_last)
    R = torch.randn(64, 160, 112, 112, **like).to(memory_format=torch.channels_last)[:, 64:128]
    k = nearest(a, 64, 98)
    s = (a * R).permute(0, 2, 3, 1).reshape(64, -1)
    tau = s.kthvalue(k, dim=1).values.reshape(64, 1, 1, 1)
    same(cuda.rectify(a, R, 64, k), torch.where(a * R > tau, R, 0))
    assert torch.equal(cuda.smallest(s, k), tau.flatten())


def work(a, R, k, expected, wrong, stream=None):
    with torch.cuda.stream(stream):
        for _ in range(30):
            wrong.append((cuda.rectify(a, R, len(a), k) != expected).any())


@native
@pytest.mark.parametrize("streams", [False, True])
def test_eight_threads(streams):
    cases, wrong = [], []
    for i in range(8):
        a, R = pair(channels_last, slice_of_channels_last, (3 + i, 32, 20 + i, 24))
        k = nearest(a, len(a), 80 + 2 * i)
        cases.append((a, R, k, plain(a, R, len(a), k, "PR1"), wrong))
    torch.cuda.synchronize()
    on = [torch.cuda.Stream() if streams else None for _ in cases]
    threads = [threading.Thread(target=work, args=(*c, s)) for c, s in zip(cases, on, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(wrong) == 240
    assert not torch.stack(wrong).any()


@native
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_wait_for_the_device():
    a, R = pair(channels_last, channels_last, (4, 32, 40, 40))
    seen = torch.zeros(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(70):
            cuda.rectify(a, R, 4, 40_000, seen=seen)
            cuda.rectify_constant(a, R, 0.1, seen=seen)
            cuda.smallest(R.flatten(1), 7)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@native
def test_a_captured_graph_can_be_replayed():
    a, R = pair(channels_last, channels_last, (4, 32, 40, 40))
    cuda.rectify(a, R, 4, 40_000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cuda.rectify(a, R, 4, 40_000)
    for _ in range(3):
        R.copy_(R.flip(0) * 1.5)
        graph.replay()
        same(result, plain(a, R, 4, 40_000, "PR1"))
