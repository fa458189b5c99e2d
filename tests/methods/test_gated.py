"""RectGrad with a class gate: against the slow version, and what it must do on every kind of model."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import WITHOUT_POSITIONS
from networks import NETWORKS
from rectgrad import GuidedGradCAM, RectGrad, SmoothGrad, UnsupportedModelError
from rectgrad.engine import capture
from rectgrad.engine.request import Request
from rectgrad.kernels.class_maps import Gate
from rectgrad.kernels.draws import noisy
from rectgrad.kernels.positions import Image
from rectgrad.rules import class_layer
from reference import reference_attribute
from reference.cam import gate_at, resize
from spatial_networks import REFUSED, ChannelsLast, Tokens, bridged, differing, layers_of, vit

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

IMAGES = [name for name in NETWORKS if name not in (*WITHOUT_POSITIONS, "mixer")]  # (N, C, d1..dk) throughout
PLAIN = {"padding_trick": False, "positive_only": False}
CASES = {
    "usual": {"q": 60},
    "plain": {"q": 75, **PLAIN},
    "raw": {"q": 50, "multiply_by_input": False},
    "linear": {"q": 61.7, "interpolation": "linear"},
    "tau": {"tau": 1e-7, "positive_only": False},
    "negative tau": {"tau": -1e-3, "positive_only": False},
    "PR2": {"q": 50, "rule": "PR2", "positive_only": False},
    "PR3": {"q": 50, "rule": "PR3", "positive_only": False},
    "PR4": {"q": 50, "rule": "PR4", "positive_only": False},
    "mod": {"q": 50, "rule": "mod", "positive_only": False},
    "prr": {"q": 40, "prr": True},
}


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def assert_same(maps, expected, tolerance: float = 1e-9) -> None:
    for given, right in zip(as_tuple(maps), as_tuple(expected), strict=True):
        assert given.shape == right.shape
        assert (given - right).abs().max() <= tolerance * right.abs().max()
    assert any(bool(right.any()) for right in as_tuple(expected))


def gated(model, inputs, target=None, **options):
    return rectgrad.attribute(model, inputs, "rectgrad_gated", target, **options)


def assert_as_the_slow_version(model, inputs, target=None, **options) -> None:
    """Rounding cannot move a unit over tau, and there is something to compare in every sample."""
    image, margins = options.pop("image", None), list[float]()
    own = {} if image is None else {"image": image}
    expected = reference_attribute(model, inputs, "rectgrad_gated", target, margins=margins, **own, **options)
    assert min(margins) > 1e-9
    assert all(any(m[n].any() for m in as_tuple(expected)) for n in range(len(as_tuple(inputs)[0])))
    assert_same(gated(model, inputs, target, **options), expected)


# --- the formula -------------------------------------------------------------------------------------------


EVERY_OPTION = ("plain_cnn", "residual", "mobile", "two_inputs", "conv1d")
EVERYWHERE = ("usual", "plain")  # these options on every network
PAIRS = [(n, c) for n in IMAGES for c in CASES if n in EVERY_OPTION or c in EVERYWHERE]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_agrees_with_the_slow_version(name, case):
    assert_as_the_slow_version(*NETWORKS[name](0), **CASES[case])


TARGETS = {
    "class": 2,
    "list": [1, 0, 3],
    "difference": lambda outputs: outputs[:, 1] - outputs[:, 0],
    "square": lambda outputs: outputs[:, 1] - 0.5 * outputs[:, 0] ** 2,
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets(kind):
    model, x = NETWORKS["plain_cnn"](0)
    assert_as_the_slow_version(model, x, TARGETS[kind], q=50, padding_trick=False)
    kept = rectgrad.record(model, x)
    for _ in range(2):
        maps = kept.attribute("rectgrad_gated", TARGETS[kind], q=50, padding_trick=False)
        assert_same(maps, gated(model, x, TARGETS[kind], q=50, padding_trick=False))


def test_a_contrast_gates_by_the_difference():
    model, x = NETWORKS["plain_cnn"](0)
    maps = gated(model, x, rectgrad.contrast(1, 0), q=50, padding_trick=False)
    assert_same(maps, gated(model, x, TARGETS["difference"], q=50, padding_trick=False))


def mixer_image(x: Tensor) -> Tensor | None:
    if x.dim() == 4:
        return x
    return x.transpose(1, 2).unflatten(2, (3, 3)) if x.dim() == 3 and x.shape[1] == 9 else None


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_a_mixer(case):
    assert_as_the_slow_version(*NETWORKS["mixer"](0), image=mixer_image, **CASES[case])


@pytest.mark.parametrize("reads", [slice(0, 1), slice(0, None)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("registers", [0, 3])
def test_tokens(registers, last, reads):
    """The gate of class and register tokens is 1."""
    torch.manual_seed(0)
    model = Tokens(registers, last, reads).double().eval()
    first = 1 if last else 1 + registers

    def image(x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x
        return x[:, first : first + 12].transpose(1, 2).unflatten(2, (3, 4))

    x = torch.randn(2, 3, 9, 12).double()
    assert_as_the_slow_version(model, x, image=image, q=60)
    assert_same(gated(bridged(model), x, q=60), gated(model, x, q=60))


class Mixed(nn.Module):
    """Channels first, then last, then first again on a smaller grid."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 6, 3, stride=2)
        self.up, self.down, self.head = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        y = self.down(F.gelu(self.up(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return self.head(F.relu(self.b(x + y)).mean((2, 3)))


@pytest.mark.parametrize("case", CASES)
def test_channels_last(case):
    torch.manual_seed(0)
    model, x = Mixed().double().eval(), torch.randn(2, 3, 8, 9).double()
    image = lambda a: a.movedim(-1, 1) if a.shape[-1] == 7 else a  # noqa: E731
    assert_as_the_slow_version(model, x, image=image, **CASES[case])


def test_channels_last_where_sizes_do_not_tell():
    torch.manual_seed(0)
    model, x = ChannelsLast().double().eval(), torch.randn(2, 3, 6, 6).double()
    assert_as_the_slow_version(model, x, image=lambda a: a.movedim(-1, 1), q=60)


def test_the_gate_has_the_right_numbers():
    """Each sample's own maximum, its own layer, and 1 at tokens without a position."""
    torch.manual_seed(0)
    cams = [torch.rand(3, 1, 2, 3).double() * scale for scale in (1, 7)]
    rows = [torch.tensor([True, False, False]), torch.tensor([False, True, False])]
    gate = Gate(list(zip(rows, cams, strict=True)))
    g = gate.at(Image(True, (4, 5), 2), (3, 23, 8))
    assert g.shape == (3, 23, 1)
    assert (g[:, :2] == 1).all()
    assert (g[:, 22:] == 1).all()
    for n in range(2):
        own = cams[n][n, 0]
        torch.testing.assert_close(g[n, 2:22, 0], resize(own / own.max(), (4, 5)).flatten())
    assert not g[2, 2:22].any()
    assert [gate.silent(n) for n in range(3)] == [False, False, True]
    assert gate.at(None, (3, 8)) is None
    assert gate.at(Image(False, (4,), 0), (3, 8, 4)) is None


def test_the_slow_gate_is_one_elsewhere():
    a = torch.randn(1, 5, 1, 1)
    assert torch.equal(gate_at(torch.rand(2, 2), a), torch.ones_like(a))


# --- one pass, however it is made --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["PR1", "mod"])
@pytest.mark.parametrize("name", [*IMAGES, "mixer"])
def test_every_way_gives_the_same_map(name, rule):
    model, inputs = NETWORKS[name](0)
    method = RectGrad(q=50, rule=rule, gate="class")
    expected = rectgrad.attribute(model, inputs, method)
    assert_same(rectgrad.attribute(bridged(model), inputs, method), expected)
    assert_same(rectgrad.attribute(model, inputs, method, batch_size=1), expected)
    kept = rectgrad.record(model, inputs)
    for each in (method, RectGrad(q=50), method):
        assert_same(kept.attribute(each), rectgrad.attribute(model, inputs, each))
    if not isinstance(inputs, tuple):
        for _ in range(2):
            only = rectgrad.api.record_for(model, inputs, method)
            assert torch.equal(only.attribute(method), expected)
        assert torch.equal(rectgrad.capture(model, inputs, method)(inputs), expected)


def positive() -> tuple[nn.Module, Tensor]:
    """Samples differ in their class layer, and something speaks for the class in all of them."""
    model, x = differing()
    with torch.no_grad():
        model.b.weight.abs_()
    return model, x


def test_samples_differ_in_their_class_layer():
    model, x = positive()
    kept = rectgrad.record(model, x)
    maps = kept.attribute("rectgrad_gated", q=30, padding_trick=False)
    assert layers_of(kept.trace) == ["first", "last"]
    for i in range(4):
        alone = rectgrad.record(model, x[i : i + 1])
        assert_same(alone.attribute("rectgrad_gated", q=30, padding_trick=False), maps[i : i + 1])
        assert layers_of(alone.trace) == (["first"] if i % 2 else ["last"])


@pytest.mark.parametrize(("name", "layer"), [("residual", "4.last"), ("inception", "3/cat")])
def test_the_trace_names_the_layer(name, layer):
    model, inputs = NETWORKS[name](0)
    kept = rectgrad.record(model, inputs)
    kept.attribute("gradcam")
    kept.attribute("rectgrad_gated", q=60)
    assert layers_of(kept.trace) == [layer]
    assert "rectified" in {row.rule for row in kept.trace.rows}
    kept.attribute("rectgrad", q=60)
    assert layers_of(kept.trace) == []
    kept.attribute(GuidedGradCAM(INNER))
    assert next(row.rule for row in kept.trace.rows if "class" in row.rule).count("class layer") == 1


def test_layers_are_those_of_the_rectified_pass():
    model, x = NETWORKS["residual"](0)
    layers = rectgrad.layer_attributions(model, x, "rectgrad_gated", q=80)
    paper = rectgrad.layer_attributions(model, x, "rectgrad", q=80)
    assert [name for name, _ in layers] == [name for name, _ in paper]
    assert torch.equal(layers[0][1], paper[0][1])  # what arrives at the last activation
    assert not torch.equal(layers[-1][1], paper[-1][1])


@pytest.mark.filterwarnings("ignore:the map of sample")
@pytest.mark.parametrize("make", [positive, vit])
def test_a_captured_pass_asks_for_no_values(make, monkeypatch):
    """It goes as far as the passes before it, and flags samples that would have to go further."""
    model, x = make()
    method, request = RectGrad(q=30, gate="class", padding_trick=False), Request(model, (x,), (), {}, 0)

    def captured(inputs: Tensor) -> tuple[Tensor, bool]:
        request.inputs = (inputs,)
        raw, _, suspicious = rectgrad.api.preserved(request, lambda: capture._pass(request, method))
        return method.finish(raw, (inputs,))[0], bool(suspicious)

    expected = rectgrad.attribute(model, x, method, 0)
    assert_same(captured(x[::2])[0], expected[::2])
    monkeypatch.setattr(class_layer, "is_capturing", lambda device: True)
    maps, suspicious = captured(x)
    assert suspicious == (make is positive)
    assert_same(maps[::2], expected[::2])
    monkeypatch.undo()
    assert_same(captured(x)[0], expected)
    monkeypatch.setattr(class_layer, "is_capturing", lambda device: True)
    maps, suspicious = captured(x)
    assert not suspicious
    assert_same(maps, expected)


# --- averages ----------------------------------------------------------------------------------------------

INNER = RectGrad(q=50, gate="class")


def test_smoothgrad_computes_the_gate_of_every_copy():
    model, x = NETWORKS["plain_cnn"](0)
    with torch.no_grad():
        target = model(x).argmax(1)
    copies = noisy((x,), 0.1, 0)
    maps = [rectgrad.attribute(model, *copies(j), INNER, target) for j in range(6)]
    assert_same(rectgrad.attribute(model, x, SmoothGrad(INNER, samples=6)), sum(maps) / 6)


def test_integrated_gradients_compute_the_gate_of_every_point():
    model, x = NETWORKS["residual"](0)
    options = {"steps": 3, "quadrature": "right"}
    maps = rectgrad.attribute(model, x, "integrated_gradients", over=INNER, **options)
    inner = {"q": 50, "gate": "class"}
    expected = reference_attribute(model, x, "integrated_gradients", over="rectgrad", inner=inner, **options)
    assert_same(maps, expected)


def test_under_guided_gradcam():
    model, x = NETWORKS["residual"](0)
    cam = rectgrad.attribute(model, x, "gradcam", 1).sum(1, keepdim=True)
    expected = rectgrad.attribute(model, x, INNER, 1) * cam
    for maps in (
        rectgrad.attribute(model, x, GuidedGradCAM(INNER), 1),
        rectgrad.record(model, x).attribute(GuidedGradCAM(INNER), 1),
    ):
        assert_same(maps, expected)


# --- types, layouts and backends ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["residual", "mixer"])
def test_types(name, dtype):
    model, x = NETWORKS[name](0)
    expected = gated(model, x, 1, q=60)
    maps = gated(model.to(dtype), x.to(dtype), 1, q=60)
    assert maps.dtype is dtype
    both = F.cosine_similarity(maps.double().flatten(1), expected.flatten(1))
    assert (both > (0.9999 if dtype is torch.float32 else 0.9)).all()


def test_half_scores_are_compared_in_float32():
    """The two largest scores are the same number in float16."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1, bias=False)
    )
    a, w = 1 + torch.tensor([1.0, 2, 0, 0]) / 1024, 1 + torch.tensor([1.0, 0, 0, 0]) / 1024
    with torch.no_grad():
        model[0].weight.fill_(1), model[3].weight.copy_(w)
    maps = gated(model.half().eval(), a.half().reshape(1, 1, 2, 2), q=60, multiply_by_input=False)
    assert maps.flatten().tolist() == [w[0], 0, 0, 0]


@pytest.mark.parametrize("name", ["residual", "mobile", "inception"])
def test_channels_last_memory(name):
    model, x = NETWORKS[name](0)
    expected = gated(model, x, 1, q=60)
    model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    assert_same(gated(model, x, 1, q=60), expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["residual", "inception", "mobile", "mixer", "conv1d"])
def test_backends_select_the_same_units(name, case, monkeypatch):
    """The native kernels add up in another order; the others agree to the bit."""
    model, x = NETWORKS[name](0)
    model, x, maps = model.float(), x.float(), []
    for choice in ("reference", "portable", "fast"):
        monkeypatch.setenv("RECTGRAD_KERNELS", choice)
        maps.append(gated(model, x, 1, **CASES[case]))
    reference, portable, fast = maps
    assert torch.equal(portable, reference)
    assert_same(fast, reference, 1e-6)
    assert torch.equal(fast != 0, reference != 0)


# --- claim 2 of the paper ----------------------------------------------------------------------------------


@pytest.mark.parametrize("everywhere", [True, False])
def test_without_a_threshold_it_is_guided_backprop_where_the_class_is(everywhere):
    """tau = 0: all that guided backprop passes, if the class is everywhere; else less."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model, x = model.append(nn.Linear(8, 4)).double().eval(), torch.randn(3, 3, 9, 9).double()
    with torch.no_grad():
        model[2].bias.fill_(0.5)
        if everywhere:
            model[-1].weight.abs_()
    maps = gated(model, x, 1, tau=0.0, padding_trick=False)
    guided = (rectgrad.attribute(model, x, "guided_backprop", 1) * x).clamp(min=0)
    assert maps.any()
    assert torch.allclose(maps, guided, atol=1e-12) == everywhere


# --- nothing there -----------------------------------------------------------------------------------------


def opposed(dense: bool = False) -> tuple[nn.Module, Tensor]:
    """What is bright speaks for class 0 and against class 1."""
    head = [nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2)] if dense else [nn.Linear(16, 2, bias=False)]
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.ReLU(), nn.Flatten(), *head).eval()
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.weight.fill_(1)
        model[-1].weight[1] = -1
    return model, torch.linspace(0.1, 1, 32).reshape(2, 1, 4, 4)


@pytest.mark.parametrize("kind", ["attribute", "record", "bridge", "dense", "constant"])
def test_nothing_speaks_for_the_class(kind):
    model, x = opposed(kind == "dense")
    options = {"tau": -1.0} if kind == "constant" else {}
    asked = bridged(model) if kind == "bridge" else model
    method = RectGrad(gate="class", **options)
    ask = rectgrad.record(model, x).attribute if kind == "record" else partial(rectgrad.attribute, asked, x)
    words = "sample 0 is zero, and so are those of 1: .* nothing in the input speaks for the class$"
    with pytest.warns(UserWarning, match=words):
        maps = ask(method, 1)
    assert not maps.any()
    if kind != "dense":
        assert gated(asked, x, 0, q=50).flatten(1).any(1).all()


def test_the_other_samples_are_untouched():
    model, x = opposed()
    with pytest.warns(UserWarning, match="sample 1 is zero: .* nothing in the input speaks for the class"):
        maps = gated(model, x, [0, 1], q=50)
    assert_same(maps[:1], gated(model, x[:1], 0, q=50))
    assert not maps[1].any()


def test_a_layer_that_passes_nothing_is_named():
    model, x = opposed()
    with pytest.warns(UserWarning, match=r"layer '1' with 16 units passed nothing at q=98; the largest q"):
        assert not gated(model, x[:1], 0).any()


def test_a_negative_tau_passes_nothing_that_speaks_against_the_class():
    model, x = opposed()
    with torch.no_grad():
        model[3].weight[0, :8] = -1
    maps = gated(model, x, 0, tau=-9.0)
    assert not maps.flatten(1)[:, :8].any()
    assert maps.flatten(1)[:, 8:].all()
    assert_same(maps, gated(model, x, 0, tau=0.0))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_class_layer_is_refused(name):
    model, shape, words = REFUSED[name]
    torch.manual_seed(0)
    for explained in (model.eval(), bridged(model)):
        with pytest.raises(UnsupportedModelError, match=f"GatedRectGrad cannot explain this model.*{words}"):
            gated(explained, torch.randn(shape), 0)


def test_the_rules_alone_are_no_gate():
    model, x = NETWORKS["residual"](0)
    with rectgrad.propagate(rectgrad.METHODS["rectgrad_gated"].rules()):
        score = model(x.requires_grad_())[0, 0]
    with pytest.raises(ValueError, match="gate='class' differs from pass to pass"):
        score.backward()


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="gate must be one of 'class'"):
        RectGrad(gate="pixels")
    assert dataclasses.replace(rectgrad.METHODS["rectgrad_gated"], gate=None) == RectGrad()


def test_as_good_as_nan():
    model, x = NETWORKS["residual"](0)
    x[1, 2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"input of shape .* contains NaN"):
        gated(model, x)
