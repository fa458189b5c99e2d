"""Selection on the CPU, bit for bit: the k-th smallest, and the rectified rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_levels import LEVELS, LIBRARY, library, needs_native
from rectgrad.kernels import native, portable
from rectgrad.kernels.native import Native
from rectgrad.kernels.portable import Portable
from rectgrad.kernels.reference import SCORES, Reference, rank
from rectgrad.kernels.sparse import Sparse, dense

BACKENDS = {level: Native(library(level)) for level in LEVELS} | {"portable": Portable()}
SELECTIONS = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)

special = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, float("inf"), -float("inf")]
values = st.lists(
    st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from(special)), min_size=1, max_size=70
)


@SELECTIONS
@settings(max_examples=200, deadline=None)
@given(values=values, share=st.floats(0, 1))
def test_small_rows(backend, values, share):
    score = torch.tensor([values, values[::-1]], dtype=torch.float32)
    k = 1 + round(share * (len(values) - 1))
    assert torch.equal(backend.smallest(score, k), score.kthvalue(k, dim=1).values)


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
def test_rows_of_every_size_and_kind(backend, kind, d):
    torch.manual_seed(d)
    score = KINDS[kind](d)
    for q in (0, 1, 37.5, 50, 80, 98, 99.9, 100):
        k = d - round((d - 1) * (1 - q / 100))
        assert k == rank(d, q)
        assert torch.equal(backend.smallest(score, k), score.kthvalue(k, dim=1).values), q


@SELECTIONS
def test_a_bound_that_is_too_high(backend):
    """All large scores are where the sample looks: it takes them for many more than they are."""
    d = 2048 * 160
    at = (torch.arange(2048) * 160 + torch.from_numpy(portable._JITTER) * 160).long()
    score = torch.rand(1, d)
    score[0, at] = 10 + torch.rand(2048)
    for k in (d - 2000, d - 2047, d - 2048, d - 3000, 1):
        assert torch.equal(backend.smallest(score, k), score.kthvalue(k, dim=1).values)


@SELECTIONS
def test_more_units_than_float32_counts(backend):
    d = 2**24 + 3
    score = torch.arange(d).float().unsqueeze(0)
    k = d - round((d - 1) * (1 - 98 / 100))
    assert torch.equal(backend.smallest(score, k), score.kthvalue(k, dim=1).values)


@SELECTIONS
def test_a_nan_does_no_harm(backend):
    score = torch.randn(3, 50_000)
    score[1, ::7] = torch.nan
    score[2] = torch.nan
    for k in (1, 25_000, 49_000, 50_000):
        assert torch.equal(backend.smallest(score, k)[:1], score[:1].kthvalue(k, dim=1).values)


@SELECTIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(backend, dtype):
    torch.manual_seed(0)
    score = torch.randn(2, 30_000).to(dtype)
    for k in (1, 15_000, 29_400, 30_000):
        found = backend.smallest(score, k)
        assert found.dtype is dtype
        assert torch.equal(found, score.kthvalue(k, dim=1).values)
    a, R = torch.randn(2, 600).to(dtype).relu(), torch.randn(2, 600).to(dtype)
    for rule in SCORES:
        found = backend.rectify(a, R, 2, 500, None, rule, [])
        assert torch.equal(found, Reference().rectify(a, R, 2, 500, None, rule, []))


def plainly(a, R, rows, k, tau, rule):
    """The rule as the paper writes it."""
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
    layout = draw(st.sampled_from(["plain", "slice", "expanded", "transposed", "channels last", "negated"]))
    if layout == "slice":
        R = torch.cat([torch.randn_like(R), R, R], dim=1)[:, shape[1] : 2 * shape[1]]
    if layout == "expanded":
        R = R.flatten(1)[:, :1].reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
    if layout == "transposed":
        R = R.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "channels last" and a.dim() == 4:
        a = a.to(memory_format=torch.channels_last)
        R = R.to(memory_format=torch.channels_last) if draw(st.booleans()) else R
    if layout == "negated":
        a, R = torch._neg_view(a), torch._neg_view(R)
    return a, R


QUANTILES = st.sampled_from([0, 10.0, 50, 80, 90, 98, 99.5, 100])
CONSTANTS = st.sampled_from([None, None, None, 0.0, 0.3, -0.2, 50.0])


@SELECTIONS
@settings(max_examples=80, deadline=None)
@given(layer=layers(), q=QUANTILES, tau=CONSTANTS, rule=st.sampled_from(list(SCORES)), one_row=st.booleans())
def test_rectified_as_the_rule_says(backend, layer, q, tau, rule, one_row):
    a, R = layer
    rows = 1 if one_row else len(a)
    k = rank(a.numel() // rows, q)
    sums = []
    result = backend.rectify(a, R, rows, None if tau is not None else k, tau, rule, sums)
    wanted = plainly(a, R, rows, k, tau, rule)
    assert torch.equal(dense(result), wanted)
    assert torch.equal(wanted, Reference().rectify(a, R, rows, None if tau is not None else k, tau, rule, []))
    assert float(sums[0]) == pytest.approx(float(R.double().sum()), abs=1e-3 * float(R.abs().sum()) + 1e-6)
    if isinstance(result, Sparse):
        assert rows == len(a)
        assert min(result.lists.counts) >= 0


@SELECTIONS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 65_535, 65_536, 99_999])
@pytest.mark.parametrize("k", [98_000, None])
def test_what_is_not_finite_is_seen(backend, bad, at, k):
    a, R = torch.zeros(1, 100_000), torch.zeros(1, 100_000)
    R[0, at] = bad
    sums = []
    backend.rectify(a, R, 1, k, None if k else 0.5, "PR1", sums)
    assert not torch.tensor([float(each) for each in sums]).isfinite().all()


@needs_native
def test_few_units_are_a_list_and_many_a_tensor():
    """One sample with many is enough: all are a tensor then."""
    torch.manual_seed(0)
    backend = Native(LIBRARY)
    a, R = torch.ones(4, 8, 20, 20), torch.randn(4, 8, 20, 20)
    few = R * (torch.rand(R.shape) < native.DENSEST / 3)
    assert isinstance(backend.rectify(a, few, 4, None, 0.0, "PR2", []), Sparse)
    few[2] = R[2]
    result = backend.rectify(a, few, 4, None, 0.0, "PR2", [])
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, few)


@needs_native
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 30), (2, 9, 1), (1, 40, 6, 1), (3, 1, 1, 1), (1, 1)])
def test_a_sparse_gradient_is_the_tensor_when_asked(shape):
    torch.manual_seed(0)
    R = torch.zeros(shape)
    R.flatten()[:: R.numel() // 4 + 1] = 3.5
    passed = Native(LIBRARY).rectify(torch.ones_like(R), R, len(R), None, 4.0, "PR2", [])
    assert isinstance(passed, Sparse)
    assert torch.equal(dense(passed), torch.zeros(shape))
    passed = Native(LIBRARY).rectify(torch.ones_like(R), R, len(R), None, 0.0, "PR2", [])
    if isinstance(passed, Sparse):
        assert torch.equal(dense(passed), R)
        assert dense(passed) is dense(passed)  # made once
        scale = torch.arange(1.0, shape[1] + 1)
        twice = passed.scaled(scale).scaled(scale)
        by = (1, -1, *(1,) * (len(shape) - 2))
        assert torch.equal(dense(twice), R * (scale * scale).reshape(by))
        assert torch.equal(dense(passed), R)
    else:
        assert torch.equal(passed, R)
