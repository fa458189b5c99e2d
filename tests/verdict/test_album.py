"""The photos that are judged: equal ones, unusable ones, and their masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import rectgrad
from planted import PATCH, PatchNet, Shown, pictures
from rectgrad.verdict.page import page
from rectgrad.verdict.presets import PRESETS
from tiny_model import tiny

SMALL = replace(PRESETS["quick"], photos=8, evaluated=4, leaders=0, chunk=4)
NET = PatchNet().eval()
TRUTH = {"truth": Shown(NET.regions)}


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    monkeypatch.setattr("rectgrad.verdict.presets.Preset.enough", lambda self, rows, measures: self)


def judged(x, measures="gini", network=NET, methods=TRUTH, **options):
    return rectgrad.judge(network, x, methods, measures=measures, preset=SMALL, **options)


def said(verdict, kind):
    return {each["what"]: each["why"] for each in verdict.failures if each["kind"] == kind}


def test_equal_photos_count_once():
    """Else ten copies of one photo would make every difference significant."""
    x = pictures(NET, 3, 0)[[0, 1, 0, 0, 2]]
    found = judged(x)
    assert said(found, "duplicate") == {"2": "the same picture as 0", "3": "the same picture as 0"}
    assert found.record["photos"]["names"] == ["0", "1", "4"]
    assert found.table["gini"]["truth"]["n"] == 3


def test_photos_whose_outputs_are_not_finite_are_left_out():
    class Dividing(PatchNet):
        def evidence(self, x):
            return super().evidence(x) / (x[:, 0, 0, 0] != 7).float()

    x = pictures(NET, 5, 0)
    x[1, 0, 0, 0] = 7
    found = judged(x, "gini,deletion_mean", Dividing().eval())
    assert said(found, "photo") == {"1": "1: the network's outputs are NaN or infinite"}
    assert found.table["gini"]["truth"]["n"] == found.table["deletion_mean"]["truth"]["n"] == 4
    with pytest.raises(ValueError, match="no photo to judge: the network's outputs are NaN"):
        judged(x[1:2], network=Dividing().eval())


@pytest.mark.parametrize("kind", [torch.int64, torch.complex64])
def test_photos_have_floating_values(kind):
    with pytest.raises(TypeError, match=f"inputs of type {kind}"):
        judged(pictures(NET, 3, 0).to(kind))


def test_masks_follow_their_photos():
    """In the order of the photos, of which one is a copy and one has no finite output."""
    x = pictures(NET, 6, 0)
    x[2] = x[0]
    masks = torch.zeros(6, 24, 24, dtype=torch.bool)
    for i in range(6):
        masks[i, PATCH[0], PATCH[1]] = i in (1, 3, 4)  # of others, nothing is marked
        masks[i, 20:, i:] = True
    found = judged(x, "inside", masks=masks)
    maps = rectgrad.attribute(NET, x, TRUTH["truth"])
    expected = rectgrad.metrics.inside(maps, masks, share=True)[[0, 1, 3, 4, 5]].mean()
    assert found.table["inside"]["truth"]["mean"] == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(ValueError, match="4 masks for 6 photos: needs one for each"):
        judged(x, "inside", masks=masks[:4])


@pytest.mark.parametrize("as_list", [False, True])
def test_masks_of_photos_that_are_given_as_paths(tmp_path, as_list):
    random = np.random.default_rng(0)
    for name in ("photos", "masks"):
        (tmp_path / name).mkdir()
    for i in range(3):
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(
            tmp_path / f"photos/{i}.png"
        )
        mask = np.zeros((32, 32), dtype=np.uint8)
        mask[: 8 * (i + 1)] = 255
        Image.fromarray(mask).save(tmp_path / f"masks/{i}.png")
    photos, masks = (sorted(map(str, (tmp_path / name).iterdir())) for name in ("photos", "masks"))
    given = masks if as_list else tmp_path / "masks"
    found = judged(photos[1:], "inside", tiny(), "saliency", masks=given[1:] if as_list else given)
    assert found.table["inside"]["random"]["mean"] == pytest.approx((2 / 4 + 3 / 4) / 2, abs=0.05)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_masks_in_a_list_are_boolean_arrays_or_tensors(kind):
    x, mask = pictures(NET, 3, 0), np.zeros((24, 24), dtype=bool)
    mask[PATCH] = True
    found = judged(x, "inside", masks=[kind(mask)] * 3)
    assert found.table == judged(x, "inside", masks=torch.from_numpy(mask).expand(3, -1, -1)).table
    with pytest.raises(ValueError, match="type float64: needs a boolean array"):
        judged(x, "inside", masks=[kind(mask.astype(float))] * 3)


def test_masks_that_say_nothing_are_left_out():
    masks = torch.zeros(5, 24, 24, dtype=torch.bool)
    masks[1] = True
    masks[2:, PATCH[0], PATCH[1]] = True
    found = judged(pictures(NET, 5, 0), "inside,pointing_game", masks=masks)
    assert said(found, "masks") == {"the masks": "2 masks are empty or cover the whole photo, and left out"}
    for measure in ("inside", "pointing_game"):
        assert found.table[measure]["truth"]["n"] == 3
    assert found.table["pointing_game"]["truth"]["mean"] == 1


def test_one_photo_has_no_intervals_and_no_answers():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    found = judged(torch.rand(1, 3, 8, 8), "gini,deletion,specificity", network, "saliency,gradcam")
    cell = found.table["gini"]["saliency"]
    assert (cell["low"], cell["high"], cell["n"]) == (None, None, 1)
    assert set(found.answers.values()) == {"inconclusive"}
    assert "<td>–</td><td>n 1</td>" in page(found.record)
