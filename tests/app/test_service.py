"""What the explorer computes, without a server."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import graphs
import rectgrad
from every_method import EVERY
from rectgrad.app import controls, drawing, query, script
from rectgrad.app.folder import ALL, Folder
from rectgrad.app.layer_names import readable
from rectgrad.app.query import Query
from rectgrad.app.service import QS, Service
from rectgrad.methods.catalog import METHODS
from rectgrad.models import load
from rectgrad.photos import UnreadableImageError


@pytest.fixture(scope="module")
def service():
    return Service(load("cifar10_cnn"))


def photo_of(path: Path, seed: int, size: int = 48) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def seen(service, tmp_path):
    path = photo_of(tmp_path / "noise.png", 0)
    return service.predict(path, "noise.png", "cifar10_cnn")


# --- controls ---


def test_controls_that_were_not_moved_leave_every_method_as_it_is_listed():
    options = {kind.__name__: query.defaults(kind) for kind, _ in query.kinds()}
    assert Query(tuple(METHODS), options).configured() == METHODS


def test_every_option_of_every_method_has_a_control_with_a_line_of_help():
    described = json.loads(json.dumps(controls.options()))  # as a page receives it
    wanted = {(type(m).__name__, f.name) for m in METHODS.values() for f in fields(m)}
    wanted -= {("ExpectedGradients", "baselines"), ("DeepLiftShap", "baselines")}  # tensors
    assert {(kind, field["name"]) for kind, own in described.items() for field in own} == wanted
    assert all(field["help"] and "\n" not in field["help"] for own in described.values() for field in own)
    sent = {kind: {field["name"]: field["default"] for field in own} for kind, own in described.items()}
    assert Query(tuple(METHODS), controls.parse(sent)).configured() == METHODS


def test_every_method_has_a_line_of_help():
    assert all(each["help"] for each in controls.methods())


def test_methods_that_need_a_tensor_are_not_offered():
    assert [each["name"] for each in controls.methods()] == [
        name for name in METHODS if name != "deeplift_shap"
    ]


def test_only_fast_methods_are_averaged():
    [over] = [each for each in controls.options()["ExpectedGradients"] if each["name"] == "over"]
    inner = [choice["value"] for choice in over["choices"]]
    assert "rectgrad" in inner
    assert not {"smoothgrad", "expected_gradients", "occlusion", "rise", "deeplift_shap"} & set(inner)


def test_a_control_that_was_moved_reaches_all_of_its_kind_and_no_other():
    found = Query(
        ("rectgrad", "rectgrad_prr", "saliency"), {"RectGrad": {"q": 90.0, "prr": False}}
    ).configured()
    assert found["rectgrad"] == rectgrad.RectGrad(q=90.0)
    assert found["rectgrad_prr"] == rectgrad.RectGrad(q=90.0, prr=True)
    assert found["saliency"] == rectgrad.Saliency()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RectGrad": {"nonsense": 1}}, "RectGrad has no option 'nonsense'"),
        ({"Nonsense": {}}, "unknown class of methods 'Nonsense'"),
        ({"RectGrad": {"tau": "abc"}}, "tau must be a number or empty, not 'abc'"),
    ],
)
def test_options_that_do_not_exist_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        controls.parse(given)


def test_a_map_takes_a_bounded_number_of_passes():
    with pytest.raises(ValueError, match="at most 10000 inputs for one map, not 1000000000"):
        controls.check(rectgrad.SmoothGrad(samples=10**9))


# --- maps ---


@pytest.mark.parametrize("name", EVERY)
def test_maps_are_those_of_attribute_bit_for_bit(service, seen, name):
    options = {"masks": 100} if name == "rise" else {}
    asked = Query((name,), {type(rectgrad.METHODS[name]).__name__: options}, target=3, versus=5)
    expected = rectgrad.attribute(
        load("cifar10_cnn").module, service.inputs(seen), name, rectgrad.contrast(3, 5), **options
    )
    assert np.array_equal(service.maps(seen, asked)[name].values, expected[0].numpy())


def test_a_packed_map_holds_the_capped_values(service, seen):
    flat = drawing.plane("saliency", service.maps(seen, Query(("saliency",)))["saliency"].values, Query(()))
    described, data = drawing.packed(flat)
    capped, limit = rectgrad.image.cap(flat)
    assert (described["height"], described["width"], described["signed"]) == (32, 32, True)
    assert described["limit"] == limit
    values = np.frombuffer(data, "<i2").reshape(32, 32) / drawing.FULL
    assert np.abs(values - capped / limit).max() <= 0.5 / drawing.FULL


def test_final_threshold_is_for_the_baselines_alone(service, seen):
    asked = Query(("rectgrad", "saliency"), {}, final_threshold=True)
    maps = service.maps(seen, asked)
    drawn = {name: drawing.plane(name, each.values, asked) for name, each in maps.items()}
    assert np.array_equal(drawn["rectgrad"], maps["rectgrad"].values.sum(0))
    assert (drawn["saliency"] != 0).mean() <= 0.06


def test_layers_are_those_of_the_first_method_that_has_some(service, seen):
    asked = Query(("smoothgrad", "rectgrad"), {"RectGrad": {"q": 90.0}})
    expected = rectgrad.layer_attributions(
        load("cifar10_cnn").module, service.inputs(seen), "rectgrad", seen.top, q=90
    )
    values = dict(expected)
    found = service.layers(seen, asked)
    assert found[0][0] == next(name for name, value in expected if value.dim() == 3)
    assert all(np.array_equal(plane, values[name][0].numpy()) for name, plane in found)
    assert service.layers(seen, Query(("random",))) == []


def test_sparsity_is_the_gini_index_of_the_map_at_q(service, seen):
    asked = Query(("rectgrad",), {"RectGrad": {"q": 50.0, "rule": "PR2"}})
    found = [service.sparsity(seen, asked, q) for q in QS]
    x, model = service.inputs(seen), load("cifar10_cnn").module
    maps = [rectgrad.attribute(model, x, "rectgrad", seen.top, q=q, rule="PR2").sum(1) for q in QS]
    assert found == pytest.approx([float(rectgrad.metrics.gini(each)[0]) for each in maps], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_blocks.15._relu1", "blocks 15, ReLU 1"),
        ("_relu0", "ReLU 0"),
        ("layer4.1.relu", "layer 4 1, ReLU"),
        ("features.3", "features 3"),
    ],
)
def test_layers_have_readable_names(name, expected):
    assert readable(name) == expected


# --- photos and classes ---


def test_photos_are_bounded_in_pixels(service, tmp_path):
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    with pytest.raises(UnreadableImageError, match=r"^mine: .*limit of 150 megapixels"):
        service.predict(tmp_path / "huge.png", "mine", "cifar10_cnn")


def test_the_photo_that_is_shown_is_the_crop_of_the_network_in_more_detail(service, tmp_path):
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 600, 3), dtype=np.uint8))
    wide.save(tmp_path / "wide.png")
    opened, shown = service.open(tmp_path / "wide.png", "wide.png", "cifar10_cnn")
    assert np.array_equal(np.asarray(shown), np.asarray(wide.crop((150, 0, 450, 300))))
    smaller = np.asarray(shown.resize((32, 32), Image.Resampling.BICUBIC), int)
    assert np.abs(smaller - np.asarray(opened.crop, int)).mean() < 2  # they differ at the edges


def test_models_are_loaded_by_their_listed_names_alone(service, tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
    for name in (f"{tmp_path / 'own.py'}:make", "timm:resnet18", "hf:x/y", "../cifar10_cnn", "nonsense"):
        with pytest.raises(ValueError, match="unknown model"):
            service.model(name)


def test_the_search_lists_cats_before_oystercatchers():
    names = load("efficientnet_lite0").names()
    found = [names[i][0] for i in rectgrad.models.classes.search(names, "cat")]
    cats = ["Egyptian cat", "Madagascar cat", "Persian cat", "Siamese cat", "tiger cat"]
    assert [name for name in found[:8] if name in cats] == [
        name for name in found[:8] if "cat" in name.split()
    ]
    assert set(cats) & set(found[:6])
    assert "tabby" in found  # by its other name
    assert found.index("tabby") < found.index("oystercatcher")
    assert found.index("catamaran") < found.index("oystercatcher")
    assert [names[i][0] for i in rectgrad.models.classes.search(names, "281")] == [names[281][0]]


def test_a_method_that_is_asked_for_often_is_captured(tmp_path, monkeypatch):
    def answers():
        """The maps of four photos, with and without their specificity, and of another threshold."""
        service = Service(load("cifar10_cnn"))
        for i in range(4):
            seen = service.predict(photo_of(tmp_path / f"{i}.png", i), f"{i}.png", "cifar10_cnn")
            found = service.map(seen, METHODS["rectgrad"], seen.top).explanation
            yield found.map, found.outputs
            again = service.measured(seen, METHODS["rectgrad"], seen.top)
            yield again.map, torch.tensor(again.specificity)
            yield service.map(seen, rectgrad.RectGrad(q=90.0 + i), seen.top).explanation.map, found.outputs

    expected = list(answers())
    graphs.on_the_cpu(monkeypatch, after=2)
    for found, other in zip(answers(), expected, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, other, strict=True))
    assert graphs.Graph.replays == 2 + 3 * 3  # checks; of later photos: the map, and two for its number


def test_classes_without_names_can_be_chosen_too(service, seen, tmp_path):
    named = service.classes(seen, "")
    assert sorted(each["index"] for each in named) == list(range(10))
    nameless = Service(replace(load("cifar10_cnn"), labels=[], synonyms=[]))
    path = photo_of(tmp_path / "a.png", 0)
    found = nameless.classes(nameless.predict(path, "a.png", "cifar10_cnn"), "")
    assert sorted(each["label"] for each in found) == [f"class {i}" for i in range(10)]


def test_the_python_lines_say_what_was_moved(seen):
    asked = Query(("rectgrad", "smoothgrad"), {"RectGrad": {"q": 90.0}, "SmoothGrad": {"over": "rectgrad"}})
    lines = script.lines(
        seen, asked, Service(load("cifar10_cnn"), weights=Path("w.pt")).load_arguments("cifar10_cnn")
    )
    assert "load('cifar10_cnn', weights='w.pt')" in lines
    own = Service(load("cifar10_cnn"), source="/a/own.py:make")  # its model has another name
    assert own.load_arguments("cifar10_cnn") == "'/a/own.py:make'"
    assert f"'rectgrad', target={seen.top}, q=90.0" in lines
    assert ".save(" in lines
    assert "'smoothgrad', target=" in lines
    assert "over='rectgrad'" in lines


# --- a folder ---


def test_a_folder_is_stepped_through_by_class(service, tmp_path):
    for i in range(5):
        photo_of(tmp_path / f"{i}.png", i)
    (tmp_path / "9.png").write_text("no photo")
    folder = Folder(tmp_path, service)
    folder.start()
    assert folder.finished.wait(30)
    assert len(folder) == 6
    assert len(folder.classes) == 5
    assert folder.step(5, 1, ALL) == 0
    assert folder.step(0, -1, ALL) == 5
    wanted = str(folder.classes[2])
    assert folder.step(2, 1, wanted) in folder.rows(wanted)
    assert folder.choices()[0][0] == "all photos (6)"


def test_a_link_names_the_same_photo_when_others_are_added(service, tmp_path):
    for name in ("b.png", "d.png"):
        photo_of(tmp_path / name, 0)
    before = Folder(tmp_path, service)
    for name in ("a.png", "c.png", "e.png"):
        photo_of(tmp_path / name, 1)
    after = Folder(tmp_path, service)
    for id, i in before.ids.items():
        assert after.sources[after.ids[id]].path == before.sources[i].path


def test_a_single_output_has_no_probability_and_several_labels_have_their_own(tmp_path):
    net = load("cifar10_cnn")
    path = photo_of(tmp_path / "noise.png", 0)
    layers = nn.Sequential(net.module, nn.Linear(10, 1))
    single = Service(replace(net, module=layers, labels=[], synonyms=[])).predict(path, "a", net.name)
    assert [guess.label for guess in single.guesses] == ["output"]
    assert math.isnan(single.guesses[0].probability)
    several = Service(replace(net, module=nn.Sequential(net.module, nn.Sigmoid()))).predict(
        path, "a", net.name
    )
    outputs = torch.sigmoid(net.module(net.prepare(several.crop)[None]))[0].detach()
    assert several.guesses[0].probability == pytest.approx(float(outputs.max()), abs=1e-5)


def test_layers_without_rows_and_columns_are_refused(tmp_path):
    service = Service(load("cifar10_vit"))
    seen = service.predict(photo_of(tmp_path / "noise.png", 0), "noise.png", "cifar10_vit")
    with pytest.raises(ValueError, match="no activation of cifar10_vit has rows and columns"):
        service.layers(seen, Query(("rectgrad",)))
