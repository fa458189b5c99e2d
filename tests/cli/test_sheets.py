"""compare, sweep and layers: one sheet for each photo."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rectgrad
from commands import TINY, photo, size_of
from rectgrad import photos
from rectgrad.cli.sheets import caution_lines
from rectgrad.models import load


@pytest.mark.parametrize("command", ["compare", "sweep", "layers"])
def test_sheets_of_one_photo_and_of_a_folder(run, tmp_path, command):
    photo(tmp_path / "photos" / "a.png")
    photo(tmp_path / "photos" / "b & c.png", seed=1)
    options = ["--q", "0,60"] if command == "sweep" else ["--q", "60"]
    if command == "compare":
        options += ["--methods", "saliency,rectgrad"]
    status, out, _ = run(command, "photos/a.png", "--model", TINY, "--out", "one", *options)
    assert status == 0
    assert size_of(out.split()[-1])[0] > 100
    (tmp_path / "photos" / "broken.jpg").write_text("no image")
    status, out, err = run(command, "photos", "--model", TINY, "--out", "many", *options)
    assert status == 1
    assert "broken.jpg" in err
    page = tmp_path / out.split()[-1]
    assert re.findall(r'href="(.*?)"', page.read_text()) == ["a.png", "b%20%26%20c.png"]
    assert Path("many/b & c.png").exists()


def test_compare_puts_several_photos_on_one_sheet(run, tmp_path):
    photo(tmp_path / "photos" / "a.png")
    photo(tmp_path / "photos" / "b.png", seed=1)
    options = ["--model", TINY, "--methods", "saliency,rectgrad", "--q", "60", "--out", "r"]
    _, out, _ = run("compare", "photos/a.png", *options)
    single = size_of(out.split()[-1])
    _, out, _ = run("compare", "photos", "--together", *options)
    assert out.split()[-1] == "r/compare.png"
    assert size_of("r/compare.png")[1] > 1.5 * single[1]


@pytest.mark.filterwarnings("ignore:the map of sample")
def test_compare_takes_all_methods(run, tmp_path):
    status, _, err = run(
        "compare", photo(tmp_path / "a.png"), "--model", TINY, "--methods", "all", "--q", "60"
    )
    assert (status, err) == (0, "")


def test_layers_shows_each_rectified_layer(run, tmp_path):
    status, out, _ = run("layers", photo(tmp_path / "a.png"), "--model", TINY, "--q", "60")
    assert status == 0
    assert size_of(out.split()[-1])[1] > 300


def test_layers_never_takes_the_place_of_the_photo(run):
    Image.new("RGB", (40, 40), "red").save("mine.png")
    before = Path("mine.png").read_bytes()
    status, _, said = run("layers", "mine.png", "--model", "cifar10_cnn", "--out", ".")
    assert (status, Path("mine.png").read_bytes()) == (2, before)
    assert "the folder for the results" in said


OPTIONS = {
    "compare": ("--methods", "saliency,rectgrad", "--q", "60"),
    "sweep": ("--q", "0,60"),
    "layers": ("--methods", "saliency,rectgrad", "--q", "60"),
}


@pytest.mark.parametrize("command", OPTIONS)
def test_what_is_done_is_skipped_and_maps_are_kept(run, tmp_path, command):
    photo(tmp_path / "photos" / "n1" / "a.png")
    photo(tmp_path / "photos" / "b.png", seed=1)
    common = (command, "photos", "--model", TINY, "--out", "r")
    assert run(*common, *OPTIONS[command])[0] == 0
    first = {path: path.stat().st_mtime_ns for path in Path("r").rglob("*.png")}
    assert set(first) == {Path("r/n1/a.png"), Path("r/b.png")}
    Path("r/b.png").unlink()
    run(*common, *OPTIONS[command])
    assert Path("r/n1/a.png").stat().st_mtime_ns == first[Path("r/n1/a.png")]
    assert Path("r/b.png").exists()
    run(*common, *OPTIONS[command], "--maps", "npz")
    assert Path("r/n1/a.png").stat().st_mtime_ns != first[Path("r/n1/a.png")]
    assert Path("r/n1/a.npz").exists()
    second = Path("r/n1/a.png").stat().st_mtime_ns
    run(*common, *OPTIONS[command][:-1], "50", "--maps", "npz")
    assert Path("r/n1/a.png").stat().st_mtime_ns != second


def inputs_of(path):
    model = load(TINY)
    return model.module, model.prepare(model.crop(photos.read(path)))[None]


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_the_maps_are_those_of_attribute(run, tmp_path, kind):
    cat = photo(tmp_path / "cat.png")
    run("compare", cat, "--model", TINY, "--out", "r", *OPTIONS["compare"], "--maps", kind)
    if kind == "npy":
        found = list(np.load("r/cat.npy"))
    else:
        with np.load("r/cat.npz") as stored:
            found = [stored["saliency"], stored["rectgrad"]]
    methods = [rectgrad.Saliency(), rectgrad.RectGrad(q=60, positive_only=False)]
    for values, method in zip(found, methods, strict=True):
        assert np.allclose(values, rectgrad.attribute(*inputs_of(cat), method)[0].numpy(), atol=1e-6)
    record = json.loads(Path("r/cat.json").read_text())
    explained = rectgrad.explain(cat, TINY, methods[1])
    assert record["specificity"]["rectgrad"] == round(explained.specificity, 4)


def test_the_maps_of_all_layers_are_those_of_layer_attributions(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    run("layers", cat, "--model", TINY, "--out", "r", *OPTIONS["layers"], "--maps", "npz", "--count", "2")
    expected = rectgrad.layer_attributions(*inputs_of(cat), "saliency")
    with np.load("r/cat.npz") as stored:
        names = [name for name in stored if name.startswith("saliency")]
        assert names == [f"saliency.{i:03}.{name}" for i, (name, _) in enumerate(expected)]
        for name, (_, values) in zip(names, expected, strict=True):
            assert np.allclose(stored[name], values[0].numpy(), atol=1e-6)


def test_a_photo_named_like_the_common_sheet(run, tmp_path):
    photo(tmp_path / "compare.png")
    photo(tmp_path / "b.png", seed=1)
    command = ("compare", "compare.png", "b.png", "--model", TINY, "--together", "--out", "r")
    _, out, _ = run(*command, *OPTIONS["compare"])
    assert out.strip() == "r/compare.png"
    height = size_of("r/compare.png.png")[1] + size_of("r/b.png")[1]
    assert size_of("r/compare.png")[1] == height


def test_small_maps_are_enlarged(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    run("compare", cat, "--model", "cifar10_cnn", "--methods", "saliency,lrp", "--out", "r")
    run("sweep", cat, "--model", "cifar10_cnn", "--q", "50,90", "--out", "s")
    assert size_of("r/cat.png")[1] > 2 * 224  # two rows of 32 pixels
    assert size_of("s/cat.png")[0] > 4 * 224


def test_sheets_show_warnings_by_title():
    zero = Image.new("RGB", (8, 8))
    found = rectgrad.explain(zero, TINY, "saliency")
    several = {"a": replace(found, warnings=("x",)), "b": replace(found, warnings=("x", "y"))}
    assert caution_lines(several)[-2:] == ["Warning (all maps): x.", "Warning (b): y."]


def test_layers_of_a_transformer_are_refused_by_name(run, tmp_path):
    status, _, err = run("layers", photo(tmp_path / "cat.png"), "--model", "cifar10_vit")
    assert status == 2
    assert "no activation of cifar10_vit has rows and columns" in err


def test_sweep_refuses_fractions(run, tmp_path):
    cat = photo(tmp_path / "cat.png")
    status, _, err = run("sweep", cat, "--model", TINY, "--q", "0.5,0.98")
    assert (status, "use --q 98, not 0.98" in err) == (2, True)
    assert run("sweep", cat, "--model", TINY, "--q", "0.5,50")[0] == 0
