"""compare, sweep and layers: one sheet for each photo."""

import re
from pathlib import Path

import pytest
from PIL import Image

from commands import TINY, photo, size_of


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
