"""The explorer in a real browser. Screenshots for the docs: RECTGRAD_SCREENSHOTS=docs/images."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import explorer
import rectgrad
from rectgrad import photos
from rectgrad.models import load
from rectgrad.photos import files

pytestmark = [
    pytest.mark.skipif(
        explorer.CHROMIUM is None,
        reason="NOT TESTED: the explorer's page, for there is no chromium here (apt-get install chromium)",
    ),
    pytest.mark.xdist_group("explorer"),
]


@pytest.fixture(scope="module")
def url():
    with explorer.served() as served:
        yield served.url


@pytest.fixture(scope="module")
def opened():
    with explorer.browser() as browser:
        yield browser


@pytest.fixture
def folder(tmp_path):
    for source in files.sample_photos():
        shutil.copy(source.path, tmp_path)
    Path(tmp_path, "broken.jpg").write_text("this is no photo")
    return tmp_path


def taken(page, kind: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.click(f"#save-{kind}")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def width_of(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.width


def test_a_walk_through(url, opened, tmp_path, monkeypatch):
    page = explorer.page_of(opened, url)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    explorer.sample(page)
    assert "tiger cat" in page.inner_text("#summary")
    assert explorer.changed(page, lambda: explorer.set_q(page, 90)) < 5000  # alone and timed: benchmarks
    assert "q=90" in page.inner_text("#maps")

    explorer.changed(page, lambda: explorer.choose(page, "#target", "Egyptian cat"))
    assert "Why Egyptian cat?" in page.inner_text("#summary")
    explorer.changed(page, lambda: explorer.choose(page, "#versus", "tabby"))
    assert "Egyptian cat rather than tabby" in page.inner_text("#summary")

    explorer.choose(page, "#methods", "gradient x input")
    page.wait_for_selector("#maps figure:nth-child(5)")
    shown = page.locator("#maps figcaption b").all_inner_texts()
    assert shown == ["photo", "rectgrad q=90", "saliency", "guided backprop", "gradient x input"]

    model = load("efficientnet_lite0")
    x = model.prepare(model.crop(photos.read(files.sample_photo()))).unsqueeze(0)
    target = rectgrad.contrast(285, 281)
    wanted = {
        "rectgrad": rectgrad.attribute(model.module, x, "rectgrad", target, q=90),
        "saliency": rectgrad.attribute(model.module, x, "saliency", target),
        "guided_backprop": rectgrad.attribute(model.module, x, "guided_backprop", target),
        "gradient_x_input": rectgrad.attribute(model.module, x, "gradient_x_input", target),
    }
    with np.load(taken(page, "npz", tmp_path)) as maps:
        assert set(maps) == {"photo", *wanted}
        for name, expected in wanted.items():
            assert np.array_equal(maps[name], expected[0].numpy()), name

    assert width_of(taken(page, "png", tmp_path)) > 5 * 448
    lines = taken(page, "py", tmp_path)
    shutil.copy(files.sample_photo(), tmp_path)
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(lines))["maps"]
    assert all(np.array_equal(made[name].numpy(), expected.numpy()) for name, expected in wanted.items())
    assert errors == []


def test_files_that_are_no_photos_get_a_sentence_and_the_page_goes_on(url, opened, tmp_path):
    page = explorer.page_of(opened, url)
    whole = files.sample_photo().read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    (tmp_path / "text.jpg").write_text("Dear diary")
    said = {
        "broken.png": "broken.png: broken",
        "huge.png": "20000 x 10000 pixels exceed the limit of 150 megapixels",
        "text.jpg": "text.jpg: not an image that can be read",
    }
    for name, sentence in said.items():
        page.set_input_files("#photo input[type=file]", tmp_path / name)
        page.wait_for_function(
            "text => document.querySelector('#summary .alert')?.innerText.includes(text)", arg=sentence
        )
        page.wait_for_selector("#photo input[type=file]", state="attached")
    explorer.sample(page, "coffee")
    assert "espresso" in page.inner_text("#summary")


def test_a_folder_is_browsed_with_arrow_keys_and_by_class(folder, opened):
    with explorer.served(str(folder)) as served:
        page = explorer.page_of(opened, served.url)
        photo = "#maps figure:nth-child(1) figcaption span"
        page.wait_for_selector(photo)
        assert page.inner_text(photo) == "astronaut.png"
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#summary .alert")
        assert "broken.jpg: not an image" in page.inner_text("#summary")
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"document.querySelector('{photo}')?.innerText === 'chelsea.png'")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#summary .alert")
        page.wait_for_function(
            "() => !document.querySelector('#filter input').value.includes('so far')", timeout=60_000
        )
        explorer.choose(page, "#filter", "missile")
        page.wait_for_function(f"document.querySelector('{photo}')?.innerText === 'rocket.jpg'")


def test_every_control_has_a_name_and_the_keyboard_is_enough(url, opened):
    page = explorer.page_of(opened, url)
    explorer.sample(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, textarea, select, button')]
        .filter(e => e.offsetParent !== null && e.type !== 'file')
        .filter(e => !(e.innerText?.trim() || e.ariaLabel || e.title || e.labels?.length))
        .filter(e => !e.ariaLabelledByElements?.length)
        .map(e => e.outerHTML.slice(0, 200))"""
    )
    assert nameless == []
    page.focus("#sample-rocket")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#maps')?.innerText.includes('rocket.jpg')")
    page.focus("#q input[type=range]")
    explorer.changed(page, lambda: page.keyboard.press("ArrowLeft"))
    assert "q=97.5" in page.inner_text("#maps")


def test_old_requests_are_dropped(url, opened):
    page = explorer.page_of(opened, url)
    explorer.sample(page)
    page.wait_for_timeout(1000)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.evaluate(
        """() => { const slider = document.querySelector('#q input[type=range]');
        for (let q = 60; q < 80; q++) {
          slider.value = q; slider.dispatchEvent(new Event('input', { bubbles: true }));
        } }"""
    )
    page.wait_for_function("document.querySelector('#maps').innerText.includes('q=79')")
    page.wait_for_timeout(1500)
    assert (
        2 <= len(sent) <= 6
    )  # the first and the last move; all twenty, each with its details, would be forty


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (1440, True), (390, False)])
def test_it_fits_wide_and_narrow_light_and_dark(url, opened, width, dark, tmp_path):
    page = explorer.page_of(opened, url, width, dark)
    explorer.sample(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.classList.contains('dark')") is dark
    page.wait_for_timeout(500)
    name = f"explorer-{width}{'-dark' if dark else ''}.png"
    shot = Path(os.environ.get("RECTGRAD_SCREENSHOTS", tmp_path), name)
    page.screenshot(path=shot)
    assert width_of(shot) == width
