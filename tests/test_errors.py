"""Errors name the fix: the mistakes that people make in their first ten minutes, each by its text."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import rectgrad
from rectgrad.photos import UnreadableImageError
from tiny_model import tiny

X = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PICTURE = Image.fromarray((X[0].permute(1, 2, 0) * 255).to(torch.uint8).numpy())
NET = tiny()

CALLS = {
    "attribute": lambda model, inputs: rectgrad.attribute(model, inputs),
    "record": lambda model, inputs: rectgrad.record(model, inputs),
    "capture": lambda model, inputs: rectgrad.capture(model, inputs)(inputs),
    "layer_attributions": lambda model, inputs: rectgrad.layer_attributions(model, inputs),
}
ON_CALLS = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def says(kind, *parts):
    """An error whose text holds these parts, in this order."""
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


@ON_CALLS
def test_an_image_model_for_its_module(call):
    with says(
        TypeError, "model must be a module, not ImageModel", "model.module", "rectgrad.explain(picture, "
    ):
        call(NET, X)


class Squeezing(nn.Module):
    """Fails on (C, H, W) by an index, not by a shape."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return self.conv(x).relu().mean((2, 3))


class Convolution(nn.Conv2d):
    """A class of one's own."""


NETWORKS = {
    "convolution": NET.module,
    "batch norm": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()).eval(),
    "index": Squeezing(nn.Conv2d(3, 8, 3)),
    "subclass": Squeezing(Convolution(3, 8, 3)),
    "works, with another meaning": nn.Sequential(nn.Conv2d(3, 8, 32), nn.ReLU(), nn.Flatten(0)),
}


@pytest.mark.parametrize("model", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("name", ["attribute", "layer_attributions", "capture"])
def test_a_missing_batch_dimension(model, name):
    with says(ValueError, "cannot take inputs of shape (3, 32, 32)", "(N, ...)", "give inputs[None]"):
        CALLS[name](model, X[0])


def test_other_errors_of_a_model_stay_as_they_are():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3)

        def forward(self, x):
            if x.shape[-1] < 20:
                raise ValueError("too small for me")
            return self.conv(x.unsqueeze(1)).relu().mean((2, 3))

    assert rectgrad.attribute(Failing(), X[:, 0]).shape == (1, 32, 32)
    with says(ValueError, "too small for me"):
        rectgrad.attribute(Failing(), X[:, 0, :, :16])
    with says(ValueError, "contains NaN"):
        rectgrad.attribute(Failing(), X[:, 0] * float("nan"))
    with says(ValueError, "target 99 is out of range"):
        rectgrad.attribute(Failing(), X[:, 0], target=99)
    with says(RuntimeError, "2d"):
        rectgrad.attribute(Failing(), X)  # a dimension too many


def test_a_percentile_given_as_a_fraction():
    text = ("q=0.98 is a percentile, from 0 to 100, not a fraction: use q=98", "rectgrad.RectGrad(q=0.98)")
    with says(ValueError, *text):
        rectgrad.attribute(NET.module, X, q=0.98)
    with says(ValueError, *text):
        rectgrad.explain(X, NET, q=0.98)
    with says(ValueError, *text):
        rectgrad.record(NET.module, X).attribute("rectgrad", q=0.98)
    assert rectgrad.attribute(NET.module, X, rectgrad.RectGrad(q=0.98)).any()
    with says(TypeError, "'saliency' has no option 'q'"):
        rectgrad.attribute(NET.module, X, "saliency", q=0.98)


@ON_CALLS
@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        (PICTURE, ("not Image", "rectgrad.explain(picture, model) takes paths and pictures")),
        ("cat.jpg", ("not str", "rectgrad.explain(picture, model) takes paths and pictures")),
        (Path("cat.jpg"), ("Path; ", "rectgrad.explain(picture, model) takes paths and pictures")),
        (X.numpy(), ("not ndarray", "torch.from_numpy(inputs)", "rectgrad.explain")),
        ([X[0]], ("not list", "torch.stack(inputs)", "rectgrad.explain(inputs, model)")),
    ],
    ids=["PIL", "string", "path", "array", "list"],
)
def test_a_picture_as_input(call, inputs, parts):
    with says(TypeError, "inputs must be a floating tensor (N, ...)", *parts):
        call(NET.module, inputs)


def test_a_photo_that_does_not_belong_to_the_map():
    values = torch.rand(3, 32, 32)
    with says(TypeError, "photo must be a PIL image, not Tensor", "model.crop(picture)"):
        rectgrad.image.show(values, X[0])
    with says(ValueError, "the photo has 48 × 40 pixels and the map 32 × 32", "model.crop(picture)"):
        rectgrad.image.show(values, Image.new("RGB", (48, 40)))
    assert rectgrad.image.show(values, PICTURE).width > 900


@pytest.mark.parametrize("wrong", ["cat.jpg", Path("cat.jpg"), X, np.zeros((32, 32, 3))])
def test_what_a_model_cannot_prepare(wrong):
    with says(TypeError, f"prepare takes a PIL image, not {type(wrong).__name__}", "PIL.Image.open(path)"):
        NET.prepare(wrong)
    with says(TypeError, f"crop takes a PIL image, not {type(wrong).__name__}", "rectgrad.explain(picture"):
        NET.crop(wrong)


def test_a_model_that_ends_in_softmax():
    model = nn.Sequential(*NET.module, nn.Softmax(1))
    says_so = pytest.warns(UserWarning, match=r"ends in a softmax.*such as model\[:-1\]")
    with says_so:
        rectgrad.attribute(model, torch.cat([X, X]), "saliency", batch_size=1)
    for target in (None, 3):
        with says_so:
            rectgrad.attribute(model, X, "saliency", target)
    with says_so:
        kept = rectgrad.record(model, X)
    kept.attribute("saliency")  # said once
    with says_so:
        found = rectgrad.explain(X, model, "saliency")
    assert "ends in a softmax" in found.warnings[0]
    assert found.target.probability == pytest.approx(float(found.outputs.max()))  # no second softmax
    rectgrad.attribute(model, X, "saliency", lambda out: out[:, 0].log())  # no warning: a score of one's own
    rectgrad.attribute(nn.Sequential(*NET.module, nn.Sigmoid()), X, "saliency")


@pytest.mark.parametrize(
    ("wrong", "kind", "parts"),
    [
        ("https://a.b/cat.jpg", ValueError, ("is a URL; download it first",)),
        ("none.jpg", UnreadableImageError, ("none.jpg: no such file",)),
        (3, TypeError, ("image must be a path, a PIL image, an array (H, W, 3), a tensor", "not int")),
        ([[0.5, 0.5]], TypeError, ("image must be a path", "not list")),
        (
            np.zeros((3, 8, 8)),
            ValueError,
            ("not (3, 8, 8); move the channels last: array.transpose(1, 2, 0)",),
        ),
        (np.zeros((2, 8, 8, 3)), ValueError, ("pass several pictures as a list: list(array)",)),
        (np.zeros((8, 8)), ValueError, ("np.stack([array] * 3, axis=2)",)),
        (np.full((8, 8, 3), 9.0), ValueError, ("from 0 to 1, not from 0 to 9; divide by 255",)),
        (np.zeros((8, 8, 3), dtype=int), TypeError, ("uint8, or float from 0 to 1, not int64",)),
        (torch.rand(1, 8, 8), ValueError, ("takes a tensor (3, height, width), not shape (1, 8, 8)",)),
        (torch.tensor(0.5), ValueError, ("scalar tensor",)),
        (torch.rand(8, 8), ValueError, ("takes a tensor (3, height, width), not shape (N, 8)",)),
        (X * 255, ValueError, ("the tensor has values up to", "far above those that tiny takes")),
        (X.double(), TypeError, ("of type torch.float64", "convert the tensor with .to(torch.float32)")),
        (np.zeros((8, 8, 1)), ValueError, ("np.stack([array] * 3, axis=2)",)),
        (np.zeros((0, 8, 3)), ValueError, ("the picture has no pixels: its size is 0 × 8 × 3",)),
        (Image.new("RGB", (8, 0)), ValueError, ("the picture has no pixels: its size is 8 × 0",)),
        ("", ValueError, ("'' is no path; pass the path of a photo",)),
        (str(Path(__file__).parent), ValueError, ("is a folder, not a photo; pass", "a list of paths")),
        (NET, TypeError, ("the picture comes before the model: rectgrad.explain(picture, model)",)),
    ],
    ids=lambda value: None,
)
def test_what_explain_cannot_take(wrong, kind, parts):
    with says(kind, *parts):
        rectgrad.explain(wrong, NET)


def test_a_module_that_cannot_prepare_a_picture_and_other_arguments():
    with says(TypeError, "Sequential has no preprocessing of its own; pass prepare="):
        rectgrad.explain(PICTURE, NET.module)
    with says(TypeError, "prepare returned Image; it must return a tensor (C, H, W)"):
        rectgrad.explain(PICTURE, NET.module, prepare=lambda picture: picture)
    with says(TypeError, "model must be a name", "not int"):
        rectgrad.explain(PICTURE, 3)
    with says(ValueError, "'smoothgrad' is a method, not a model: pass method='smoothgrad'"):
        rectgrad.explain(PICTURE, "smoothgrad")
    with says(TypeError, "prepare must be a function from a PIL image", "not 'imagenet'"):
        rectgrad.explain(PICTURE, NET.module, prepare="imagenet")
    for labels in ({0: "a", 1: "b", 2: "c", 3: "d"}, {"a", "b", "c", "d"}):
        with says(TypeError, f"labels is a {type(labels).__name__}; pass a list of the class names"):
            rectgrad.explain(PICTURE, NET, labels=labels)
    single = nn.Sequential(*NET.module, nn.Linear(4, 1))
    with says(ValueError, "Sequential has a single output, but the number of class names is 2"):
        rectgrad.explain(X, single, labels=["cat", "dog"])
    with says(ValueError, "device='meta', but the model is on cpu; move it first: model.to('meta')"):
        rectgrad.explain(PICTURE, NET, device="meta")
    with says(ValueError, "target has 2 classes for 1 pictures"):
        rectgrad.explain([PICTURE], NET, target=[0, 1])
    with says(ValueError, "class 'blue' is ambiguous"):
        rectgrad.explain(PICTURE, NET, target="blue")
    with says(ValueError, "class 'cat' is unknown: this model has no class names, so use an index"):
        rectgrad.explain(X, NET.module, target="cat")
    with says(ValueError, "tiny has 4 classes, but the number of class names is 3"):
        rectgrad.explain(PICTURE, NET, labels=["a", "b", "c"])
    with says(ValueError, "batch_size must be an integer of at least 1, not 0"):
        rectgrad.explain(PICTURE, NET, batch_size=0)


def test_a_misspelt_name_is_recognised():
    with says(ValueError, "unknown method 'salency'; did you mean 'saliency'? methods are rectgrad, "):
        rectgrad.attribute(NET.module, X, "salency")
    with says(ValueError, "unknown model 'cifar10_cn'; did you mean 'cifar10_cnn'? models are "):
        rectgrad.models.load("cifar10_cn")
    with says(ValueError, "unknown method 'GradCAM'; did you mean 'gradcam'?"):
        rectgrad.attribute(NET.module, X, "GradCAM")
    with says(ValueError, "unknown model 'efficientnet'; did you mean 'efficientnet_lite0'?"):
        rectgrad.models.load("efficientnet")
    with says(ValueError, "unknown model 'alexnet'; models are "):
        rectgrad.models.load("alexnet")


@pytest.mark.parametrize("device", ["cuda", "nowhere"])
def test_a_device_that_is_not_there(device, monkeypatch):
    def lacking(*size, device):
        raise RuntimeError("Expected one of cpu, cuda" if device == "nowhere" else "no NVIDIA driver")

    monkeypatch.setattr(torch, "zeros", lacking)
    text = {"cuda": "is not available: no NVIDIA driver", "nowhere": "devices are cpu, cuda, cuda:1 and mps"}
    with says(ValueError, f"device {device!r}", text[device]):
        rectgrad.explain(PICTURE, "cifar10_cnn", device=device)


def test_a_class_for_an_instance():
    with says(TypeError, "model is the class Conv2d; pass an instance"):
        rectgrad.explain(X, nn.Conv2d)


def test_an_alpha_channel():
    with says(ValueError, "not (32, 32, 4)", "array[:, :, :3]"):
        rectgrad.explain(np.zeros((32, 32, 4), np.uint8), NET)


def test_arguments_of_a_metric_in_another_order():
    maps = torch.rand_like(X)
    with says(TypeError, "model must be a module or a function, not Tensor; the model comes first"):
        rectgrad.metrics.insertion(maps, X, maps, 3)
    with says(TypeError, "model must be a module or a function, not ImageModel; give its module, model.mod"):
        rectgrad.metrics.insertion(NET, X, maps, 3)
    with says(TypeError, "insertion(): maps must be a tensor, not Sequential"):
        rectgrad.metrics.insertion(NET.module, X, NET.module, 3)
