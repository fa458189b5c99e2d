"""SmoothGrad, Integrated and Expected Gradients: several copies in one pass give what one alone gives."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rectgrad
from every_method import BACKWARD
from networks import NETWORKS
from rectgrad import ExpectedGradients, IntegratedGradients, Saliency, SmoothGrad
from rectgrad.engine import points as copies
from rectgrad.kernels import device
from rectgrad.methods import Method, averages
from reference.noise import noise_of

AVERAGES = {
    "smoothgrad": lambda over: SmoothGrad(over, samples=9),
    "integrated_gradients": lambda over: IntegratedGradients(over, steps=9, baseline=0.1),
    "expected_gradients": lambda over: ExpectedGradients(over, samples=9, seed=1),
}
INNER = {name: rectgrad.METHODS[name] for name in BACKWARD} | {
    "rectgrad": rectgrad.RectGrad(q=80),
    "rectgrad_prr": rectgrad.RectGrad(q=80, prr=True),
    "rectgrad_mod": rectgrad.RectGrad(q=80, rule="mod"),
    "random": rectgrad.RandomMap(seed=3),
    "smoothgrad": SmoothGrad(rectgrad.GradientXInput(), samples=3, seed=2),
    "integrated_gradients": IntegratedGradients(rectgrad.GuidedBackprop(), steps=3),
    "expected_gradients": ExpectedGradients(rectgrad.GuidedBackprop(), samples=3),
}
quiet = pytest.mark.filterwarnings("ignore:the map of sample", "ignore:DeepLIFT")


@pytest.fixture
def one_by_one(monkeypatch):
    """The average as it is meant: `rectgrad.attribute` with each copy in a pass of its own."""

    def each(self, count):
        for j in range(count):
            yield self.ask(self.method, self.request.at(self.points(j, j + 1)))

    def attribute(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(copies.Points, "each", each)
            return rectgrad.attribute(*args, **kwargs)

    return attribute


def as_tuple(maps):
    return maps if isinstance(maps, tuple) else (maps,)


def assert_close(maps, expected, tolerance=1e-5):
    assert any(bool(b.any()) for b in as_tuple(expected))
    for a, b in zip(as_tuple(maps), as_tuple(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
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
    """A network in float32 and two inputs: (2, 3, 8, 8)."""
    model, x = NETWORKS["plain_cnn"](0)
    return model.float(), x[:2].float()


# --- the same maps, whatever is averaged --------------------------------------------------------------------

# Every method on two networks; on the others, one of each kind.
KINDS = ("saliency", "rectgrad", "lrp", "deeplift", "random", "smoothgrad")
PAIRS = [(m, n) for n in ("plain_cnn", "two_inputs") for m in INNER]
PAIRS += [(m, n) for n in ("residual", "library_attention", "folded") for m in KINDS]


@quiet
@pytest.mark.parametrize(("inner", "network"), PAIRS)
@pytest.mark.parametrize("average", AVERAGES)
def test_as_one_by_one(average, inner, network, one_by_one):
    model, inputs = NETWORKS[network](1)
    method = AVERAGES[average](INNER[inner])
    for n in (1, 3) if network == "plain_cnn" else (3,):
        some = tuple(x[:n] for x in inputs) if isinstance(inputs, tuple) else inputs[:n]
        expected = one_by_one(model, some, method)
        assert_close(rectgrad.attribute(model, some, method), expected, 1e-9)


def test_smoothgrad_by_hand(small):
    """The j-th noise depends on (seed, j) and the sample's values; the class is that of the clean input."""
    model, x = small
    target = model(x).argmax(1)
    spread = 0.2 * (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))
    total = torch.zeros_like(x)
    for j in range(20):
        noise = torch.stack([noise_of((each,), 7, j)[0] for each in x]).float()
        noisy = (x + spread * noise).requires_grad_()
        score = model(noisy).gather(1, target[:, None]).sum()
        total += torch.autograd.grad(score, noisy)[0] / 20
    assert_close(rectgrad.attribute(model, x, "smoothgrad", samples=20, noise=0.2, seed=7), total)


def test_smoothgrad_of_several_inputs_by_hand():
    """Every tensor of a tuple has its own noise and value range; a sample alone has the same map."""
    model, inputs = NETWORKS["two_inputs"](1)
    method = SmoothGrad(samples=6, noise=0.2, seed=3)
    maps = rectgrad.attribute(model, inputs, method)
    for i, sample in enumerate(zip(*inputs, strict=True)):
        total = [torch.zeros_like(x[None]) for x in sample]
        for j in range(6):
            noise = noise_of([x.float() for x in sample], 3, j)
            moved = [x + 0.2 * (x.max() - x.min()) * e for x, e in zip(sample, noise, strict=True)]
            noisy = [x[None].requires_grad_() for x in moved]
            found = torch.autograd.grad(model(*noisy)[0], noisy)
            total = [a + b / 6 for a, b in zip(total, found, strict=True)]
        assert_close(tuple(m[i : i + 1] for m in maps), tuple(total), 1e-6)
        alone = rectgrad.attribute(model, tuple(x[None] for x in sample), method)
        assert_close(tuple(m[i : i + 1] for m in maps), alone, 1e-9)


@pytest.mark.parametrize("quadrature", ["trapezoid", "right"])
def test_integrated_gradients_by_hand(small, quadrature):
    model, x = small
    baseline = torch.rand_like(x)
    alphas = torch.linspace(0, 1, 11) if quadrature == "trapezoid" else torch.arange(1, 12) / 11
    weights = torch.full((11,), 1 / 10 if quadrature == "trapezoid" else 1 / 11)
    if quadrature == "trapezoid":
        weights[0] = weights[-1] = 1 / 20
    total = torch.zeros_like(x)
    for alpha, weight in zip(alphas, weights, strict=True):
        step = (baseline + alpha * (x - baseline)).requires_grad_()
        total += weight * torch.autograd.grad(model(step)[:, 2].sum(), step)[0]
    options = {"steps": 11, "baseline": baseline, "quadrature": quadrature}
    maps = rectgrad.attribute(model, x, "integrated_gradients", 2, **options)
    assert_close(maps, (x - baseline) * total)


@pytest.mark.parametrize("average", AVERAGES)
def test_copies_share_passes(small, average):
    """One pass for the class, one copy alone, then the others with that one again: ten copies in all."""
    run, rows = watched(small[0])
    rectgrad.attribute(run, small[1], AVERAGES[average](Saliency()))
    assert rows == [2, 2, 18]


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_types(small, average, dtype, one_by_one):
    model, x = small[0].to(dtype), small[1][:1].to(dtype)
    run, rows = watched(model)
    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(run, x, method, 1)
    assert rows == [1, 1, 9]
    tolerance = {torch.float16: 0.01, torch.bfloat16: 0.08}.get(dtype, 1e-5)
    assert_close(maps, one_by_one(model, x, method, 1), tolerance)


# --- what comes with each sample ----------------------------------------------------------------------------


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    "target", [None, [2, 0, 1], torch.tensor([1, 1, 3]), rectgrad.contrast([0, 1, 2], 3)]
)
def test_targets_and_arguments_of_each_sample_are_repeated(average, target, one_by_one):
    model, x = NETWORKS["plain_cnn"](2)
    shift, scale = torch.randn(3, 1, 1, 1, dtype=x.dtype), torch.rand(3, 1, dtype=x.dtype)
    weights = torch.rand(4, dtype=x.dtype)  # for all samples alike

    def shifted(x, shift, *, scales, weights):
        return model(x + shift) * scales[0] * weights

    run, rows = watched(shifted)
    call = {"forward_args": (shift,), "forward_kwargs": {"scales": [scale], "weights": weights}}
    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(run, x, method, target, **call)
    assert rows[-1] == 27
    assert_close(maps, one_by_one(shifted, x, method, target, **call), 1e-9)


@quiet
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("one_for_all", [False, True])
@pytest.mark.parametrize("network", ["plain_cnn", "two_inputs"])
def test_baselines_of_each_sample_are_repeated(average, one_for_all, network, one_by_one):
    model, inputs = NETWORKS[network](2)
    random = torch.Generator().manual_seed(4)
    baseline = tuple(
        torch.rand(*x.shape, generator=random, dtype=x.dtype)[: 1 if one_for_all else None]
        for x in as_tuple(inputs)
    )
    baseline = baseline if isinstance(inputs, tuple) else baseline[0]
    method = AVERAGES[average](rectgrad.DeepLift(baseline))
    run, rows = watched(model)
    maps = rectgrad.attribute(run, inputs, method, 0)
    assert rows[-2:] == [27, 27]
    assert_close(maps, one_by_one(model, inputs, method, 0), 1e-9)


@pytest.mark.parametrize("average", AVERAGES)
def test_in_chunks_of_samples(average, one_by_one):
    model, x = NETWORKS["residual"](0)
    x = torch.cat([x, x.flip(-1), x.flip(-2)])[:5]
    run, rows = watched(model)
    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(run, x, method, [0, 1, 0, 2, 1], batch_size=2)
    assert rows == [2, 2, 18, 2, 2, 18, 1, 1, 9]  # the class, one copy alone, the rest with it
    assert_close(maps, one_by_one(model, x, method, [0, 1, 0, 2, 1]), 1e-9)


@quiet
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("network", ["plain_cnn", "folded"])
def test_from_a_record(average, network, one_by_one):
    model, x = NETWORKS[network](0)
    kept = rectgrad.record(model, x)
    for method in (AVERAGES[average](Saliency()), AVERAGES[average](rectgrad.RectGrad(q=80))):
        for target in (None, 1):
            expected = one_by_one(model, x, method, target)
            assert_close(kept.attribute(method, target), expected, 1e-9)


# --- where a pass of several copies would not be the same ---------------------------------------------------


@dataclass(frozen=True)
class Weighted(Method):
    """A method of the user's own, with a value for each sample."""

    weights: tuple[float, ...] = (1.0, 2.0)

    def finish(self, raw, inputs):
        return tuple(torch.stack([w * row for w, row in zip(self.weights, r, strict=True)]) for r in raw)

    def rows(self, start, stop, inputs):
        return replace(self, weights=self.weights[start:stop])


def test_a_method_with_values_of_its_own_for_each_sample(small, one_by_one):
    run, rows = watched(small[0])
    method = SmoothGrad(Weighted(), samples=9)
    maps = rectgrad.attribute(run, small[1], method, 1)
    assert set(rows) == {2}
    assert torch.equal(maps, one_by_one(*small, method, 1))


@pytest.mark.parametrize("average", AVERAGES)
def test_a_callable_target_sees_the_samples_alone(small, average, one_by_one):
    seen = []

    def score(outputs):
        seen.append(len(outputs))
        return outputs[:, 1]

    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(*small, method, score)
    assert set(seen) == {2}
    assert_close(maps, one_by_one(*small, method, score))


class BatchNormAndDropout(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Linear(20, 3)

    def forward(self, x):
        return self.b(F.dropout(self.norm(self.a(x)).relu(), 0.3, self.training))


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@pytest.mark.parametrize("average", AVERAGES)
def test_training_mode(average, one_by_one):
    run, rows = watched(BatchNormAndDropout().train())
    x, method = torch.randn(4, 6), AVERAGES[average](Saliency())
    maps = rectgrad.attribute(run, x, method, 1)
    assert set(rows) == {4}
    assert torch.equal(maps, one_by_one(run, x, method, 1))


def of_mixing(kind):
    """Functions of (N, 6) in which samples see each other, though nothing is in training mode."""
    torch.manual_seed(1)
    a, b = nn.Linear(6, 20).double().eval(), nn.Linear(20, 3).double().eval()

    def plain(x):
        return b(a(x).relu())

    mixing = {
        "centred": lambda x: plain(x - x.mean(0)),
        "scaled": lambda x: plain(x / x.abs().max()),
        "faintly": lambda x: plain(x + 1e-4 * x.mean(0)),
        "saturated": lambda x: (50 * plain(x - x.mean(0))).softmax(1) + 1,
        "from the first on": lambda x: plain(x.cumsum(0)),
        "from the last on": lambda x: plain(x.flip(0).cumsum(0).flip(0)),
        "later rows only": lambda x: plain(x + F.pad(x, (0, 0, 1, 0))[:-1].tanh()),
        "dropout without a module": lambda x: F.dropout(plain(x), 0.5, training=True),
        "by the size of the batch": lambda x: plain(x) * len(x),
        "in the gradient": lambda x: plain(x) + (x.sum() - x.sum().detach()),
        "faintly in the gradient": lambda x: plain(x) + 1e-3 * (x.sum() - x.sum().detach()),
    }
    return mixing[kind]


MIXING = [
    "centred",
    "scaled",
    "faintly",
    "saturated",
    "from the first on",
    "from the last on",
    "later rows only",
    "dropout without a module",
    "by the size of the batch",
    "in the gradient",
    "faintly in the gradient",
]


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("average", AVERAGES)
def test_samples_that_see_each_other(average, kind, one_by_one):
    model = of_mixing(kind)
    random = torch.Generator().manual_seed(0)
    for n in (1, 2):
        if n == 1 and kind in ("centred", "saturated"):
            continue  # nothing is left of one sample
        x = torch.randn(n, 6, generator=random, dtype=torch.float64)
        method = AVERAGES[average](Saliency())
        assert_close(rectgrad.attribute(model, x, method, 1), one_by_one(model, x, method, 1), 1e-9)


@quiet
@pytest.mark.parametrize("average", AVERAGES)
def test_a_folded_batch_is_not_tried_with_a_percentile(average):
    """Where a rule looks at one sample's units together, and they lie in several rows."""
    model, x = NETWORKS["folded"](0)
    run, rows = watched(model)
    rectgrad.attribute(run, x[:1], AVERAGES[average](rectgrad.RectGrad(q=80)), 1)
    assert set(rows) == {1}
    rows.clear()
    rectgrad.attribute(run, x[:1], AVERAGES[average](Saliency()), 1)
    assert rows == [1, 1, 9]


class Fixed(nn.Module):
    """A network that takes batches of two alone, and says so late."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = NETWORKS["plain_cnn"](0)[0].float(), how
        self.register_buffer("calls", torch.zeros(1))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        out = self.inner(x) * torch.rand(1) * self.calls.clone()
        return {
            "refuses": lambda: out + torch.zeros(2, 1),
            "gives two": lambda: out[:2],
            "gives more": lambda: torch.cat([out, out]) if len(x) > 2 else out,
            "gives none": lambda: out.view(2, 4),
            "gives other classes": lambda: out if len(x) == 2 else out[:, :2],
        }[self.how]()


HOW = ["refuses", "gives two", "gives more", "gives none", "gives other classes"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("average", AVERAGES)
def test_a_network_of_fixed_batch_size(small, average, how, one_by_one):
    model, x = Fixed(how).eval(), small[1]
    method = AVERAGES[average](Saliency())
    state = torch.get_rng_state()
    run, rows = watched(model)
    maps = rectgrad.attribute(run, x, method, 1)
    assert rows == [2, 2, 2, 18] + [2] * 8  # the first pass twice: a model that writes its buffers is bridged
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.calls.item(), model.seen) == (0, [])
    assert bool(maps.any())
    assert torch.equal(maps, one_by_one(model, x, method, 1))


@pytest.mark.parametrize("average", AVERAGES)
def test_an_exported_program(small, average, one_by_one):
    model, x = small
    program = torch.export.export(model, (x,)).module()
    for module in program.modules():
        module.training = False  # its own eval() is an error
    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(program, x, method, 1)
    assert_close(maps, one_by_one(model, x, method, 1))


@pytest.mark.parametrize("average", AVERAGES)
def test_state_that_each_call_changes(average, one_by_one):
    """Put back after each pass: every copy meets the state that the call found."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = NETWORKS["plain_cnn"](0)[0]
            self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
            self.calls = 0

        def forward(self, x):
            self.scale.mul_(2)
            self.calls += 1
            return self.inner(x) * self.scale.clone() * self.calls

    model, x = Counting().eval(), NETWORKS["plain_cnn"](0)[1]
    run, rows = watched(model)
    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(run, x, method, 1)
    assert rows[-1] == 27
    assert (model.scale.item(), model.calls) == (1, 0)
    assert_close(maps, one_by_one(model, x, method, 1), 1e-9)


# --- memory -------------------------------------------------------------------------------------------------


def limited(rows, error=torch.cuda.OutOfMemoryError):
    def check(x):
        if len(x) > rows:
            raise error(f"out of memory for {len(x)} rows")

    return check


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, MemoryError, RuntimeError])
def test_out_of_memory_halves_the_copies(small, average, error, one_by_one):
    """16 copies are refused (there are but 9), then 8, then no longer 4; the first of them is one again."""
    run, rows = watched(small[0], limited(8, error))
    method = AVERAGES[average](Saliency())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.ROWS, "cpu", 32)
        maps = rectgrad.attribute(run, small[1], method, 1)
    assert rows == [2, 2, 18, 16, 8, 8, 2]
    assert_close(maps, one_by_one(small[0], small[1], method, 1))


@pytest.mark.parametrize("average", AVERAGES)
def test_memory_for_one_copy_only(small, average, one_by_one):
    run, rows = watched(small[0], limited(2))
    method = AVERAGES[average](Saliency())
    maps = rectgrad.attribute(run, small[1], method, 1)
    assert rows.count(2) == 10
    assert_close(maps, one_by_one(small[0], small[1], method, 1))


def test_less_memory_than_one_copy_needs_cuts_the_samples(small, one_by_one):
    run, _ = watched(small[0], limited(1))
    with pytest.warns(UserWarning, match="pass batch_size=1 to start with that"):
        maps = rectgrad.attribute(run, small[1], "smoothgrad", 1)
    assert_close(maps, one_by_one(small[0], small[1], SmoothGrad(), 1))


def test_less_memory_than_one_sample_needs_is_an_error(small):
    run, _ = watched(small[0], limited(0))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        rectgrad.attribute(run, small[1], "smoothgrad", 1)


@pytest.mark.parametrize("average", AVERAGES)
def test_bytes_limit_the_copies(small, average, monkeypatch, one_by_one):
    """Activations of one sample in this network, in numbers; the input counts too."""
    model, x = small
    sizes = [3 * 64, 5 * 64, 5 * 64, 5 * 16, 8 * 16, 8 * 16, 8 * 4, 32, 12, 12, 4]
    run, rows = watched(model)
    method = AVERAGES[average](Saliency())
    for k, expected in ((1, [2] * 10), (2, [2, 2, 4] + [4] * 3 + [2]), (4, [2, 2, 8, 8, 2])):
        monkeypatch.setitem(device.BYTES, "cpu", k * 2 * sum(sizes) * 4 + 16)
        rows.clear()
        maps = rectgrad.attribute(run, x, method, 1)
        assert rows == expected
        assert_close(maps, one_by_one(model, x, method, 1))


# --- errors, warnings and what is left behind ---------------------------------------------------------------


@pytest.mark.parametrize("average", AVERAGES)
def test_an_error_of_one_copy_is_the_one_it_has_alone(small, average):
    """However many copies are in the pass that meets it."""
    model, x = small
    inputs = []
    method = AVERAGES[average](Saliency())
    rectgrad.attribute(watched(model, inputs.append)[0], x, method, 1)
    bad = inputs[-1][4].detach()  # of the third copy

    def refuse(x):
        if any(torch.allclose(row, bad) for row in x):
            raise ValueError(f"a bad input among {len(x)}")

    with pytest.raises(ValueError, match="a bad input among 2"):
        rectgrad.attribute(watched(model, refuse)[0], x, method, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_in_a_pass_of_several(small, error):
    """Not tried again; and the model and the random state are as they were."""
    model, state = Fixed("refuses").eval(), torch.get_rng_state()
    run, rows = watched(model)
    model.inner[-1].register_forward_hook(lambda _, given, out: limited(2, error)(out))
    with pytest.raises(error):
        rectgrad.attribute(run, small[1], "smoothgrad", 1)
    assert rows == [2, 2, 2, 64]  # the first pass twice: the model is bridged
    assert (model.calls.item(), model.seen) == (0, [])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_warning_names_the_sample_not_the_row():
    """On the way down to zero, the scores of the last sample are the first to fall below tau."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40, bias=False), nn.ReLU(), nn.Linear(40, 1)).eval()
    for weight in model.parameters():
        nn.init.uniform_(weight, 0.1, 1)
    x = torch.rand(3, 6) + 1
    x[2] *= 0.1
    run, rows = watched(model)
    method = IntegratedGradients(rectgrad.RectGrad(tau=0.2), steps=9)
    with pytest.warns(UserWarning, match="is zero") as caught:
        rectgrad.attribute(run, x, method, 0)
    assert 27 in rows
    assert {str(w.message).split(" is zero")[0] for w in caught} == {"the map of sample 2"}


def test_an_incomplete_deeplift_names_the_sample_not_the_row():
    """A product that DeepLIFT has no rule for counts with the larger inputs: some noisy copies of one."""
    layer = nn.Linear(6, 6, bias=False).eval()
    nn.init.constant_(layer.weight, 0.1)
    x = torch.tensor([[0.1], [0.75], [0.2]]) + torch.linspace(-0.1, 0.1, 6)
    run, rows = watched(lambda x: layer(x).cumprod(1) + x)
    with pytest.warns(UserWarning, match="sums to") as caught:
        rectgrad.attribute(run, x, SmoothGrad(rectgrad.DeepLift(), samples=9, noise=0.3), 5)
    assert rows[-1] == 27
    assert {str(w.message).split(" sums to")[0] for w in caught} == {"DeepLIFT's map of sample 1"}


def test_points_are_made_as_they_are_needed(small, monkeypatch):
    """Fifty copies of a large batch are never there at once."""
    made, most = itertools.count(), []
    monkeypatch.setitem(device.ROWS, "cpu", 8)
    noisy = averages.noisy

    def counted(*args):
        point = noisy(*args)
        return lambda j: (next(made), point(j))[1]

    monkeypatch.setattr(averages, "noisy", counted)
    run, _ = watched(small[0], lambda x: most.append(int(repr(made)[6:-1])))
    rectgrad.attribute(run, small[1], SmoothGrad(samples=20), 1)
    assert most[:4] == [1, 1, 4, 8]
