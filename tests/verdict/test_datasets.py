"""`rectgrad judge` on a dataset by its name, and with a given number of photos."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import rectgrad
from rectgrad import cli, data, metrics
from rectgrad.verdict import presets
from rectgrad.verdict.record import read
from rectgrad.verdict.rows import tensor_digest

SMALL = replace(presets.PRESETS["quick"], photos=10, evaluated=4, repeated=2, leaders=0)


@pytest.fixture(scope="module")
def shapes():
    return data.shapes.load(10, 40)


@pytest.fixture
def call(monkeypatch, tmp_path, shapes):
    """Runs the command; returns its exit status and the verdict, if there is one."""
    monkeypatch.setitem(presets.PRESETS, "quick", SMALL)
    monkeypatch.setattr(presets.Preset, "enough", lambda self, rows, measures: self)
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: shapes)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        common = ["--methods", "saliency", "--model", "cifar10_cnn", "--out", "out"]
        monkeypatch.setattr(sys, "argv", ["rectgrad", "judge", *arguments, *common])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        path = tmp_path / "out" / "verdict.json"
        return stopped.value.code, read(path) if path.exists() else None

    return run


def prepared(dataset, count):
    """The first test images, as the network takes them."""
    model = rectgrad.models.load("cifar10_cnn")
    return torch.stack([model.prepare(Image.fromarray(each)) for each in dataset.test.pixels[:count]])


def test_a_dataset_by_name_with_its_masks(call, shapes):
    status, record = call("shapes", "--measures", "inside,pointing_game", "--count", "7")
    assert status == 0
    assert record["photos"]["n"] == 7
    x, masks = prepared(shapes, 7), torch.from_numpy(shapes.test.masks[:7])
    assert record["digests"]["photos"] == tensor_digest(x)
    assert record["digests"]["masks"] == tensor_digest(masks)
    maps = rectgrad.attribute(rectgrad.models.load("cifar10_cnn").module, x, "saliency")
    for name, values in {
        "inside": metrics.inside(maps, masks, share=True),
        "pointing_game": metrics.pointing_game(maps, masks),
    }.items():
        assert record["table"][name]["saliency"]["mean"] == pytest.approx(float(values.mean()), abs=1e-5)
        assert record["table"][name]["saliency"]["n"] == 7
    assert set(record["photos"]["classes"]) <= set(
        data.cifar10.CLASSES
    )  # of the network, not of the drawings


def test_every_class_of_a_dataset_is_among_the_photos(call, shapes):
    """Classes alternate in `shapes`: every 4th of its images would have 5 classes."""
    _, record = call("shapes", "--measures", "gini")
    assert record["photos"]["n"] == 10
    assert record["digests"]["photos"] == tensor_digest(prepared(shapes, 10))
    assert len(set(shapes.test.labels[:10].tolist())) == 10


def test_masks_are_resized_with_the_photos(call, shapes, monkeypatch):
    """A network with larger inputs: the masks of the dataset follow."""
    larger = replace(rectgrad.models.load("cifar10_cnn"), size=(64, 64), crop_fraction=1.0)
    module = torch.nn.Sequential(torch.nn.AvgPool2d(2), larger.module).eval()
    monkeypatch.setattr("rectgrad.cli.options.load", lambda *_, **__: replace(larger, module=module))
    status, record = call("shapes", "--measures", "inside", "--count", "3")
    assert status == 0
    assert record["digests"]["masks"] is not None
    share = shapes.test.masks[:3].mean()
    inside = record["table"]["inside"]
    assert inside["random"]["mean"] == pytest.approx(share, abs=0.05)


def test_own_weights_have_the_classes_of_the_dataset(call, tmp_path):
    weights = tmp_path / "own.safetensors"
    save_file(rectgrad.models.load("cifar10_cnn").module.state_dict(), weights)
    _, record = call("shapes", "--measures", "gini", "--count", "3", "--weights", str(weights))
    assert set(record["photos"]["classes"]) <= set(data.shapes.CLASSES)


def test_a_folder_of_that_name_is_a_folder(call, tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "shapes").mkdir()
    for i in range(6):
        values = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / "shapes" / f"own{i}.png")
    status, record = call("shapes", "--measures", "gini,deletion_mean", "--count", "3")
    assert status == 0
    assert [Path(name).name for name in record["photos"]["names"]] == [
        "own0",
        "own2",
        "own4",
    ]  # evenly spread
    assert record["digests"]["masks"] is None
    assert record["table"]["gini"]["saliency"]["n"] == record["table"]["deletion_mean"]["saliency"]["n"] == 3
    assert record["preset"]["photos"] == 3


@pytest.mark.parametrize("count", ["1", "0", "-4"])
def test_too_small_counts_are_refused(call, capsys, count):
    assert call("shapes", "--count", count) == (2, None)
    printed = capsys.readouterr().err
    assert f"a verdict needs 2 photos or more, not {count}" in printed
    assert printed.count("\n") == 1


def test_what_a_count_changes():
    quick, full = presets.PRESETS["quick"], presets.PRESETS["full"]
    for preset, count in ((quick, 8), (quick, 200), (full, 1000)):
        found = preset.of_photos(count)
        assert (found.photos, found.evaluated, found.repeated) == (count, count, count)
        own = {name: getattr(preset, name) for name in ("photos", "evaluated", "repeated")}
        assert replace(found, **own) == preset
