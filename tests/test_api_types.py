"""Types, memory formats and modes: the map has the input's shape, type and device, and does not depend on how
the caller happens to have set up torch.

Half types are tested without oneDNN: some virtual machines announce matrix instructions that they lack.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import ANY_NETWORK, EVERY, HIDING, QUICK, RUNNING

FEW = QUICK | {
    "expected_gradients": {"samples": 9},
    "smoothgrad": {"samples": 3, "seed": 1},
    "integrated_gradients": {"steps": 3},
}
ONE_BACKWARD = [name for name, method in rectgrad.METHODS.items() if method.one_backward]
RAW = {"padding_trick": False, "multiply_by_input": False, "positive_only": False}


@pytest.fixture
def without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(72, 60),
            nn.ReLU(),
            nn.Linear(60, 4),
        ).eval()


def images(n: int = 2) -> Tensor:
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def explained(
    name: str, model: Any = None, x: Tensor | None = None, target: Any = 1, **options: Any
) -> Tensor:
    model, x = network() if model is None else model, images() if x is None else x
    return rectgrad.attribute(model, x, name, target, **FEW.get(name, {}), **options)


def assert_near(maps: Tensor, expected: Tensor, share: float) -> None:
    """Differences, in the mean square, of less than `share` of the map."""
    assert bool(expected.any())
    error = (maps.double() - expected.double()).norm() / expected.double().norm()
    assert error < share, f"differs by {error:.1e}"


# --- types -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.05)],
    ids=str,
)
@pytest.mark.parametrize("name", RUNNING)
def test_each_type_gives_a_map_of_its_own_type(name: str, dtype: torch.dtype, share: float) -> None:
    """Against float64, everywhere on the values that the type can hold."""
    x, model = images().to(dtype), network().to(dtype)
    maps = explained(name, model, x)
    assert (maps.dtype, maps.shape, maps.device) == (dtype, x.shape, x.device)
    assert not maps.requires_grad
    assert maps.grad_fn is None
    # A difference of two scores is rounded as they are.
    assert_near(maps, explained(name, model.double(), x.double()), 4 * share if name in HIDING else share)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_random_map_has_the_inputs_type(dtype: torch.dtype) -> None:
    maps = explained("random", x=images().to(dtype))
    assert maps.dtype == dtype
    assert bool(((maps >= 0) & (maps <= 1)).all())


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", ANY_NETWORK)
def test_a_tuple_of_different_types(name: str) -> None:
    """Each map has the type of its own input."""
    generator = torch.Generator().manual_seed(2)
    first = nn.Linear(6, 40).eval()
    for parameter in first.parameters():
        nn.init.uniform_(parameter, -0.1, 0.4, generator=generator)

    def model(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.relu(first(a.float() + b.float() * c.float()))[:, :3]

    inputs = tuple(
        torch.randn(2, 6, generator=generator).to(t) for t in (torch.float32, torch.bfloat16, torch.float64)
    )
    options = {"tau": 0.0} if "rectgrad" in name else {}
    maps = rectgrad.attribute(model, inputs, name, 0, **FEW.get(name, {}), **options)
    wide = rectgrad.attribute(
        model, tuple(x.float() for x in inputs), name, 0, **FEW.get(name, {}), **options
    )
    for given, x, expected in zip(maps, inputs, wide, strict=True):
        assert given.dtype == x.dtype
        if name not in ("random", "smoothgrad"):
            torch.testing.assert_close(given.float(), expected, rtol=0.02, atol=1e-3)


# --- half types are compared in float32 --------------------------------------------------------------------


def tying(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations and weights of three units whose first two scores differ in float32 and tie in `dtype`."""
    e = torch.finfo(dtype).eps
    return (torch.tensor([[1 + e, 1 + 2 * e, 0.5]], dtype=dtype), torch.tensor([1 + e, 1, 1], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"q": 50},
        {"q": 50, "rule": "PR2"},
        {"q": 50, "rule": "mod"},
        {"q": 50, "interpolation": "linear"},
        {"tau": "between"},
    ],
    ids=str,
)
def test_scores_and_tau_of_half_types_are_float32(dtype: torch.dtype, options: dict) -> None:
    a, w = tying(dtype)
    s = a[0] * w
    assert s[0] == s[1], "the case is built so that the half type cannot tell the two apart"
    wide = a[0].float() * w.float()
    assert wide[0] > wide[1]
    if "tau" in options:
        options = {"tau": float(wide[0] + wide[1]) / 2}
    maps = rectgrad.attribute(lambda x: (F.relu(x) * w).sum(1), a, "rectgrad", **options, **RAW)
    assert maps[0].tolist() == [float(w[0]), 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q", [8, 60, 95])
def test_the_units_that_pass_are_those_of_a_float32_recomputation(dtype: torch.dtype, q: float) -> None:
    """The same network under a rule of our own that is the specification, in float32; and in the half type,
    to see that the comparison can fail."""
    generator = torch.Generator().manual_seed(4)
    x, v, w = (torch.randn(3, 40000, generator=generator).to(dtype) for _ in range(3))

    def model(x: Tensor) -> Tensor:
        return (F.relu(F.relu(x) * v[0]) * w[0]).sum(1)

    def by_rule(wide: bool) -> Tensor:
        def rule(op: Any, R: Tensor) -> Tensor:
            a, r = (op.output.float(), R.float()) if wide else (op.output, R)
            s = (a * r).flatten(1)
            tau = s.sort(1, descending=True).values[:, round((s.shape[1] - 1) * (1 - q / 100))]
            return torch.where((s > tau[:, None]).view_as(R), R, 0)

        leaf = x.clone().requires_grad_()
        with rectgrad.propagate({"relu": rule}):
            model(leaf).sum().backward()
        return leaf.grad

    assert torch.equal(rectgrad.attribute(model, x, "rectgrad", q=q, **RAW), by_rule(wide=True))
    if q == 95:  # elsewhere tau is 0, and nothing ties with that
        assert not torch.equal(by_rule(wide=True), by_rule(wide=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_proportional_redistribution_of_half_types_is_float32(dtype: torch.dtype) -> None:
    """Shares are rounded once, at the end: R * x / sum of the window, with a 4 x 4 window."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.rand(1, 1, 16, 16, generator=generator) + 0.1).to(dtype)
    w = (torch.rand(16, generator=generator) + 0.5).to(dtype)

    def model(x: Tensor) -> Tensor:
        return (F.max_pool2d(F.relu(x), 4).flatten(1) * w).sum(1)

    maps = rectgrad.attribute(model, x, "rectgrad_prr", tau=-1.0, **RAW)
    sums = F.avg_pool2d(x.double(), 4) * 16 + 16e-10
    share = (w.double().view(1, 1, 4, 4) / sums).repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert torch.equal(maps, (x.double() * share).to(dtype))


# --- exact for very large layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("q", [98.0, 1e-5])
def test_the_percentile_is_exact_above_two_to_the_24th_units(q: float) -> None:
    """Neighbouring float32 numbers from 1 upwards, so that each rank has a value of its own and float32 could
    not even count them."""
    d = 2**24 + 1001
    values = (torch.arange(d, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    x = torch.cat([values[1::2], values[::2].flip(0)]).unsqueeze(0)
    rank = round((d - 1) * (1 - q / 100))
    maps = rectgrad.attribute(lambda x: F.relu(x).sum(1), x, "rectgrad", q=q, **RAW)
    passed = x[maps > 0]
    assert len(passed) == rank
    assert passed.min() == values[d - rank]


# --- memory formats ----------------------------------------------------------------------------------------


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "flipped batch of a larger tensor": lambda x: torch.cat([x, x.flip(0)])[: len(x)],
    "inner samples": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERY)
def test_the_layout_of_the_input_does_not_matter(name: str, layout: str) -> None:
    x = LAYOUTS[layout](images())
    assert torch.equal(x, images())
    torch.testing.assert_close(explained(name, x=x), explained(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_a_channels_last_model(name: str) -> None:
    x = images().contiguous(memory_format=torch.channels_last)
    maps = explained(name, network().to(memory_format=torch.channels_last), x)
    torch.testing.assert_close(maps, explained(name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_an_expanded_input(name: str) -> None:
    """One number in memory, many in the input: each gets its own place in the map. Grad-CAM's channels are
    all alike."""
    x = images()[:1, :1].expand(2, 3, 6, 6)
    maps = explained(name, x=x)
    assert torch.equal(maps, explained(name, x=x.contiguous()))
    if name not in ("random", "gradcam", "lrp", *HIDING):  # which treat all channels alike
        assert not torch.equal(maps[:, 0], maps[:, 1])


# --- no samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("target", [None, 1, []])
def test_no_samples_no_maps(name: str, target: Any) -> None:
    x = images()[:0].double()
    maps = explained(name, network().double(), x, target)
    assert (maps.shape, maps.dtype) == (x.shape, x.dtype)
    kept = rectgrad.record(network().double(), x)
    assert kept.outputs.shape == (0, 4)
    if target is None:
        assert kept.attribute(name, **FEW.get(name, {})).shape == x.shape


def test_no_samples_in_a_tuple_and_in_layers() -> None:
    def model(a: Tensor, b: Tensor) -> Tensor:
        return F.relu(a + b)

    maps = rectgrad.attribute(model, (torch.zeros(0, 5), torch.zeros(0, 5)), batch_size=3)
    assert [m.shape for m in maps] == [(0, 5), (0, 5)]
    layers = rectgrad.layer_attributions(network(), images()[:0])
    assert [value.shape for _, value in layers] == [(0,), (0, 6, 6)]


# --- modes of torch ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default float64": default_float64,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", [None, 1, [1, 2]], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_the_callers_mode_does_not_change_the_map(name: str, target: Any, mode: str) -> None:
    model, x = network(), images()
    expected = explained(name, model, x, target)
    with MODES[mode]():
        maps = explained(name, model, x, target)
    assert maps.dtype == x.dtype
    assert maps.device == x.device
    assert not maps.requires_grad
    assert torch.equal(maps, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ONE_BACKWARD)
def test_the_callers_mode_does_not_change_records_and_layers(name: str, mode: str) -> None:
    model, x, options = network(), images(), FEW.get(name, {})
    expected = explained(name, model, x)
    layers = rectgrad.layer_attributions(model, x, name, 1, **options)
    with MODES[mode]():
        kept = rectgrad.record(model, x)
        inside = kept.attribute(name, 1, **options)
        layers_inside = rectgrad.layer_attributions(model, x, name, 1, **options)
    for maps in (inside, kept.attribute(name, 1, **options)):
        torch.testing.assert_close(maps, expected, rtol=1e-5, atol=1e-7)
    for (layer, value), (layer_inside, value_inside) in zip(layers, layers_inside, strict=True):
        assert layer == layer_inside
        assert torch.equal(value, value_inside)


@pytest.mark.parametrize("name", EVERY)
def test_the_default_device_does_not_matter(name: str) -> None:
    """The device that stands for "another one" here holds no data, so that a tensor put there is noticed."""
    expected = explained(name, target=None)
    model, x = network(), images()
    with torch.device("meta"):
        maps = explained(name, model, x, None)
    if name in (
        "lrp",
        "excitation_backprop",
        "rectgrad_gated",
    ):  # a mode is active, so the bridge adds up in another order
        torch.testing.assert_close(maps, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    else:
        assert torch.equal(maps, expected)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", EVERY)
def test_autocast(name: str) -> None:
    """The network runs in bfloat16, the map comes back in the input's float32; near the one without."""
    with torch.autocast("cpu", torch.bfloat16):
        maps = explained(name)
    assert maps.dtype == torch.float32
    assert_near(maps, explained(name), 0.15 if name in ("smoothgrad", "expected_gradients") else 0.05)
    if name != "random":
        assert not torch.equal(maps, explained(name))


@pytest.mark.usefixtures("without_onednn")
def test_the_rules_are_not_autocast() -> None:
    """With float32 activations inside autocast, scores are float32: bfloat16 would tie the first two."""
    a, w = (t.float() for t in tying(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        maps = rectgrad.attribute(lambda x: (F.relu(x) * w).sum(1), a, "rectgrad", q=50, **RAW)
    assert maps[0].tolist() == [float(w[0]), 0.0, 0.0]


def test_a_matrix_product_in_a_rule_is_not_autocast() -> None:
    class Scaled(rectgrad.GuidedBackprop):
        def rules(self) -> Any:
            return {"relu": lambda op, R: R @ (1.001 * torch.eye(4))}  # 1.0 in bfloat16

    with torch.autocast("cpu", torch.bfloat16):
        maps = rectgrad.attribute(lambda x: F.relu(x).sum(1), torch.ones(2, 4), Scaled())
    assert torch.allclose(maps, torch.full((2, 4), 1.001), rtol=0, atol=1e-6)


# --- tensors made in inference mode ------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["used outside", "used inside"])
@pytest.mark.parametrize("name", EVERY)
class TestInferenceTensors:
    @staticmethod
    def around(inside: bool) -> Any:
        return torch.inference_mode() if inside else contextlib.nullcontext()

    def test_input(self, name: str, inside: bool) -> None:
        with torch.inference_mode():
            x = images()
        with self.around(inside):
            maps = explained(name, x=x)
        assert torch.equal(maps, explained(name))

    def test_model(self, name: str, inside: bool) -> None:
        with torch.inference_mode():
            model = network()
        with self.around(inside):
            maps = explained(name, model)
        assert torch.equal(maps, explained(name))

    def test_target(self, name: str, inside: bool) -> None:
        with torch.inference_mode():
            target = torch.tensor([1, 2])
        with self.around(inside):
            maps = explained(name, target=target)
        assert torch.equal(maps, explained(name, target=[1, 2]))

    def test_baseline_and_arguments(self, name: str, inside: bool) -> None:
        with torch.inference_mode():
            shift, baseline = torch.full((2, 1), 0.1), torch.full((3, 6, 6), 0.2)

        def model(x: Tensor, shift: Tensor) -> Tensor:
            return network()(x) * shift

        def run(shift: Tensor, baseline: Tensor) -> Tensor:
            options = {"baseline": baseline} if name in ("deeplift", "integrated_gradients") else {}
            return explained(name, model, forward_kwargs={"shift": shift}, **options)

        with self.around(inside):
            maps = run(shift, baseline)
        assert torch.equal(maps, run(torch.full((2, 1), 0.1), torch.full((3, 6, 6), 0.2)))


def test_a_training_model_made_in_inference_mode_is_put_back() -> None:
    with torch.inference_mode():
        model = network().train()
        before = [b.clone() for b in model.buffers()]
        with pytest.warns(UserWarning, match="training mode"):
            rectgrad.attribute(model, images(), "rectgrad", 1)
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


# --- a baseline is cut along with the samples only where it has one row for each ---------------------------


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", ["deeplift", "integrated_gradients"])
def test_a_baseline_whose_channels_are_as_many_as_the_samples(name: str, batch_size: int) -> None:
    """Three samples of three channels, and one baseline (3, 6, 6) for all of them, in chunks."""
    x, baseline = images(3), torch.arange(3.0).view(3, 1, 1).expand(3, 6, 6)
    whole = explained(name, x=x, baseline=baseline)
    chunked = explained(name, x=x, baseline=baseline, batch_size=batch_size)
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)
