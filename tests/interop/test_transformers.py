"""Image classifiers of the real transformers package: small, with random weights, nothing downloaded.

Its ResNet is made of ReLUs; ConvNeXt, ViT and Swin of GELUs, which follow RectGrad's rule as well.
"""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import rectgrad
from every_method import EVERY, QUICK

transformers = pytest.importorskip(
    "transformers",
    reason="NO transformers: nothing of Hugging Face's own code is tested (pip install transformers)",
)

SIZE = 64
FEW = QUICK | {"smoothgrad": {"samples": 3}, "integrated_gradients": {"steps": 3}}
SMALL = {"num_labels": 5, "image_size": SIZE}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 8,
}
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
MODELS = {
    "ResNet": {"embedding_size": 8, **STAGES},
    "ConvNext": STAGES,
    "ViT": VIT,
    "Swin": SWIN,
}


def built(name: str, **changes) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        unsettle(model)
    return model.double().eval()


@torch.no_grad()
def unsettle(model: nn.Module) -> None:
    """Fresh weights are tiny and biases zero, so a zero input has no variance for the norms to divide by."""
    for name, parameter in model.named_parameters():
        if "layer_scale" in name:
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        else:
            parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> nn.Module:
    return built(request.param)


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def raw(model: nn.Module, pixels: Tensor, **options) -> Tensor:
    """What arrives at the pixels by RectGrad's rules."""
    return rectgrad.attribute(model, pixels, multiply_by_input=False, positive_only=False, **options)


def plain(model: nn.Module, pixels: Tensor) -> Tensor:
    """The gradient of each sample's largest logit, by autograd alone."""
    x = pixels.clone().requires_grad_()
    return torch.autograd.grad(model(x).logits.amax(1).sum(), x)[0]


@pytest.mark.parametrize("method", EVERY)
def test_maps_are_of_pixels_and_do_not_depend_on_the_batch(model, pixels, method):
    options = FEW.get(method, {})
    maps = rectgrad.attribute(model, pixels, method, **options)
    assert maps.shape == pixels.shape
    assert maps.isfinite().all()
    assert (maps.flatten(1) != 0).any(1).all()
    alone = [rectgrad.attribute(model, x[None], method, **options) for x in pixels]
    torch.testing.assert_close(maps, torch.cat(alone), rtol=0, atol=1e-9 * float(maps.abs().max()))


def test_saliency_is_the_gradient(model, pixels):
    """To the last bit where no parameter wants a gradient: for those that do, torch takes other kernels."""
    gradient = plain(model, pixels)
    maps = rectgrad.attribute(model, pixels, "saliency")
    torch.testing.assert_close(maps, gradient, rtol=0, atol=1e-12 * float(gradient.abs().max()))
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert torch.equal(rectgrad.attribute(frozen, pixels, "saliency"), plain(frozen, pixels))


class Rectified(torch.autograd.Function):
    """RectGrad's rule for one sample, written from its definition: R passes where a * R > tau."""

    @staticmethod
    def forward(ctx, x, activation, q):
        a = activation(x)
        ctx.save_for_backward(a)
        ctx.q = q
        return a

    @staticmethod
    def backward(ctx, R):
        s = ctx.saved_tensors[0] * R
        tau = s.flatten().sort(descending=True).values[round((s.numel() - 1) * (1 - ctx.q / 100))]
        return R.where(s > tau, 0), None, None


class Replaced(nn.Module):
    def __init__(self, activation: nn.Module, q: float) -> None:
        super().__init__()
        self.activation, self.q = activation, q

    def forward(self, x: Tensor) -> Tensor:
        return Rectified.apply(x, self.activation, self.q)


def rectified_by_hand(model: nn.Module, q: float) -> nn.Module:
    """A copy of the model with every activation replaced."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("ReLU", "GELUActivation"):
                setattr(parent, name, Replaced(child, q))
    return twin


@pytest.mark.parametrize("q", [80, 98])
def test_rectgrad_is_the_rule_at_every_activation(model, pixels, q):
    by_hand = rectified_by_hand(model, q)
    gradient = plain(model, pixels)
    for i in range(len(pixels)):
        maps, wanted = (
            raw(model, pixels[i : i + 1], q=q, padding_trick=False),
            plain(by_hand, pixels[i : i + 1]),
        )
        torch.testing.assert_close(maps, wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()))
        assert float((maps[0] - gradient[i]).norm() / gradient[i].norm()) > 0.1


@pytest.mark.parametrize("method", ["rectgrad", "guided_backprop", "deconv"])
def test_no_method_with_rules_gives_the_plain_gradient(model, pixels, method):
    gradient = plain(model, pixels)
    options = {"multiply_by_input": False, "positive_only": False} if method == "rectgrad" else {}
    maps = rectgrad.attribute(model, pixels, method, **options)
    assert float((maps - gradient).norm() / gradient.norm()) > 0.1


@pytest.mark.parametrize("method", ["deeplift", "integrated_gradients"])
def test_completeness(model, pixels, method):
    """DeepLIFT's map sums to the difference from the baseline's score; integrated gradients' nearly does."""
    baseline = 0.5 * pixels.flip(0)
    options = {"steps": 200} if method == "integrated_gradients" else {}
    maps = rectgrad.attribute(model, pixels, method, target=1, baseline=baseline, **options)
    with torch.no_grad():
        difference = (model(pixels).logits - model(baseline).logits)[:, 1]
    rtol = 0.1 if options else 1e-6
    torch.testing.assert_close(maps.sum((1, 2, 3)), difference, rtol=rtol, atol=1e-6)


CLASS_LAYERS = {
    "ResNet": ("resnet.encoder.stages.3.layers.0.activation", (32, 2, 2)),
    "ConvNext": ("convnext.encoder.stages.3.layers.0.act", (2, 2, 128)),
    "ViT": ("0.mlp", (65, 64)),  # the last block of two has a gradient at the class token alone
    "Swin": ("1.blocks.1.", (64, 64)),
}


@pytest.mark.parametrize("name", CLASS_LAYERS)
def test_the_class_layer(pixels, name):
    part, shape = CLASS_LAYERS[name]
    kept = rectgrad.record(built(name), pixels)
    kept.attribute("gradcam")
    rows = zip(kept.trace.rows, kept.trace.layers(), strict=True)
    [(row, layer)] = [(row, layer) for row, layer in rows if row.rule == "class layer"]
    assert part in layer
    assert row.shape[1:] == shape


def test_positions_that_are_no_image():
    """MobileViTV2 has 4 positions in each of 16 patches, Hiera one window after the other."""
    kinds = transformers.MobileViTV2Config, transformers.HieraConfig
    options = {"width_multiplier": 0.25}, {"embed_dim": 8, "num_heads": [1] * 4, "depths": [1] * 4}
    patches, windows = (kind(num_labels=5, **each) for kind, each in zip(kinds, options, strict=True))
    kept = rectgrad.record(
        transformers.MobileViTV2ForImageClassification(patches).eval(), torch.randn(1, 3, 256, 256)
    )
    kept.attribute("gradcam", target=1)
    assert [row.shape[2:] for row in kept.trace.rows if row.rule == "class layer"] == [(8, 8)]
    model = transformers.HieraForImageClassification(windows).eval()
    for method in "gradcam", "rectgrad_gated":
        with pytest.raises(rectgrad.UnsupportedModelError, match="no activation with positions"):
            rectgrad.attribute(model, torch.randn(1, 3, 224, 224), method, target=1)


@pytest.mark.parametrize("name", ["ViT", "Swin"])
def test_both_ways_of_attention_have_the_same_maps(pixels, name):
    """Torch's fused attention, and the one written out, whose softmax is always of float32."""
    fused, written = (built(name, attn_implementation=way) for way in ("sdpa", "eager"))
    for method in "rectgrad", "guided_backprop", "epsilon_lrp", "deeplift":
        maps = rectgrad.attribute(fused, pixels, method)
        same = rectgrad.attribute(written, pixels, method)
        torch.testing.assert_close(maps, same, rtol=0, atol=1e-5 * float(maps.abs().max()))


@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_pytorch_tanh", "relu", "relu6", "silu", "mish", "leaky_relu"]
)
def test_activations_that_follow_the_rule(pixels, activation):
    model = built("ViT", hidden_act=activation)
    gradient = plain(model, pixels)
    assert float((raw(model, pixels) - gradient).norm() / gradient.norm()) > 0.1


@pytest.mark.parametrize(
    ("activation", "seen"),
    [
        ("quick_gelu", "sigmoid"),
        ("gelu_new", "tanh"),
        ("gelu_python", "erf"),
        ("sigmoid", "sigmoid"),
        ("linear", "no"),
    ],
)
def test_activations_written_by_hand_are_refused(pixels, activation, seen):
    """Never a silent plain gradient: transformers writes some activations out of tanh, erf and sigmoid."""
    model = built("ViT", hidden_act=activation)
    for method in "rectgrad", "guided_backprop", "deconv":
        with pytest.raises(rectgrad.UnsupportedModelError, match=f"nothing to rectify .*{seen}"):
            rectgrad.attribute(model, pixels, method)
    assert torch.equal(rectgrad.attribute(model, pixels, "saliency"), plain(model, pixels))


# A folder, as save_pretrained leaves it

PROCESSORS = {
    "ViT": {"image_processor_type": "ViTImageProcessor", "size": {"height": SIZE, "width": SIZE}},
    "ConvNext": {
        "image_processor_type": "ConvNextImageProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_pct": 0.8,
    },
}


@pytest.fixture(params=PROCESSORS)
def folder(request, tmp_path):
    """A model and its image processor's settings; the latter by hand, as the class may need torchvision."""
    model = built(request.param).float()
    model.config.id2label = dict(enumerate(["cat, house cat", "dog", "crane", "pear", "cup"]))
    model.save_pretrained(tmp_path)
    usual = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "resample": 2,
    }
    colours = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    settings = {**usual, **colours, **PROCESSORS[request.param]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    return tmp_path


def photo(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_a_folder_is_explained(folder):
    net = rectgrad.models.load(f"hf:{folder}")
    assert net.find_class("house cat") == 0
    assert (net.size, net.module.training) == ((SIZE, SIZE), False)
    x = net.prepare(net.crop(photo(90, 120)))[None]
    assert x.shape == (1, 3, SIZE, SIZE)
    for method in "rectgrad", "saliency", "deeplift":
        maps = rectgrad.attribute(net.module, x, method)
        assert maps.shape == x.shape
        assert maps.isfinite().all()
        assert (maps != 0).any()


def test_a_photo_is_prepared_as_by_its_own_processor(folder):
    net = rectgrad.models.load(f"hf:{folder}")
    side = round(SIZE / net.crop_fraction)
    picture = photo(side, side)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    theirs = processor(picture, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(net.prepare(net.crop(picture)), theirs, rtol=0, atol=1e-5)


def test_weights_of_a_folder_are_those_saved(folder):
    net = rectgrad.models.load(f"hf:{folder}")
    saved = type(net.module).from_pretrained(folder).state_dict()
    assert all(torch.equal(value, saved[key]) for key, value in net.module.state_dict().items())


def test_a_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(
        rectgrad.models.ModelUnavailableError, match="is not available from transformers"
    ) as error:
        rectgrad.models.load(f"hf:{tmp_path}")
    assert "\n" not in str(error.value)
