"""The explorer's first screen: sizes, colours, keyboard and names of controls.

Writes the screenshots of the docs: RECTGRAD_SCREENSHOTS=docs/images.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import explorer

pytestmark = [
    pytest.mark.skipif(
        explorer.CHROMIUM is None,
        reason="NOT TESTED: the explorer's page, for there is no chromium here (apt-get install chromium)",
    ),
    pytest.mark.xdist_group("explorer"),
]
FIRST_SCREEN = [
    "#open",
    "#target",
    "#method",
    "#q",
    "#show-overlay",
    ".panel[data-method=photo] .view",
    ".panel[data-method=rectgrad] .view",
    ".panel[data-method=rectgrad] .legend",
    ".panel[data-method=rectgrad] .trust",
]
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}


def save(page, name: str, folder: Path) -> Path:
    """A screenshot, in few colours so that it is small."""
    path = Path(os.environ.get("RECTGRAD_SCREENSHOTS", folder), f"explorer-{name}.png")
    page.screenshot(path=path)
    with Image.open(path) as picture:
        whole = picture.convert("RGB")
    plain = [colour for _, colour in sorted(whole.getcolors(2**24), reverse=True)[:32]]  # stay exact
    mixed = whole.quantize(224, method=Image.Quantize.MAXCOVERAGE).getpalette()[: 3 * 224]
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(value for colour in plain for value in colour), *mixed])
    dithered = whole.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
    places = np.array(dithered)
    for i, colour in enumerate(plain):
        places[(np.asarray(whole) == colour).all(-1)] = i
    small = Image.fromarray(places)
    small.putpalette(palette.getpalette())
    small.save(path, optimize=True)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("device", SIZES)
def test_the_first_screen_needs_no_scrolling(url, opened, device, dark, tmp_path):
    width, height = SIZES[device]
    page = explorer.page_of(opened, url, width, height, dark)
    explorer.ready(page)
    page.wait_for_timeout(300)
    for selector in FIRST_SCREEN:
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 0, selector
        assert box["y"] >= 0, selector
        assert box["x"] + box["width"] <= width, selector
        assert box["y"] + box["height"] <= height, selector
    bar = page.locator("#bar").bounding_box()
    trust = page.locator(".panel[data-method=rectgrad] .trust").bounding_box()
    assert trust["y"] + trust["height"] <= bar["y"]  # nothing is covered
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    large = page.locator(".panel[data-method=rectgrad] .view").bounding_box()["width"]
    assert large >= (500 if device == "desktop" else 360)
    path = save(page, f"{device}-{'dark' if dark else 'light'}", tmp_path)
    with Image.open(path) as picture:
        assert picture.size == (width, height)
    page.context.close()


def test_many_maps_fill_the_width(url, opened):
    names = "rectgrad,saliency,gradcam,lrp,deconv,attn_lrp,guided_backprop"
    page = explorer.page_of(opened, url, *SIZES["desktop"], link=f"#photo=sample:chelsea&methods={names}")
    explorer.ready(page, 7)
    page.wait_for_timeout(500)
    boxes = [each.bounding_box() for each in page.locator(".panel .view").all()]
    assert min(box["width"] for box in boxes) >= 180
    assert len({box["x"] for box in boxes}) >= 4
    page.context.close()


def test_q_stays_at_hand_on_a_phone(url, opened):
    page = explorer.page_of(
        opened, url, *SIZES["phone"], link="#photo=sample:chelsea&methods=rectgrad,saliency"
    )
    explorer.ready(page, 2)
    for part in (0.3, 0.6, 1):
        page.evaluate("part => scrollTo(0, part * document.documentElement.scrollHeight)", part)
        box = page.locator("#q").bounding_box()
        assert 0 < box["y"] < SIZES["phone"][1] - box["height"]
    page.click("#target")
    page.wait_for_selector("#target-list li")
    listed = page.locator("#target-list").bounding_box()
    assert listed["x"] >= 0
    assert listed["x"] + listed["width"] <= 390
    page.context.close()


def test_photo_and_map_fit_the_screen_of_a_phone_when_enlarged(url, opened, tmp_path):
    page = explorer.page_of(opened, url, *SIZES["phone"])
    explorer.ready(page)
    page.click(".panel[data-method=rectgrad] .view")
    page.wait_for_timeout(300)
    for selector in (".panel[data-method=photo] .view", ".panel[data-method=rectgrad] .view", "#q", "#close"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= 844, selector
        assert box["width"] > 0
    page.context.close()


LUMINANCE = """
() => {
  const number = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = number(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const text = own || e.matches('input[type=text], input[type=number], select');
    if (!text || !e.checkVisibility() || !e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    if (style.clipPath !== 'none' || style.color === 'rgba(0, 0, 0, 0)') continue;
    const [a, b] = [light(number(style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([e.outerHTML.slice(0, 120), ratio.toFixed(2)]);
  }
  return found;
}
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read(url, opened, dark):
    """The contrast required by WCAG (AA), with every section of the page open."""
    page = explorer.page_of(opened, url, dark=dark)
    explorer.ready(page)
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    page.wait_for_selector("#layers figure")
    page.click("#share")
    assert page.evaluate(LUMINANCE) == []
    page.click("#method")
    assert page.evaluate(LUMINANCE) == []
    page.keyboard.press("Escape")
    page.click("#target")
    page.wait_for_selector("#target-list li")
    assert page.evaluate(LUMINANCE) == []
    page.keyboard.press("Escape")
    explorer.set_q(page, 100)
    page.wait_for_selector(".warnings li")
    assert page.evaluate(LUMINANCE) == []
    page.context.close()


def test_the_theme_is_switched_and_kept(url, opened):
    page = explorer.page_of(opened, url)
    explorer.ready(page)
    bright = explorer.pixels(page, ".panel[data-method=rectgrad] canvas.map")[0, 0, 0]
    page.click("#theme")
    page.wait_for_timeout(300)
    dark = explorer.pixels(page, ".panel[data-method=rectgrad] canvas.map")[0, 0, 0]
    assert bright > 250
    assert dark < 30
    page.reload()
    explorer.ready(page)
    assert explorer.pixels(page, ".panel[data-method=rectgrad] canvas.map")[0, 0, 0] == dark
    page.context.close()


# --- keyboard and screen readers ---


def test_every_control_has_a_name_and_help(url, opened):
    page = explorer.page_of(opened, url, link="#photo=sample:chelsea&methods=rectgrad,saliency,smoothgrad")
    page.wait_for_selector(".panel[data-method=saliency] .trust p")
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    page.click("#method")
    session = page.context.new_cdp_session(page)
    tree = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = "button combobox slider checkbox textbox spinbutton listbox link menuitem".split()
    controls = [node for node in tree if node.get("role", {}).get("value") in roles and not node["ignored"]]
    nameless = [node for node in controls if not node.get("name", {}).get("value", "").strip()]
    assert nameless == []
    names = [node["name"]["value"] for node in controls]
    assert len(controls) > 25
    assert {"Class to explain", "Rather than", "Model"} <= set(names)
    assert any(name.startswith("Method ") for name in names)
    assert any(name.startswith("q") for name in names)
    helpless = page.eval_on_selector_all(
        "input:not([type=file]):not([type=checkbox]), select, #options input",
        """all => all.filter(e => e.checkVisibility() && !e.title)
        .filter(e => !document.getElementById(e.getAttribute('aria-describedby'))?.textContent.trim())
        .map(e => e.outerHTML)""",
    )
    assert helpless == []
    page.context.close()


def test_the_keyboard_is_enough(url, opened):
    """Tab reaches every visible control, and each one works."""
    page = explorer.page_of(opened, url)
    explorer.ready(page)
    wanted = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, summary, a[href], [tabindex]')]
        .filter(e => e.checkVisibility() && !e.disabled && e.type !== 'file')
        .map((e, i) => (e.dataset.stop = i, i))"""
    )
    reached = set()
    for _ in range(2 * len(wanted)):
        page.keyboard.press("Tab")
        stop = page.evaluate("document.activeElement.dataset.stop")
        if stop is not None:
            reached.add(int(stop))
    assert reached == set(wanted)

    page.focus("#samples")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.querySelector('#question').innerText === 'Evidence for espresso'")
    explorer.ready(page)
    page.focus("#q")
    explorer.changed(page, lambda: page.keyboard.press("ArrowLeft"))
    assert page.inner_text(".panel[data-method=rectgrad] .settings") == "q=97.5"
    page.focus("#method")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")  # into the list
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "method"
    explorer.ready(page, 2)
    page.focus(".panel[data-method=rectgrad] .view")
    page.keyboard.press("Enter")
    assert page.is_visible("#toolbar")
    page.context.close()


def test_a_screen_reader_hears_what_changed(url, opened):
    page = explorer.page_of(opened, url)
    explorer.ready(page)
    page.wait_for_function("document.querySelector('#status').innerText.includes('specificity')")
    assert page.inner_text("#status").startswith("Maps for tiger cat: RectGrad, specificity 0.")
    page.context.close()


def test_nothing_is_loaded_from_elsewhere_and_the_policy_holds(url, opened):
    context = opened.new_context()
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_selector(".panel[data-method=rectgrad] .trust p")
    assert said == []
    assert all(each.startswith((url, "data:", "blob:")) for each in asked)
    context.close()
