"""The explorer's page in a real browser."""

from __future__ import annotations

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


@pytest.fixture
def page(opened, url):
    found = explorer.page_of(opened, url)
    yield found
    found.context.close()


@pytest.fixture
def folder(tmp_path):
    for source in files.sample_photos():
        shutil.copy(source.path, tmp_path)
    Path(tmp_path, "broken.jpg").write_text("this is no photo")
    return tmp_path


def taken(page, kind: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.click("#share")
        page.click(f"#save-{kind}")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def width_of(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.width


def check(page, *methods: str) -> None:
    """Selects or deselects methods in the list."""
    page.click("#method")
    for method in methods:
        page.click(f"#methods input[value={method}]")
    page.keyboard.press("Escape")


def test_a_walk_through(page, tmp_path, monkeypatch):
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    explorer.ready(page)
    assert page.inner_text("#question") == "Evidence for tiger cat"
    explorer.changed(page, lambda: explorer.set_q(page, 90))
    assert page.inner_text(".panel[data-method=rectgrad] .settings") == "q=90"

    explorer.changed(page, lambda: explorer.choose(page, "#target", "Egyptian cat"))
    assert page.inner_text("#question") == "Evidence for Egyptian cat"
    explorer.changed(page, lambda: explorer.choose(page, "#versus", "tabby"))
    assert page.inner_text("#question") == "Evidence for Egyptian cat rather than tabby"

    check(page, "saliency", "gradient_x_input")
    explorer.ready(page, 3)
    assert page.locator(".panel figcaption b").all_inner_texts() == [
        "Photo",
        "RectGrad",
        "Saliency",
        "Gradient x input",
    ]

    model = load("efficientnet_lite0")
    x = model.prepare(model.crop(photos.read(files.sample_photo()))).unsqueeze(0)
    target = rectgrad.contrast(285, 281)
    wanted = {
        "rectgrad": rectgrad.attribute(model.module, x, "rectgrad", target, q=90),
        "saliency": rectgrad.attribute(model.module, x, "saliency", target),
        "gradient_x_input": rectgrad.attribute(model.module, x, "gradient_x_input", target),
    }
    with np.load(taken(page, "npz", tmp_path)) as maps:
        assert set(maps) == {"photo", *wanted}
        for name, expected in wanted.items():
            assert np.array_equal(maps[name], expected[0].numpy()), name

    assert width_of(taken(page, "png", tmp_path)) > 4 * 448
    lines = taken(page, "py", tmp_path)
    shutil.copy(files.sample_photo(), tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.glob("*.png"))
    made = runpy.run_path(str(lines))["maps"]
    assert all(np.array_equal(made[name].numpy(), expected[0].numpy()) for name, expected in wanted.items())
    saved = set(tmp_path.glob("*.png")) - before
    assert {path.name for path in saved} == {f"chelsea-{name}.png" for name in wanted}
    assert errors == []


def test_the_page_draws_what_the_library_draws(page):
    explorer.ready(page)
    check(page, "saliency")
    explorer.ready(page, 2)
    model = load("efficientnet_lite0")
    crop = model.crop(photos.read(files.sample_photo()))
    x = model.prepare(crop).unsqueeze(0)
    for name in ("rectgrad", "saliency"):
        values = rectgrad.attribute(model.module, x, name)[0]
        shown = explorer.pixels(page, f".panel[data-method={name}] canvas.map")
        expected = np.asarray(rectgrad.image.colour(values), int)
        assert np.abs(shown[..., :3] - expected).max() <= 4, name  # the next colour of the table, at most
    page.click("#show-overlay")
    shown = explorer.pixels(page, ".panel[data-method=saliency] canvas.map").astype(float)
    pale = explorer.pixels(page, ".panel[data-method=saliency] canvas.base")
    size = tuple(reversed(shown.shape[:2]))
    base = np.asarray(Image.fromarray(pale[..., :3]).resize(size, Image.Resampling.BICUBIC), float)
    alpha = shown[..., 3:] / 255
    blended = shown[..., :3] * alpha + base * (1 - alpha)
    expected = np.asarray(rectgrad.image.overlay(crop, values), float)
    assert np.abs(blended - expected).mean() < 3


def test_invalid_photos_produce_an_error_message_and_the_page_keeps_working(page, tmp_path):
    explorer.ready(page)
    whole = files.sample_photo().read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    (tmp_path / "text.jpg").write_text("Dear diary")
    (tmp_path / "large.png").write_bytes(whole * (1 + 20 * 2**20 // len(whole)))
    said = {
        "broken.png": "broken.png: cannot be read",
        "huge.png": "20000 x 10000 pixels exceed the limit of 150 megapixels",
        "text.jpg": "text.jpg: not an image, or not in a supported format",
        "large.png": "large.png is larger than the limit of 20 MB.",
    }
    for name, sentence in said.items():
        page.set_input_files("#file", tmp_path / name)
        page.wait_for_function(
            "text => document.querySelector('#message').innerText.includes(text)", arg=sentence
        )
    page.set_input_files("#file", files.sample_photos()[1].path)
    page.wait_for_function("document.querySelector('#question').innerText === 'Evidence for espresso'")
    assert page.is_hidden("#message")


def test_a_folder_is_browsed_with_arrow_keys_and_by_class(folder, opened):
    with explorer.served(str(folder)) as served:
        page = explorer.page_of(opened, served.url)
        photo = ".panel[data-method=photo] .settings"
        explorer.ready(page)
        assert page.inner_text(photo) == "astronaut.png"
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#message:not([hidden])")
        assert "broken.jpg: not an image" in page.inner_text("#message")
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"document.querySelector('{photo}').innerText === 'chelsea.png'")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#message:not([hidden])")
        page.wait_for_function("!document.querySelector('#filter').innerText.includes('so far')")
        missile = page.eval_on_selector_all(
            "#filter option", "all => all.find(each => each.innerText.startsWith('missile')).value"
        )
        page.select_option("#filter", missile)
        page.wait_for_function(f"document.querySelector('{photo}').innerText === 'rocket.jpg'")
        assert "photo=folder:" in page.url
        page.context.close()


def test_maps_that_arrive_late_do_not_hide_an_error(folder, opened):
    with explorer.served(str(folder)) as served:
        page, held = explorer.page_of(opened, served.url), []
        explorer.ready(page)
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#message:not([hidden])")
        page.route("**/api/maps", lambda route: held.append(route))
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('#question').innerText.includes('cat')")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#message:not([hidden])")
        before = page.inner_text("#status")
        for route in held:
            route.continue_()
        page.wait_for_function(
            "before => document.querySelector('#status').textContent !== before", arg=before
        )
        assert "broken.jpg: not an image" in page.inner_text("#message")
        page.context.close()


# --- classes ---


def test_the_list_of_classes_is_searched_by_typing(page):
    explorer.ready(page)
    page.focus("#target")
    page.keyboard.press("Control+a")
    page.keyboard.type("cat", delay=20)
    page.wait_for_function("document.querySelector('#target-list .active')?.innerText.includes('cat')")
    page.wait_for_function("document.querySelectorAll('#target-list [role=option]').length > 10")
    found = page.eval_on_selector_all(
        "#target-list li", "all => all.map(each => each.firstChild.textContent)"
    )
    assert found[0] == "Egyptian cat"
    assert found.index("tiger cat") < found.index("tabby") < found.index("oystercatcher")
    page.keyboard.press("ArrowDown")
    active = page.get_attribute("#target", "aria-activedescendant")
    assert page.inner_text(f"#{active}").startswith(found[1])
    page.keyboard.press("Enter")
    page.wait_for_function(
        "name => document.querySelector('#question').innerText.includes(name)", arg=found[1]
    )
    page.focus("#target")
    page.keyboard.press("Control+a")
    page.keyboard.type("zzz")
    page.wait_for_selector("#target-list .none")
    page.keyboard.press("Escape")
    assert page.input_value("#target") == found[1]
    page.click("#target")
    page.wait_for_function("document.querySelectorAll('#target-list [role=option]').length === 1000")
    first = page.inner_text("#target-list li:first-child")
    assert "tiger cat" in first  # the network's best guess
    assert "%" in first


def test_a_guess_of_the_network_is_one_click_away(page):
    explorer.ready(page)
    explorer.changed(page, lambda: page.click("#guesses li:nth-child(2) button"))
    assert page.inner_text("#question") == "Evidence for Egyptian cat"
    assert page.input_value("#target") == "Egyptian cat"
    assert page.get_attribute("#guesses li:nth-child(2) button", "aria-pressed") == "true"


# --- links ---


def test_a_link_restores_the_view(page, opened, url):
    explorer.ready(page)
    explorer.changed(page, lambda: explorer.choose(page, "#target", "Egyptian cat"))
    explorer.changed(page, lambda: explorer.set_q(page, 87.5))
    check(page, "saliency")
    page.click("#show-overlay")
    explorer.ready(page, 2)
    page.click(".panel[data-method=saliency] .view")
    page.click("#zoom-in")
    page.click("#close")
    page.click("#share")
    page.click("#link")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url
    shown = [
        explorer.pixels(page, f".panel[data-method={name}] canvas.map") for name in ("rectgrad", "saliency")
    ]

    other = explorer.page_of(opened, url, link=link.removeprefix(url + "/"))
    explorer.ready(other, 2)
    assert other.inner_text("#question") == "Evidence for Egyptian cat"
    assert other.input_value("#q") == "87.5"
    for name, before in zip(("rectgrad", "saliency"), shown, strict=True):
        now = explorer.pixels(other, f".panel[data-method={name}] canvas.map")
        assert np.abs(now.astype(int) - before).max() <= 1, name
    other.goto(f"{url}/#photo=sample:coffee&methods=saliency&large=saliency&zoom=2,0.25,0")
    explorer.ready(other, 1)
    assert other.inner_text("#zoom") == "200 %"
    assert "espresso" in other.title()
    other.goto(f"{url}/#photo=sample:coffee&methods=nonsense&target=99999&zoom=x&RectGrad.q=%22&evil.x=1")
    other.wait_for_function("document.querySelector('#question').innerText === 'Evidence for espresso'")
    other.context.close()


def test_a_link_to_an_upload_asks_for_the_photo_and_keeps_the_settings(page, opened, url):
    explorer.ready(page)
    page.set_input_files("#file", files.sample_photos()[1].path)
    page.wait_for_function("document.querySelector('#question').innerText === 'Evidence for espresso'")
    explorer.ready(page)
    explorer.changed(page, lambda: explorer.set_q(page, 80))
    page.reload()  # the same session: the photo is still there
    page.wait_for_function("document.querySelector('#question').innerText === 'Evidence for espresso'")
    assert page.input_value("#q") == "80"
    other = explorer.page_of(opened, url, link=page.url.removeprefix(url + "/"))
    other.wait_for_selector("#message:not([hidden])")
    assert other.inner_text("#message") == "This link shows coffee.png. Open that photo to see the same view."
    other.set_input_files("#file", files.sample_photos()[1].path)
    explorer.ready(other)
    assert other.inner_text(".panel[data-method=rectgrad] .settings") == "q=80"
    other.context.close()


# --- enlarging ---


def transforms(page) -> list[str]:
    return page.eval_on_selector_all(
        ".panel:not([hidden]) .layers", "all => all.map(each => each.style.transform)"
    )


def test_photo_and_map_are_enlarged_and_move_together(page):
    explorer.ready(page)
    check(page, "saliency")
    explorer.ready(page, 2)
    small = page.locator(".panel[data-method=saliency] .view").bounding_box()["width"]
    page.click(".panel[data-method=saliency] .view")
    assert page.locator(".panel:visible").count() == 2
    assert page.is_visible(".panel[data-method=photo]")
    box = page.locator(".panel[data-method=saliency] .view").bounding_box()
    assert box["width"] > 1.4 * small
    centre = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*centre)
    page.mouse.wheel(0, -400)
    page.wait_for_function("document.querySelector('#zoom').innerText === '272 %'")
    page.mouse.down()
    page.mouse.move(centre[0] + 50, centre[1] + 20)
    page.mouse.up()
    first, second = transforms(page)
    assert first == second
    assert "scale(2.71" in first
    shift = float(first.removeprefix("translate(").split("%")[0])
    assert shift == pytest.approx(100 * 50 / box["width"], abs=0.5)
    assert page.is_visible("#q")  # the threshold stays at hand
    page.keyboard.press("Escape")
    assert page.locator(".panel:visible").count() == 3
    assert transforms(page)[0].endswith("scale(1)")
    page.keyboard.press("Enter")  # the focus is where it was
    assert page.is_visible("#toolbar")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#zoom") == "150 %"
    assert transforms(page)[0] == transforms(page)[1] == "translate(-10%, 0%) scale(1.5)"


# --- requests ---


def test_stale_requests_are_dropped(page):
    explorer.ready(page)
    explorer.be_patient(page)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.evaluate(
        """() => { const slider = document.querySelector('#q');
        for (let q = 60; q < 80; q++) {
          slider.value = q; slider.dispatchEvent(new Event('input', { bubbles: true }));
        } }"""
    )
    page.wait_for_function(
        "document.querySelector('.panel[data-method=rectgrad] .settings').innerText === 'q=79'"
    )
    page.wait_for_timeout(1500)
    assert 2 <= len(sent) <= 4  # the first and the last move, not all twenty


def test_a_slow_map_shows_its_progress_and_is_cancelled(opened, url):
    link = "#photo=sample:chelsea&methods=rectgrad,smoothgrad&SmoothGrad.samples=200"
    page = explorer.page_of(opened, url, link=link)
    page.wait_for_function(
        r"/^\d+ of 200$/.test(document.querySelector('.panel[data-method=smoothgrad] .time')?.innerText)"
    )
    assert page.is_visible(".panel[data-method=smoothgrad] progress")
    page.wait_for_selector(".panel[data-method=rectgrad] .trust:not(.old) b")  # long before the slow one
    assert page.inner_text(".panel[data-method=rectgrad] .trust b").startswith("Specificity")
    cancelled: list[str] = []
    page.on("requestfailed", lambda request: cancelled.append(request.url))
    page.click(".panel[data-method=smoothgrad] .remove")
    page.wait_for_function("!document.querySelector('.panel[data-method=smoothgrad]')")
    page.wait_for_timeout(500)
    assert [each.rsplit("/", 1)[1] for each in cancelled] == ["maps"]
    explorer.changed(page, lambda: explorer.set_q(page, 70))
    page.context.close()


def test_warnings_are_shown_beside_their_map(page):
    explorer.ready(page)
    assert page.is_hidden(".panel[data-method=rectgrad] .warnings")
    explorer.changed(page, lambda: explorer.set_q(page, 100))
    page.wait_for_selector(".panel[data-method=rectgrad] .warnings li")
    assert "is zero" in page.inner_text(".panel[data-method=rectgrad] .warnings")
    explorer.changed(page, lambda: explorer.set_q(page, 98))
    assert page.is_hidden(".panel[data-method=rectgrad] .warnings")


def test_a_map_for_any_class_comes_with_a_caution_and_a_way_on(page):
    explorer.ready(page)
    trust = page.inner_text(".panel[data-method=rectgrad] .trust")
    assert float(trust.split()[1].rstrip(":.,")) < 0.3
    assert "not why it chose" in trust
    page.click(".panel[data-method=rectgrad] .better")
    better = rectgrad.recommended("why this class")
    page.wait_for_selector(f".panel[data-method={better}] .trust p")
    assert page.locator(".panel").count() == 2
    assert f"methods={better}" in page.url


# --- details ---


def test_layers_sparsity_and_python_are_below_the_maps(page):
    explorer.ready(page)
    page.click("#layers summary")
    page.wait_for_selector("#layers figure")
    names = page.locator("#layers figcaption b").all_inner_texts()
    assert names[0] == "ReLU 1"
    assert "blocks" in names[1]
    assert "deepest layers may be blue" in " ".join(page.inner_text("#layers").split())
    page.click("#sparsity summary")
    page.wait_for_selector("#sparsity svg circle")
    assert page.locator("#sparsity circle").count() == 10
    page.click("#python summary")
    page.wait_for_function("document.querySelector('#python pre').innerText.includes('import rectgrad')")
    explorer.set_q(page, 91)
    page.wait_for_function("document.querySelector('#python pre').innerText.includes('91')")
