"""Grad-CAM, its variants and Guided Grad-CAM: against the slow version, and at the right layer."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import WITHOUT_POSITIONS
from networks import NETWORKS
from rectgrad import GradCAM, GuidedGradCAM, RectGrad, SmoothGrad, UnsupportedModelError
from rectgrad.engine import capture
from rectgrad.engine.request import Request
from rectgrad.kernels.class_maps import VARIANTS
from rectgrad.kernels.draws import noisy
from rectgrad.rules import class_layer
from reference.cam import class_map, reference_cam, resize, spread
from spatial_networks import REFUSED, ChannelsLast, Mirrored, Tokens, bridged, differing, layers_of, vit

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

IMAGES = [name for name in NETWORKS if name not in (*WITHOUT_POSITIONS, "mixer")]  # (N, C, d1..dk) throughout


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def assert_same(maps, expected, tolerance: float = 1e-10) -> None:
    for given, right in zip(as_tuple(maps), as_tuple(expected), strict=True):
        assert given.shape == right.shape
        assert (given - right).abs().max() <= tolerance * right.abs().max()
    assert any(bool(right.any()) for right in as_tuple(expected))


def largest(out: Tensor, n: int) -> Tensor:
    """The gradient of a sample's largest output."""
    start = torch.zeros_like(out)
    start.view(-1)[out.argmax()] = 1
    return start


# --- the formulas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", IMAGES)
def test_agrees_with_the_slow_version(name, variant):
    model, inputs = NETWORKS[name](0)
    maps = rectgrad.attribute(model, inputs, "gradcam", variant=variant)
    assert_same(maps, reference_cam(model, inputs, largest, variant=variant))


TARGETS = {
    "class": (2, lambda out, n: F.one_hot(torch.tensor([2]), 4)),
    "list": ([1, 0, 3], lambda out, n: F.one_hot(torch.tensor([[1, 0, 3][n]]), 4)),
    "contrast": (rectgrad.contrast(0, 2), lambda out, n: torch.tensor([[1, 0, -1, 0]])),
    "callable": (lambda out: out[:, 1] ** 2, lambda out, n: 2 * out * torch.eye(4)[1]),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_targets(kind):
    target, start = TARGETS[kind]
    model, x = NETWORKS["plain_cnn"](1)
    expected = reference_cam(model, x, lambda out, n: start(out, n).to(out))
    assert_same(rectgrad.attribute(model, x, "gradcam", target), expected)
    assert_same(rectgrad.record(model, x).attribute("gradcam", target), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["residual", "inception", "conv1d", "conv3d", "functional", "two_inputs"])
def test_over_the_bridge(name, variant):
    model, inputs = NETWORKS[name](0)
    method = GradCAM(variant=variant)
    assert_same(rectgrad.attribute(bridged(model), inputs, method), rectgrad.attribute(model, inputs, method))


class Fire(nn.Module):
    """Activations that are computed in place, pooled and joined: by `cat`, and by `+=`."""

    def __init__(self, sums: bool):
        super().__init__()
        self.sums, self.act, self.pool = sums, nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1)
        self.a, self.b, self.c = (nn.Conv2d(k, 4, 3, padding=1) for k in (3, 4, 8))
        self.head = nn.Linear(4 if sums else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.a(x))
        y = torch.cat([self.pool(x), self.act(self.b(x))], 1)
        if self.sums:
            x = self.act(self.c(y))
            y = self.pool(x)
            y += x
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize("method", [GradCAM(), RectGrad(q=60, gate="class", padding_trick=False)], ids=str)
@pytest.mark.parametrize("sums", [False, True])
def test_activations_in_place_over_the_bridge(sums, method):
    """What joins them is the class layer."""
    torch.manual_seed(0)
    model, x = Fire(sums).double().eval(), torch.randn(2, 3, 8, 8).double()
    with torch.no_grad():
        model.head.weight.abs_()
    kept = rectgrad.record(model, x)
    expected = kept.attribute(method, 1)
    assert layers_of(kept.trace) == ["add" if sums else "cat"]
    assert_same(rectgrad.attribute(bridged(model), x, method, 1), expected)


def test_channels_sum_to_the_value():
    """And an input without positions has none."""
    model, (picture, vector) = NETWORKS["two_inputs"](0)
    maps, none = rectgrad.attribute(model, (picture, vector), "gradcam")
    assert torch.equal(maps[:, 0], maps[:, 1])
    assert not none.any()
    assert (maps >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["gradcam", "guided_gradcam"])
def test_types(method, dtype):
    model, x = NETWORKS["residual"](0)
    expected = rectgrad.attribute(model, x, method, target=1)
    maps = rectgrad.attribute(model.to(dtype), x.to(dtype), method, target=1)
    assert maps.dtype is dtype
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    assert (maps.double() - expected).abs().max() <= tolerance * expected.abs().max()


# --- the class layer ---------------------------------------------------------------------------------------

LAYERS = {
    "plain_cnn": "4",
    "residual": "4.last",
    "inception": "3/cat",
    "mobile": "3.1",
    "mixer": "4.body.2",
    "shared": "relu#4",
    "functional": "clamp#2",
    "conv3d": "4",
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_trace_names_the_layer(name):
    model, inputs = NETWORKS[name](0)
    kept = rectgrad.record(model, inputs)
    kept.attribute("rectgrad", q=60)
    kept.attribute("gradcam")
    assert layers_of(kept.trace) == [LAYERS[name]]
    assert {row.rule for row in kept.trace.rows} == {"plain", "class layer"}
    kept.attribute("saliency")
    assert layers_of(kept.trace) == []


def test_samples_differ_in_their_class_layer():
    model, x = differing()
    kept = rectgrad.record(model, x)
    maps = kept.attribute("gradcam")
    assert layers_of(kept.trace) == ["first", "last"]
    at_last = at_layer(x, lambda a: a.mean((2, 3)), model.last(model.b(model.first(model.a(x))) + 1), 0)
    at_first = at_layer(x, lambda a: model.last(model.b(a) + 1).amax((2, 3)), model.first(model.a(x)), 0)
    assert_same(maps[::2], at_last[::2])
    assert_same(maps[1::2], at_first[1::2])
    assert_same(rectgrad.attribute(bridged(model), x, "gradcam"), maps)
    for i in range(4):
        alone = rectgrad.record(model, x[i : i + 1])
        assert_same(alone.attribute("gradcam"), maps[i : i + 1])
        assert layers_of(alone.trace) == (["first"] if i % 2 else ["last"])


def test_the_walk_stops_at_the_class_layer():
    model, x = NETWORKS["residual"](0)
    assert [name for name, _ in rectgrad.layer_attributions(model, x, "gradcam")] == ["4.last"]
    model, x = NETWORKS["plain_cnn"](0)
    assert [name for name, _ in rectgrad.layer_attributions(model, x, "gradcam")] == ["8", "4"]


def test_a_hard_sigmoid_written_by_hand_is_no_class_layer():
    torch.manual_seed(0)
    conv, head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def model(x: Tensor) -> Tensor:
        y = conv(x).relu()
        return head((y * (F.relu6(y + 3) / 6)).mean((2, 3)))

    kept = rectgrad.record(model, torch.randn(2, 3, 8, 8))
    kept.attribute("gradcam")
    assert layers_of(kept.trace) == ["relu"]


def test_a_sample_without_any_gradient_has_a_zero_map():
    """Its output is cut off by a ReLU; the others' are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.abs_(), model[3].weight.abs_(), model[3].bias.fill_(-1)
    x = torch.stack([torch.full((1, 6, 6), value) for value in (-9.0, 9.0)])
    for explained in (model, bridged(model)):
        maps = rectgrad.attribute(explained, x, "gradcam")
        assert maps.flatten(1).any(1).tolist() == [False, True]


@pytest.mark.parametrize(
    "turn", [lambda x: x.flip(-1), lambda x: torch.flip(x, (2, 3)), partial(torch.rot90, dims=(2, 3))]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_mirrored_copy_has_no_class_layer(turn, first):
    turns = [turn, nn.Identity()] if first else [nn.Identity(), turn]
    model, x = Mirrored(*turns).double().eval(), torch.randn(2, 2, 8, 8).double()
    alone = Mirrored(nn.Identity())
    alone.load_state_dict(model.state_dict())
    maps = rectgrad.attribute(model, x, "gradcam", target=1, variant="layercam")
    assert_same(maps, rectgrad.attribute(alone.double().eval(), x, "gradcam", target=1, variant="layercam"))


def test_a_mirrored_image_alone_is_refused():
    model = Mirrored(lambda x: x.flip(-1)).double().eval()
    for method in "gradcam", "rectgrad_gated":
        with pytest.raises(UnsupportedModelError, match="no activation with positions"):
            rectgrad.attribute(model, torch.randn(2, 2, 8, 8).double(), method)


@pytest.mark.parametrize("turn", [lambda x: x.flip(1), lambda x: x.flip(-1).flip(-1)])
def test_reversed_channels_are_no_mirror_image(turn):
    model, x = Mirrored(turn).double().eval(), torch.randn(2, 2, 8, 8).double()
    kept = rectgrad.record(model, x)
    kept.attribute("gradcam", target=1)
    assert layers_of(kept.trace) == ["body.3"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_a_class_layer_is_refused(name):
    model, shape, words = REFUSED[name]
    torch.manual_seed(0)
    for explained in (model.eval(), bridged(model)):
        with pytest.raises(UnsupportedModelError, match=f"GradCAM cannot explain this model.*{words}"):
            rectgrad.attribute(explained, torch.randn(shape), "gradcam", 0)


def test_as_good_as_nan():
    model, x = NETWORKS["plain_cnn"](0)
    x[1, 2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"input of shape .* contains NaN"):
        rectgrad.attribute(model, x, "gradcam")
    model, x = NETWORKS["plain_cnn"](0)
    with torch.no_grad():
        model[7].bias[0] = float("inf")
    with pytest.raises(ValueError, match=r"output of layer '7'.*contains an infinity"):
        rectgrad.attribute(model, x, "gradcam")


# --- tokens and channels last ------------------------------------------------------------------------------


def by_hand(model: Tokens, x: Tensor, block: int) -> Tensor:
    """Grad-CAM at the GELU of a block, by autograd."""
    seen = []

    def act(h: Tensor) -> Tensor:
        seen.append(F.gelu(h))
        return seen[-1]

    twin = copy.deepcopy(model)
    for each in twin.blocks:
        each.act = nn.Module()
        each.act.forward = act
    R = torch.autograd.grad(twin(x).amax(1).sum(), seen[block])[0]
    first = 1 if model.last else 1 + model.registers.shape[1]
    grid = (x.shape[2] // 3, x.shape[3] // 3)
    a, R = (t.detach()[:, first : first + 12].transpose(1, 2).unflatten(2, grid) for t in (seen[block], R))
    maps = [spread(class_map(a[n], R[n], "gradcam"), x[n : n + 1]) for n in range(len(x))]
    return torch.cat(maps)


@pytest.mark.parametrize(("reads", "block"), [(slice(0, 1), 0), (slice(0, None), 1)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("registers", [0, 3])
def test_tokens(registers, last, reads, block):
    """A score that reads the class token alone has its class layer in an earlier block."""
    torch.manual_seed(0)
    model = Tokens(registers, last, reads).double().eval()
    x = torch.randn(2, 3, 9, 12).double()
    kept = rectgrad.record(model, x)
    maps = kept.attribute("gradcam")
    assert layers_of(kept.trace) == [f"blocks.{block}.act"]
    assert_same(maps, by_hand(model, x, block), 1e-9)
    assert_same(rectgrad.attribute(bridged(model), x, "gradcam"), maps, 1e-9)


def test_channels_last():
    torch.manual_seed(0)
    model, x = ChannelsLast().double().eval(), torch.randn(2, 3, 6, 6).double()
    a = F.gelu(model.up(model.conv(x).permute(0, 2, 3, 1))).movedim(-1, 1)

    def down(a: Tensor) -> Tensor:
        return model.down(a.movedim(1, -1)).movedim(-1, 1)

    def head(y: Tensor) -> Tensor:
        return model.head((model.conv(x) + y).mean((2, 3)))

    maps = rectgrad.attribute(model, x, "gradcam", 1)
    assert_same(maps, at_layer(x, lambda a: head(down(a)), a))
    assert_same(rectgrad.attribute(model, x, "gradcam", 1, layer="down"), at_layer(x, head, down(a)))


def turned(model: nn.Module, x: Tensor) -> Tensor:
    """As in SegFormer: a convolution of tokens, then the activation."""
    return model.conv(x).flatten(2).transpose(1, 2)


def heads(model: nn.Module, x: Tensor) -> Tensor:
    """As in LeViT: an activation of what attention gives. The last dimension stays where it is."""
    y = model.last(turned(model, x)).view(len(x), 16, 2, 8).transpose(1, 2)
    return (y @ torch.eye(8).double()).transpose(1, 2).reshape(len(x), 16, 16)


@pytest.mark.parametrize("step", [turned, heads])
def test_transpositions_since_the_nearest_layer(step):
    """There are as many tokens as channels, so that sizes do not tell them apart."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last, self.head = nn.Conv2d(3, 16, 2, 2), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.gelu(step(self, x)).mean(1))

    torch.manual_seed(0)
    model, x = Model().double().eval(), torch.randn(2, 3, 8, 8).double()
    a = F.gelu(step(model, x)).transpose(1, 2).unflatten(2, (4, 4))
    expected = at_layer(x, lambda a: model.head(a.mean((2, 3))), a, variant="layercam")
    assert_same(rectgrad.attribute(model, x, "gradcam", 1, variant="layercam"), expected)


# --- a layer by its name -----------------------------------------------------------------------------------


def at_layer(x: Tensor, rest, a: Tensor, target: int = 1, variant: str = "gradcam") -> Tensor:
    """The map at an activation, `rest` being what the network does with it."""
    a = a.detach().requires_grad_()
    R = torch.autograd.grad(rest(a)[:, target].sum(), a)[0]
    maps = [spread(class_map(a[n].detach(), R[n], variant), x[n : n + 1]) for n in range(len(x))]
    return torch.cat(maps)


@pytest.mark.parametrize("layer", ["0", "1", "2", "3", "4", "5"])
def test_a_layer_by_its_name(layer):
    model, x = NETWORKS["plain_cnn"](0)
    until = int(layer) + 1
    expected = at_layer(x, model[until:], model[:until](x), variant="layercam")
    method = GradCAM(layer, "layercam")
    assert_same(rectgrad.attribute(model, x, method, 1), expected)
    assert_same(rectgrad.record(model, x).attribute(method, 1), expected)
    assert_same(rectgrad.attribute(bridged(model), x, method, 1), expected)


class Reusing(nn.Module):
    """Two blocks that share one ReLU, the second being called twice."""

    def __init__(self):
        super().__init__()
        relu = nn.ReLU()
        self.one = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), relu)
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), relu)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.two(self.one(x))).mean((2, 3)))


def test_a_shared_activation_belongs_to_the_block_that_calls_it():
    torch.manual_seed(0)
    model, x = Reusing().double().eval(), torch.randn(2, 3, 6, 6).double()
    first = model.one(x)
    last = model.two(model.two(first))
    rests = {"one": lambda a: model.head(model.two(model.two(a)).mean((2, 3)))}
    rests["two"] = rests["one.1"] = rests["two.1"] = lambda a: model.head(a.mean((2, 3)))
    for layer, rest in rests.items():
        expected = at_layer(x, rest, first if layer == "one" else last, 0, "layercam")
        method = GradCAM(layer, "layercam")
        assert_same(rectgrad.attribute(model, x, method, 0), expected)
        assert_same(rectgrad.record(model, x).attribute(method, 0), expected)
        assert_same(rectgrad.attribute(bridged(model), x, method, 0), expected)


def test_wrong_layers():
    model, x = NETWORKS["residual"](0)
    with pytest.raises(ValueError, match=r"'4.lost' does not exist; there are 4.last, .* and others"):
        rectgrad.attribute(model, x, "gradcam", layer="4.lost")
    with pytest.raises(UnsupportedModelError, match=r"no layer '8' with positions.*shape \(2, 6\)"):
        rectgrad.attribute(model, x, "gradcam", layer="8")
    with pytest.raises(ValueError, match=r"layer '3.shortcut' made no tensor"):
        rectgrad.attribute(model, x, "gradcam", layer="3.shortcut")
    with pytest.raises(ValueError, match="variant must be one of 'gradcam', 'hirescam'"):
        GradCAM(variant="scorecam")
    with pytest.raises(TypeError, match="GradCAM: layer must be a string, not 3"):
        GradCAM(layer=3)


# --- Guided Grad-CAM ---------------------------------------------------------------------------------------

OVER = ["guided_backprop", "rectgrad", "epsilon_lrp", "deeplift", "smoothgrad", "random"]


@pytest.mark.filterwarnings("ignore:the map of sample")
@pytest.mark.parametrize("over", OVER)
def test_guided_is_the_product(over):
    model, x = NETWORKS["residual"](0)
    options = {"samples": 3} if over == "smoothgrad" else {"q": 60} if over == "rectgrad" else {}
    inner = dataclasses.replace(rectgrad.METHODS[over], **options)
    method = GuidedGradCAM(inner, variant="hirescam")
    cam = rectgrad.attribute(model, x, "gradcam", 1, variant="hirescam").sum(1, keepdim=True)
    expected = rectgrad.attribute(model, x, inner, 1) * cam
    assert_same(rectgrad.attribute(model, x, method, 1), expected, 1e-9)
    assert_same(rectgrad.record(model, x).attribute(method, 1), expected, 1e-9)
    assert_same(rectgrad.attribute(model, x, method, 1, batch_size=1), expected, 1e-9)
    assert_same(rectgrad.api.record_for(model, x, method).attribute(method, 1), expected, 1e-9)


@pytest.mark.parametrize("name", ["mobile", "mixer", "activations", "inception"])
def test_one_pass_is_enough_for_both(name):
    """A pass that keeps what both need, on activations whose plain gradient reads their input."""
    model, x = NETWORKS[name](0)
    method = GuidedGradCAM(RectGrad(q=60))
    kept = rectgrad.api.record_for(model, x, method)
    expected = rectgrad.attribute(model, x, "gradcam").sum(1, keepdim=True)
    assert_same(kept.attribute(method), rectgrad.attribute(model, x, "rectgrad", q=60) * expected, 1e-9)
    assert layers_of(kept.trace) == layers_of(named(model, x))
    assert "rectified" in {row.rule for row in kept.trace.rows}


def named(model, x):
    kept = rectgrad.record(model, x)
    kept.attribute("gradcam")
    return kept.trace


def test_over_must_be_a_method():
    with pytest.raises(TypeError, match="over must be a method or its name, not 3"):
        GuidedGradCAM(over=3)
    model, x = NETWORKS["plain_cnn"](0)
    by_name = rectgrad.attribute(model, x, "guided_gradcam", over="saliency")
    assert torch.equal(by_name, rectgrad.attribute(model, x, GuidedGradCAM(rectgrad.Saliency())))


def test_a_baseline_for_each_sample():
    model, x = NETWORKS["plain_cnn"](0)
    method = GuidedGradCAM(rectgrad.DeepLift(baseline=torch.randn_like(x)))
    chunks = rectgrad.attribute(model, x, method, batch_size=2)
    assert_same(chunks, rectgrad.attribute(model, x, method), 1e-9)


# --- averages and captures ---------------------------------------------------------------------------------


def test_smoothgrad_averages_finished_maps():
    model, x = NETWORKS["plain_cnn"](0)
    method = SmoothGrad(over=GradCAM(), samples=6, noise=0.05)
    with torch.no_grad():
        target = model(x).argmax(1)
    copies = noisy((x,), 0.05, 0)
    maps = [rectgrad.attribute(model, *copies(j), "gradcam", target) for j in range(6)]
    assert_same(rectgrad.attribute(model, x, method), sum(maps) / 6, 1e-9)


@pytest.mark.parametrize("make", [differing, vit])
@pytest.mark.parametrize("method", [GradCAM(), GuidedGradCAM()], ids=["gradcam", "guided"])
def test_a_captured_pass_asks_for_no_values(method, make, monkeypatch):
    """It goes as far as the passes before it, and flags samples that would have to go further."""
    model, x = make()
    request = Request(model, (x,), (), {}, 0)

    def captured(inputs: Tensor) -> tuple[Tensor, bool]:
        request.inputs = (inputs,)
        raw, _, suspicious = rectgrad.api.preserved(request, lambda: capture._pass(request, method))
        return raw[0], bool(suspicious)

    expected = rectgrad.attribute(model, x, method, 0)
    assert_same(captured(x[::2])[0], expected[::2])
    monkeypatch.setattr(class_layer, "is_capturing", lambda device: True)
    maps, suspicious = captured(x)
    assert suspicious == (make is differing)
    assert_same(maps[::2], expected[::2], 1e-9)
    monkeypatch.undo()
    assert_same(captured(x)[0], expected, 1e-9)
    monkeypatch.setattr(class_layer, "is_capturing", lambda device: True)
    maps, suspicious = captured(x)
    assert not suspicious
    assert_same(maps, expected, 1e-9)


def test_capture_on_the_cpu():
    model, x = NETWORKS["plain_cnn"](0)
    for method in (GradCAM(), GuidedGradCAM()):
        assert torch.equal(rectgrad.capture(model, x, method)(x, 1), rectgrad.attribute(model, x, method, 1))
    with pytest.raises(UnsupportedModelError, match="capture cannot explain"):
        method.raw(Request(model, (x,), (), {}, 1, replay=lambda *_: ((x,), x)))


def test_resizing_is_torchs():
    values = torch.rand(3, 5).double()
    theirs = F.interpolate(values[None, None], (7, 4), mode="bilinear", align_corners=False)
    torch.testing.assert_close(resize(values, (7, 4)), theirs[0, 0])


class OnePosition(nn.Module):
    """The score reads a single position, if it is large."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(F.conv2d(x, torch.ones(1, 1, 1, 1)))[:, :, 0, 0] - 0.5).repeat(1, 2)


def test_a_sample_without_gradient_hides_no_other():
    name = "gradcam"
    dead, alive = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4)
    assert not rectgrad.attribute(OnePosition(), dead, name, 0).any()
    for batch in (alive, torch.cat([dead, alive])):
        with pytest.raises(rectgrad.UnsupportedModelError, match="reaches several"):
            rectgrad.attribute(OnePosition(), batch, name, 0)
