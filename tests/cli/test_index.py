"""The index page of a run, in a real browser and from disk."""

import json
from pathlib import Path

import pytest
from PIL import Image

from explorer import CHROMIUM, browser
from rectgrad.cli.index import Index, page

in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT TESTED: the index page, as there is no chromium here"
)


def record(out: Path, name: str, label: str, confidence: float, specificity, caution="", warnings=()):
    for path in (out / f"{name}.png", out / "thumbnails" / f"{name}.jpg"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(path)
    return {
        "image": f"photos/{name}.jpg",
        "target": {"index": 0, "name": label, "confidence": confidence},
        "specificity": specificity,
        "caution": caution,
        "warnings": list(warnings),
        "picture": f"{name}.png",
        "thumbnail": f"thumbnails/{name}.jpg",
        "settings": {"model": "tiny", "method": "rectgrad", "options": {"q": 98.0}},
    }


ODD = "n1/50% <b>&\"' #?"


@pytest.fixture
def written(tmp_path):
    index = Index(tmp_path, "explain", 4)
    index.add(record(tmp_path, "b", "<script>alert(1)</script>", 0.9, 0.1, "this map is low; use x"))
    index.add(record(tmp_path, "a", "tabby cat", 0.2, 0.9))
    index.add(record(tmp_path, ODD, "oystercatcher", 0.5, None, warnings=["the map is zero"]))
    index.add(None)
    index.write()
    return tmp_path / "index.html"


@pytest.fixture(scope="module")
def opened():
    with browser() as found:
        yield found


@pytest.fixture
def tab(opened, written):
    """The page on a phone. At the end: no error, no request that failed, no dialog."""
    context = opened.new_context(viewport={"width": 390, "height": 844})
    found, problems = context.new_page(), []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("requestfailed", lambda request: problems.append(request.url))
    found.on("dialog", lambda dialog: problems.append(dialog.message))
    found.goto(written.as_uri())
    yield found
    assert problems == []
    context.close()


def shown(tab):
    return tab.eval_on_selector_all("#cards li:not([hidden])", "cards => cards.map((c) => c.dataset.name)")


@in_browser
def test_every_photo_is_there_and_its_picture_opens(tab):
    assert shown(tab) == ["a", "b", ODD]
    for card in tab.locator("#cards li").all():
        card.scroll_into_view_if_needed()
    tab.wait_for_function("[...document.images].every((i) => i.complete && i.naturalWidth === 8)")
    assert "<script>alert(1)</script>" in tab.inner_text("#cards")
    tab.click("li:last-child a")
    tab.wait_for_url("**/*.png")
    assert tab.evaluate("document.images[0].naturalWidth") == 8


@in_browser
def test_filter_and_sort(tab):
    tab.get_by_label("Filter").fill("cat")
    assert shown(tab) == ["a", ODD]
    assert tab.inner_text("#count") == "2 of 3 shown"
    tab.get_by_label("Filter").fill("")
    orders = {
        "highest confidence": ["b", ODD, "a"],
        "lowest specificity": ["b", "a", ODD],  # unknown ones last
        "highest specificity": ["a", "b", ODD],
        "class": ["b", ODD, "a"],
    }
    for label, order in orders.items():
        tab.get_by_label("Sort by").select_option(label)
        assert shown(tab) == order
    for label, some in {"low specificity": ["b"], "with warnings": [ODD], "other specificity": ["a"]}.items():
        tab.get_by_label("Show").select_option(label)
        assert shown(tab) == some


@in_browser
def test_numbers_and_cautions_can_be_read_on_a_phone(tab):
    text = tab.inner_text("body")
    assert "Specificity below 0.3 for 1 of 3 photos. Such a map is low; use x." in text
    assert "Model: tiny. Method: rectgrad, q = 98." in text
    assert "more to do" not in text
    numbers = tab.locator("li:nth-child(2) p").first.inner_text()
    assert numbers.splitlines() == ["confidence 90%", "specificity 0.10 low"]
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


@in_browser
def test_without_its_script_the_page_shows_everything(opened, written):
    context = opened.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(written.as_uri())
    assert tab.locator("#cards li").count() == 3
    assert not tab.locator("#controls").is_visible()
    context.close()


def test_records_of_earlier_runs_stay(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(record(tmp_path, "a", "cat", 0.5, 0.5)))
    (tmp_path / "mine.json").write_text('{"settings": 1}')
    index = Index(tmp_path, "explain", 2)
    index.add(record(tmp_path, "b", "dog", 0.5, 0.5))
    index.write()
    names = [json.loads(line)["picture"] for line in (tmp_path / "explained.jsonl").read_text().splitlines()]
    assert names == ["a.png", "b.png"]
    assert "1 more to do" in (tmp_path / "index.html").read_text()


def test_a_sheet_of_several_maps_has_several_numbers(tmp_path):
    several = record(tmp_path, "a", "cat", 0.5, {"saliency": 0.625, "random": None})
    assert "saliency <b>0.62</b>, random <b>–</b>" in page([several], "compare")
    many = record(tmp_path, "a", "cat", 0.5, {f"q = {q}": q / 100 for q in range(0, 60, 10)})
    assert "specificity <b>0.00</b> to <b>0.50</b>" in page([many], "sweep")
