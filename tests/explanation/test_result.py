"""Explanation: what a person reads, and what a program loads."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import rectgrad
from tiny_model import tiny

X = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_repr_is_one_line_with_class_method_and_specificity():
    found = rectgrad.explain(X, tiny(), target="blue bird", q=60)
    said = repr(found)
    for part in ("blue bird", "rectgrad q=60", "tiny", "3 × 32 × 32", f"specificity {found.specificity:.2f}"):
        assert part in said
    assert "\n" not in said


def test_the_picture_shows_photo_map_overlay_and_notes():
    found = rectgrad.explain(X, tiny())
    drawn = found.show()
    alone = rectgrad.explain(X, tiny().module).show()
    assert drawn.width > 3 * 448
    assert 448 < alone.width < 2 * 448  # no photo, no overlay
    assert drawn.height > 448 + 24 + 30 + 12 + 20  # a line of notes below
    assert found.show(dark=True).getpixel((0, 0)) == (16, 17, 20)


def test_a_saved_picture_and_saved_data(tmp_path):
    found = rectgrad.explain(X, tiny(), target=2, q=60)
    assert found.save(tmp_path / "new" / "a.png") == tmp_path / "new" / "a.png"
    with Image.open(tmp_path / "new" / "a.png") as picture:
        difference = np.asarray(picture).astype(int) - np.asarray(found.show())
        assert abs(difference).max() <= 2  # rounded, for a smaller file
    found.save(str(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as data:
        assert np.array_equal(data["map"], found.map.numpy())
        assert np.array_equal(data["outputs"], found.outputs.numpy())
        assert int(data["target"]) == 2
        settings = json.loads(str(data["settings"]))
    assert (settings["model"], settings["method"], settings["options"]["q"]) == ("tiny", "rectgrad", 60)
    with pytest.raises(ValueError, match=r"ends in \.png or \.npz, not .*a\.jpg"):
        found.save(tmp_path / "a.jpg")


def test_a_notebook_shows_the_picture_and_escapes_names():
    found = rectgrad.explain(X, tiny(), labels=["<b>", "x & y", "c", "d"], target="<b>")
    html = found._repr_html_()
    assert "data:image/png;base64," in html
    assert "&lt;b&gt;" in html
    assert "x &amp; y" in html
    assert "<b>" not in html
    assert "Specificity" in re.sub(r"<[^>]*>", "", html)  # as text, not in the picture alone


@pytest.mark.parametrize("method", ["gradcam", "guided_gradcam"])
def test_the_picture_names_the_class_layer(method):
    found = rectgrad.explain(X, tiny(), method)
    [note] = [note for note in found.notes if "layer" in note]
    assert note == "Class layer: 3."
    assert not any("layer" in note for note in rectgrad.explain(X, tiny(), "saliency").notes)


def test_networks_with_several_labels_have_a_probability_for_each():
    net, picture = tiny(), torch.rand(3, 32, 32)
    model = nn.Sequential(*net.module, nn.Sigmoid(), nn.Flatten())
    found = rectgrad.explain(picture, model, "saliency")
    assert found.target.probability == pytest.approx(float(found.outputs.max()))
    assert [guess.probability for guess in found.top] == sorted(found.outputs.tolist(), reverse=True)


def test_a_map_that_is_no_picture():
    model = nn.Sequential(nn.Linear(7, 30), nn.ReLU(), nn.Linear(30, 5))
    found = rectgrad.explain(torch.rand(7), model, "saliency")
    with pytest.raises(ValueError, match=r"a map of shape \(7,\) cannot be drawn; its values are in `.map`"):
        found.show()
