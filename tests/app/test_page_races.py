"""Answers that arrive late or in another order: the page always shows one photo, its class and its maps."""

from __future__ import annotations

import json
import shutil

import pytest

import explorer
from rectgrad.photos import files

pytestmark = [
    pytest.mark.skipif(explorer.CHROMIUM is None, reason="NOT TESTED: the explorer's page, without chromium"),
    pytest.mark.xdist_group("explorer"),
]
MAP = ".panel[data-method=rectgrad]"


@pytest.fixture
def page(opened, url):
    found = explorer.page_of(opened, url)
    explorer.ready(found)
    yield found
    found.context.close()


def held(page, path: str, count: int | None = None) -> list:
    """Holds the first requests to this path back, in a list; by default all of them."""
    requests: list = []
    page.route(f"**/{path}", lambda route: requests.append(route), times=count)
    return requests


def wait(page, condition: str, seconds: float = 20) -> None:
    page.wait_for_function(condition, timeout=1000 * seconds)


def wait_for(page, requests: list, count: int = 1) -> None:
    """Waits until as many requests are held."""
    while len(requests) < count:
        page.wait_for_timeout(20)


def drawn(page) -> bool:
    return page.eval_on_selector(f"{MAP} canvas.map", "canvas => canvas.width > 1")


def test_a_control_that_moves_while_a_photo_opens(page):
    opening = held(page, "api/open", 1)
    page.select_option("#samples", "sample:coffee")
    wait_for(page, opening)
    with page.expect_request("**/api/maps") as asked:
        explorer.changed(page, lambda: explorer.set_q(page, 80))
    assert json.loads(asked.value.post_data)["photo"] == "sample:chelsea"  # the photo that is shown
    explorer.ready(page)
    opening[0].continue_()
    wait(page, "document.querySelector('#question').innerText === 'Evidence for espresso'")
    explorer.ready(page)
    assert drawn(page)
    assert page.inner_text(f"{MAP} .settings") == "q=80"
    assert page.inner_text(f"{MAP} .legend").endswith("espresso")


def test_a_photo_that_cannot_be_opened_while_another_opens(page, tmp_path):
    """The page stays with the photo that it shows, not with one that never arrived."""
    (tmp_path / "text.jpg").write_text("Dear diary")
    question = page.inner_text("#question")
    opening = held(page, "api/open", 1)
    page.select_option("#samples", "sample:coffee")
    wait_for(page, opening)
    page.set_input_files("#file", tmp_path / "text.jpg")
    wait(page, "document.querySelector('#message').innerText.includes('not an image')")
    opening[0].continue_()
    with page.expect_request("**/api/maps") as asked:
        explorer.set_q(page, 80)
    assert json.loads(asked.value.post_data)["photo"] == "sample:chelsea"
    explorer.ready(page)
    assert page.inner_text("#question") == question
    assert "photo=sample:chelsea" in page.url


def test_a_failed_photo_keeps_what_was_changed_meanwhile(page):
    opening = held(page, "api/open", 1)
    page.select_option("#samples", "sample:coffee")
    wait_for(page, opening)
    explorer.changed(page, lambda: explorer.set_q(page, 80))
    opening[0].fulfill(status=400, json={"error": "broken"})
    wait(page, "document.querySelector('#message').innerText === 'broken'")
    assert page.input_value("#q") == "80"
    assert "q=80" in page.url


def test_class_names_that_arrive_after_another_photo_was_chosen(page):
    searching = held(page, "api/classes", 1)
    page.evaluate("location.hash = '#photo=sample:coffee&target=1'")
    wait_for(page, searching)
    page.select_option("#samples", "sample:rocket")
    wait(page, "document.querySelector('#question').innerText === 'Evidence for missile'")
    searching[0].continue_()
    page.wait_for_timeout(500)
    assert page.inner_text("#question") == "Evidence for missile"
    assert page.inner_text(".panel[data-method=photo] .settings") == "rocket.jpg"
    explorer.ready(page)
    assert drawn(page)


def test_an_upload_that_arrives_after_another_photo_was_chosen(page):
    uploads = held(page, "api/upload?*", 1)
    page.set_input_files("#file", files.sample_photos()[1].path)
    wait_for(page, uploads)
    page.select_option("#samples", "sample:rocket")
    wait(page, "document.querySelector('#question').innerText === 'Evidence for missile'")
    with page.expect_response("**/api/upload?*"):
        uploads[0].continue_()
    page.wait_for_timeout(1000)
    assert page.inner_text("#question") == "Evidence for missile"


def test_a_map_is_labelled_with_its_own_class(page):
    explorer.be_patient(page)
    asked = held(page, "api/maps", 2)
    before = page.get_attribute(MAP, "data-map")
    page.click("#guesses li:nth-child(2) button")
    wait_for(page, asked)
    second = page.inner_text("#guesses li:nth-child(2) span")
    page.click("#guesses li:nth-child(3) button")
    asked[0].continue_()
    page.wait_for_function(
        "([map, before]) => document.querySelector(map).dataset.map !== before", arg=[MAP, before]
    )
    assert page.inner_text(f"{MAP} .legend").endswith(second)
    wait_for(page, asked, 2)
    asked[1].continue_()


def test_every_press_of_an_arrow_key_is_a_step(opened, tmp_path):
    for source in files.sample_photos():
        shutil.copy(source.path, tmp_path)
    with explorer.served(str(tmp_path)) as served:
        page = explorer.page_of(opened, served.url)
        explorer.ready(page)
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        wait(page, "document.querySelector('.panel[data-method=photo] .settings').innerText === 'rocket.jpg'")
        page.context.close()
