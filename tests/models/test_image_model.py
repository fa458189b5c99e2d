"""Pictures in, class names out."""

import re

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image

import rectgrad
from model_helpers import model_of, one_line
from rectgrad.models import CifarCNN, ModelUnavailableError, classes, load

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_pictures_have_the_type_of_the_weights(dtype):
    model = load("cifar10_cnn")
    crop = model.crop(Image.new("RGB", (40, 30), (10, 200, 90)))
    expected = model.prepare(crop)
    model.module.to(dtype)
    assert torch.equal(model.prepare(crop), expected.to(dtype))
    assert rectgrad.explain(crop, model, "saliency").map.any()


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
    "wrong",
    [
        {"size": (0, 4)},
        {"size": (4.0, 4.0)},
        {"mean": (0.5,)},
        {"std": (0.5, 0, 0.5)},
        {"crop_fraction": 1.5},
        {"interpolation": "cubic"},
        {"module": lambda x: x},
        {"labels": None},
        {"labels": [1, 2]},
    ],
)
def test_impossible_inputs_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
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
        ("bus", 779),  # school bus; also in minibus and trolleybus
    ],
)
def test_find_class(lite0, wanted, index):
    assert lite0.find_class(wanted) == index


def test_cats_come_before_oystercatchers(lite0):
    with pytest.raises(ValueError) as error:
        lite0.find_class("cat")
    listed = re.findall(r"(\d+) ", str(error.value))
    assert {281, 282, 283, 284, 285} <= set(map(int, listed[:7]))
    found = [lite0.label(i) for i in classes.search(lite0.names(), "cat")]
    assert found.index("tabby") < found.index("catamaran") < found.index("oystercatcher")


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
    wrong = {names: "cannot be read", tmp_path / "none.txt": "no such file", tmp_path: "cannot be read"}
    for bad, reason in wrong.items():
        with pytest.raises(ModelUnavailableError, match=rf"labels=.*{reason}"):
            load("cifar10_cnn", weights=weights, labels=bad)
